// Eight elements at a time: AVX2, FMA and F16C. Included by kernels_avx2.cpp only, inside its anonymous
// namespace.
struct Vec {
    static constexpr std::size_t kWidth = 8;
    static constexpr std::size_t kAccumulators = 2;
    using F = __m256;
    using U = __m256i;
    using D = __m256d;

    static F set(float x) { return _mm256_set1_ps(x); }
    static U setu(std::uint32_t x) { return _mm256_set1_epi32(static_cast<int>(x)); }
    static F load(const float* p) { return _mm256_loadu_ps(p); }
    static void store(float* p, F x) { _mm256_storeu_ps(p, x); }
    static __m128i load_half(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }
    static U load_u16(const std::uint16_t* p) { return _mm256_cvtepu16_epi32(load_half(p)); }
    static U load_s16(const std::int16_t* p) { return _mm256_cvtepi16_epi32(load_half(p)); }
    // Two vectors from and to 16 bits each, of which they have the upper or the lower half.
    static void load_upper(const std::uint16_t* p, U (&x)[2]) {
        x[0] = shl<16>(load_u16(p));
        x[1] = shl<16>(load_u16(p + kWidth));
    }
    // Instructions pack within 128 bits.
    static U pack_u16(U a, U b) { return _mm256_permute4x64_epi64(_mm256_packus_epi32(a, b), 0xd8); }
    static U upper(const U (&x)[2]) { return pack_u16(shr<16>(x[0]), shr<16>(x[1])); }
    static void store_upper(std::uint16_t* p, const U (&x)[2]) {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), upper(x));
    }
    static void stream_upper(std::uint16_t* p, const U (&x)[2]) {
        _mm256_stream_si256(reinterpret_cast<__m256i*>(p), upper(x));
    }
    static void store_lower(std::uint16_t* p, const U (&x)[2]) {
        const U zero = _mm256_setzero_si256();
        const U words = pack_u16(_mm256_blend_epi16(x[0], zero, 0xaa), _mm256_blend_epi16(x[1], zero, 0xaa));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), words);
    }

    static U load_u8(const std::uint8_t* p) {
        return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
    }
    // Four vectors of numbers below 256, in the order in which instructions pack within 128 bits; and of
    // their signs.
    static U pack_u8(const U (&x)[4]) {
        return _mm256_packus_epi16(_mm256_packus_epi32(x[0], x[1]), _mm256_packus_epi32(x[2], x[3]));
    }
    static U pack_signs(const F (&x)[4]) {
        return _mm256_packs_epi16(_mm256_packs_epi32(bits(x[0]), bits(x[1])),
                                  _mm256_packs_epi32(bits(x[2]), bits(x[3])));
    }
    static void store_packed(std::uint8_t* p, U bytes) {
        const U order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_permutevar8x32_epi32(bytes, order));
    }
    // Codes below 128, with the signs of x.
    static void store_signed(std::uint8_t* p, const U (&codes)[4], const F (&x)[4]) {
        store_packed(p, band_or(pack_signs(x), setu(0x80808080u), pack_u8(codes)));
    }
    // Codes below 256, or 1 instead of 0 where x is above zero; it is not below.
    static void store_positive(std::uint8_t* p, const U (&codes)[4], const F (&x)[4]) {
        const U above = _mm256_packus_epi16(_mm256_packs_epi32(bits(x[0]), bits(x[1])),
                                            _mm256_packs_epi32(bits(x[2]), bits(x[3])));
        store_packed(p, _mm256_max_epu8(pack_u8(codes), _mm256_min_epu8(above, setu(0x01010101u))));
    }

    static U iota() { return _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7); }
    static U bits(F x) { return _mm256_castps_si256(x); }
    static F real(U x) { return _mm256_castsi256_ps(x); }
    static U add(U a, U b) { return _mm256_add_epi32(a, b); }
    static U sub(U a, U b) { return _mm256_sub_epi32(a, b); }
    static U mul(U a, U b) { return _mm256_mullo_epi32(a, b); }
    static U max(U a, U b) { return _mm256_max_epu32(a, b); }
    static U min(U a, U b) { return _mm256_min_epu32(a, b); }
    static std::uint32_t largest(U a) {
        __m128i x = _mm_max_epu32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
        x = _mm_max_epu32(x, _mm_shuffle_epi32(x, 0x4e));
        x = _mm_max_epu32(x, _mm_shuffle_epi32(x, 0xb1));
        return static_cast<std::uint32_t>(_mm_cvtsi128_si32(x));
    }
    static U band(U a, U b) { return _mm256_and_si256(a, b); }
    static U bor(U a, U b) { return _mm256_or_si256(a, b); }
    static U bxor(U a, U b) { return _mm256_xor_si256(a, b); }
    static U bxor3(U a, U b, U c) { return bxor(bxor(a, b), c); }
    static U band_or(U a, U b, U c) { return bor(band(a, b), c); }
    template <int N>
    static U shl(U a) {
        return _mm256_slli_epi32(a, N);
    }
    template <int N>
    static U shr(U a) {
        return _mm256_srli_epi32(a, N);
    }

    static F addf(F a, F b) { return _mm256_add_ps(a, b); }
    static F subf(F a, F b) { return _mm256_sub_ps(a, b); }
    static F mulf(F a, F b) { return _mm256_mul_ps(a, b); }
    static F divf(F a, F b) { return _mm256_div_ps(a, b); }
    static F sqrtf(F a) { return _mm256_sqrt_ps(a); }
    static F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
    static F canonical_nan(F x) {
        return _mm256_blendv_ps(x, real(setu(0x7fc00000u)), _mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    }

    static F canonical_result(F x) { return canonical_nan(x); }  // of x without subnormals
    static F sign(F x) {                                         // -1, 0 or 1; a NaN stays one
        const F one = real(bor(band(bits(x), setu(0x80000000u)), setu(0x3f800000u)));
        return _mm256_blendv_ps(x, one, _mm256_cmp_ps(x, _mm256_setzero_ps(), _CMP_NEQ_OQ));
    }

    static F load_f16(const std::uint16_t* p) { return _mm256_cvtph_ps(load_half(p)); }
    // Two vectors of a sign, 4 bits of exponent and 3 of mantissa, to float16, which has one bit of exponent
    // more.
    static void e4m3_to_f16(const std::uint8_t* from, std::uint16_t* to) {
        const U code = _mm256_cvtepi8_epi16(load_half(from));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(to),
                            band(_mm256_slli_epi16(code, 7), setu(0xbf80bf80u)));
    }
    static __m128i to_f16(F x) { return _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT); }
    static void store_f16(std::uint16_t* p, F x) {
        _mm_storeu_si128(reinterpret_cast<__m128i*>(p), to_f16(x));
    }
    static void stream_f16(std::uint16_t* p, F x) {
        _mm_stream_si128(reinterpret_cast<__m128i*>(p), to_f16(x));
    }

    static D zero() { return _mm256_setzero_pd(); }
    static void add_squares(D* acc, F x) {
        const D low = _mm256_cvtps_pd(_mm256_castps256_ps128(x));
        const D high = _mm256_cvtps_pd(_mm256_extractf128_ps(x, 1));
        acc[0] = _mm256_fmadd_pd(low, low, acc[0]);
        acc[1] = _mm256_fmadd_pd(high, high, acc[1]);
    }
    static void store_d(double* p, D x) { _mm256_storeu_pd(p, x); }
    static void stream_line(void* to, const void* from) {  // 64 bytes, both aligned to them
        const __m256i* x = static_cast<const __m256i*>(from);
        __m256i* y = static_cast<__m256i*>(to);
        _mm256_stream_si256(y, _mm256_load_si256(x));
        _mm256_stream_si256(y + 1, _mm256_load_si256(x + 1));
    }
    static void fence() { _mm_sfence(); }
};
