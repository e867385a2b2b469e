// Four elements at a time: AArch64's NEON. Included by kernels_neon.cpp only, inside its anonymous namespace.
struct Vec {
    static constexpr std::size_t kWidth = 4;
    static constexpr std::size_t kAccumulators = 2;
    using F = float32x4_t;
    using U = uint32x4_t;
    using D = float64x2_t;

    static F set(float x) { return vdupq_n_f32(x); }
    static U setu(std::uint32_t x) { return vdupq_n_u32(x); }
    static F load(const float* p) { return vld1q_f32(p); }
    static void store(float* p, F x) { vst1q_f32(p, x); }
    static U load_u16(const std::uint16_t* p) { return vmovl_u16(vld1_u16(p)); }
    static U load_s16(const std::int16_t* p) { return vreinterpretq_u32_s32(vmovl_s16(vld1_s16(p))); }
    // Two vectors from and to 16 bits each, of which they have the upper or the lower half.
    static void load_upper(const std::uint16_t* p, U (&x)[2]) {
        const uint16x8_t words = vld1q_u16(p);
        x[0] = vshll_n_u16(vget_low_u16(words), 16);
        x[1] = vshll_high_n_u16(words, 16);
    }
    static uint16x8_t words(U x) { return vreinterpretq_u16_u32(x); }
    static void store_upper(std::uint16_t* p, const U (&x)[2]) {
        vst1q_u16(p, vuzp2q_u16(words(x[0]), words(x[1])));
    }
    static void stream_upper(std::uint16_t* p, const U (&x)[2]) { store_upper(p, x); }
    static void store_lower(std::uint16_t* p, const U (&x)[2]) {
        vst1q_u16(p, vuzp1q_u16(words(x[0]), words(x[1])));
    }

    static U load_u8(const std::uint8_t* p) {
        std::uint32_t four;
        __builtin_memcpy(&four, p, sizeof(four));
        return vmovl_u16(vget_low_u16(vmovl_u8(vcreate_u8(four))));
    }
    static void store_u8(std::uint8_t* p, const U (&x)[4]) {
        const uint16x8_t low = vuzp1q_u16(words(x[0]), words(x[1]));
        const uint16x8_t high = vuzp1q_u16(words(x[2]), words(x[3]));
        vst1q_u8(p, vuzp1q_u8(vreinterpretq_u8_u16(low), vreinterpretq_u8_u16(high)));
    }
    // Codes below 128, with the signs of x.
    static void store_signed(std::uint8_t* p, const U (&codes)[4], const F (&x)[4]) {
        U found[4];
        for (int k = 0; k < 4; ++k) {
            found[k] = band_or(shr<24>(bits(x[k])), setu(0x80u), codes[k]);
        }
        store_u8(p, found);
    }
    // Codes below 256, or 1 instead of 0 where x is above zero; it is not below.
    static void store_positive(std::uint8_t* p, const U (&codes)[4], const F (&x)[4]) {
        U found[4];
        for (int k = 0; k < 4; ++k) {
            found[k] = max(codes[k], min(bits(x[k]), setu(1u)));
        }
        store_u8(p, found);
    }

    static U iota() {
        constexpr std::uint32_t kNumbers[4] = {0, 1, 2, 3};
        return vld1q_u32(kNumbers);
    }
    static U bits(F x) { return vreinterpretq_u32_f32(x); }
    static F real(U x) { return vreinterpretq_f32_u32(x); }
    static U add(U a, U b) { return vaddq_u32(a, b); }
    static U sub(U a, U b) { return vsubq_u32(a, b); }
    static U mul(U a, U b) { return vmulq_u32(a, b); }
    static U max(U a, U b) { return vmaxq_u32(a, b); }
    static U min(U a, U b) { return vminq_u32(a, b); }
    static std::uint32_t largest(U a) { return vmaxvq_u32(a); }
    static U band(U a, U b) { return vandq_u32(a, b); }
    static U bor(U a, U b) { return vorrq_u32(a, b); }
    static U bxor(U a, U b) { return veorq_u32(a, b); }
    static U bxor3(U a, U b, U c) { return bxor(bxor(a, b), c); }
    static U band_or(U a, U b, U c) { return bor(band(a, b), c); }
    template <int N>
    static U shl(U a) {
        return vshlq_n_u32(a, N);
    }
    template <int N>
    static U shr(U a) {
        return vshrq_n_u32(a, N);
    }

    static F addf(F a, F b) { return vaddq_f32(a, b); }
    static F subf(F a, F b) { return vsubq_f32(a, b); }
    static F mulf(F a, F b) { return vmulq_f32(a, b); }
    static F divf(F a, F b) { return vdivq_f32(a, b); }
    static F sqrtf(F a) { return vsqrtq_f32(a); }
    static F fma(F a, F b, F c) { return vfmaq_f32(c, a, b); }
    static F canonical_nan(F x) { return vbslq_f32(vceqq_f32(x, x), x, real(setu(0x7fc00000u))); }
    static F canonical_result(F x) { return canonical_nan(x); }  // of x without subnormals
    static F sign(F x) {                                         // -1, 0 or 1; a NaN stays one
        const F one = real(bor(band(bits(x), setu(0x80000000u)), setu(0x3f800000u)));
        return vbslq_f32(vcgtq_f32(vabsq_f32(x), vdupq_n_f32(0.0f)), one, x);
    }

    static F load_f16(const std::uint16_t* p) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p))); }
    // Two vectors of a sign, 4 bits of exponent and 3 of mantissa, to float16, which has one bit of exponent
    // more.
    static void e4m3_to_f16(const std::uint8_t* from, std::uint16_t* to) {
        const int16x8_t code = vmovl_s8(vreinterpret_s8_u8(vld1_u8(from)));
        vst1q_u16(to, vandq_u16(vreinterpretq_u16_s16(vshlq_n_s16(code, 7)), vdupq_n_u16(0xbf80)));
    }
    static void store_f16(std::uint16_t* p, F x) { vst1_u16(p, vreinterpret_u16_f16(vcvt_f16_f32(x))); }
    static void stream_f16(std::uint16_t* p, F x) { store_f16(p, x); }

    static D zero() { return vdupq_n_f64(0.0); }
    static void add_squares(D* acc, F x) {
        const D low = vcvt_f64_f32(vget_low_f32(x));
        const D high = vcvt_high_f64_f32(x);
        acc[0] = vfmaq_f64(acc[0], low, low);
        acc[1] = vfmaq_f64(acc[1], high, high);
    }
    static void store_d(double* p, D x) { vst1q_f64(p, x); }
    static void stream_line(void* to, const void* from) { __builtin_memcpy(to, from, 64); }
    static void fence() {}
};
