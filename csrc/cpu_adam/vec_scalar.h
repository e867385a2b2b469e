// One element at a time, on any machine: the reading copy of what the vector paths do.
// Included by kernels_scalar.cpp only, inside its anonymous namespace.
struct Vec {
    static constexpr std::size_t kWidth = 1;
    static constexpr std::size_t kAccumulators = 1;  // D per F
    using F = float;
    using U = std::uint32_t;
    using D = double;

    static F set(float x) { return x; }
    static U setu(std::uint32_t x) { return x; }
    static F load(const float* p) { return *p; }
    static void store(float* p, F x) { *p = x; }
    static U load_u16(const std::uint16_t* p) { return *p; }
    static U load_s16(const std::int16_t* p) {
        return static_cast<std::uint32_t>(static_cast<std::int32_t>(*p));
    }
    // Two numbers from and to 16 bits each, of which they have the upper or the lower half.
    static void load_upper(const std::uint16_t* p, U (&x)[2]) {
        x[0] = std::uint32_t{p[0]} << 16;
        x[1] = std::uint32_t{p[1]} << 16;
    }
    static void store_upper(std::uint16_t* p, const U (&x)[2]) {
        p[0] = static_cast<std::uint16_t>(x[0] >> 16);
        p[1] = static_cast<std::uint16_t>(x[1] >> 16);
    }
    static void stream_upper(std::uint16_t* p, const U (&x)[2]) { store_upper(p, x); }
    static void store_lower(std::uint16_t* p, const U (&x)[2]) {
        p[0] = static_cast<std::uint16_t>(x[0]);
        p[1] = static_cast<std::uint16_t>(x[1]);
    }

    static U load_u8(const std::uint8_t* p) { return *p; }
    // Codes below 128, with the signs of x.
    static void store_signed(std::uint8_t* p, const U (&codes)[4], const F (&x)[4]) {
        for (int k = 0; k < 4; ++k) {
            p[k] = static_cast<std::uint8_t>(codes[k] | (bits(x[k]) >> 24 & 0x80u));
        }
    }
    // Codes below 256, or 1 instead of 0 where x is above zero; it is not below.
    static void store_positive(std::uint8_t* p, const U (&codes)[4], const F (&x)[4]) {
        for (int k = 0; k < 4; ++k) {
            p[k] = static_cast<std::uint8_t>(max(codes[k], min(bits(x[k]), 1u)));
        }
    }

    static U iota() { return 0; }
    static U bits(F x) { return __builtin_bit_cast(std::uint32_t, x); }
    static F real(U x) { return __builtin_bit_cast(float, x); }
    static U add(U a, U b) { return a + b; }
    static U sub(U a, U b) { return a - b; }
    static U mul(U a, U b) { return a * b; }
    static U max(U a, U b) { return a > b ? a : b; }
    static U min(U a, U b) { return a < b ? a : b; }
    static std::uint32_t largest(U a) { return a; }
    static U band(U a, U b) { return a & b; }
    static U bor(U a, U b) { return a | b; }
    static U bxor(U a, U b) { return a ^ b; }
    static U bxor3(U a, U b, U c) { return a ^ b ^ c; }
    static U band_or(U a, U b, U c) { return (a & b) | c; }
    template <int N>
    static U shl(U a) {
        return a << N;
    }
    template <int N>
    static U shr(U a) {
        return a >> N;
    }

    static F addf(F a, F b) { return a + b; }
    static F subf(F a, F b) { return a - b; }
    static F mulf(F a, F b) { return a * b; }
    static F divf(F a, F b) { return a / b; }
    static F sqrtf(F a) { return std::sqrt(a); }
    static F fma(F a, F b, F c) { return std::fma(a, b, c); }
    static F canonical_nan(F x) { return x != x ? real(0x7fc00000u) : x; }
    static F canonical_result(F x) { return canonical_nan(x); }  // of x without subnormals
    static F sign(F x) {                                         // -1, 0 or 1; a NaN stays one
        return x < 0.0f || x > 0.0f ? std::copysign(1.0f, x) : x;
    }

    static F load_f16(const std::uint16_t* p) {
        const std::uint32_t sign = (*p & 0x8000u) << 16;
        const std::uint32_t exponent = (*p >> 10) & 31u;
        const std::uint32_t mantissa = *p & 0x3ffu;
        if (exponent == 31) {
            return real(sign | 0x7f800000u | mantissa << 13 | (mantissa != 0 ? 0x400000u : 0u));
        }
        if (exponent == 0) {
            return real(sign | bits(static_cast<float>(mantissa) * 0x1p-24f));
        }
        return real(sign | (exponent + 112) << 23 | mantissa << 13);
    }
    // Two numbers of a sign, 4 bits of exponent and 3 of mantissa, to float16, which has one bit of exponent
    // more.
    static void e4m3_to_f16(const std::uint8_t* from, std::uint16_t* to) {
        for (int k = 0; k < 2; ++k) {
            to[k] = static_cast<std::uint16_t>((from[k] & 0x80u) << 8 | (from[k] & 0x7fu) << 7);
        }
    }
    static U to_f16(F x) {  // x is no NaN but the canonical one
        const std::uint32_t sign = bits(x) >> 16 & 0x8000u;
        const std::uint32_t magnitude = bits(x) & 0x7fffffffu;
        if (magnitude > 0x7f800000u) {
            return sign | 0x7e00u;
        }
        if (magnitude >= 0x477ff000u) {  // 65520 and above round to infinity
            return sign | 0x7c00u;
        }
        if (magnitude <
            0x38800000u) {  // below 2^-14: 0.5 has the unit of the float16 subnormals, the sum rounds to it
            return sign | (bits(real(magnitude) + 0.5f) - 0x3f000000u);
        }
        return sign | (magnitude + 0xfffu + (magnitude >> 13 & 1u) - 0x38000000u) >> 13;
    }
    static void store_f16(std::uint16_t* p, F x) { *p = static_cast<std::uint16_t>(to_f16(x)); }
    static void stream_f16(std::uint16_t* p, F x) { store_f16(p, x); }

    static D zero() { return 0.0; }
    // The square of a float32 is exact in float64: one rounding, fused or not.
    static void add_squares(D* acc, F x) { acc[0] += static_cast<double>(x) * static_cast<double>(x); }
    static void store_d(double* p, D x) { *p = x; }
    static void stream_line(void* to, const void* from) { __builtin_memcpy(to, from, 64); }
    static void fence() {}
};
