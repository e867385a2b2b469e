// Sixteen elements at a time: AVX-512 F, BW, DQ and VL. Included by kernels_avx512.cpp only, inside its
// anonymous namespace.
struct Vec {
    static constexpr std::size_t kWidth = 16;
    static constexpr std::size_t kAccumulators = 2;
    using F = __m512;
    using U = __m512i;
    using D = __m512d;

    static F set(float x) { return _mm512_set1_ps(x); }
    static U setu(std::uint32_t x) { return _mm512_set1_epi32(static_cast<int>(x)); }
    static F load(const float* p) { return _mm512_loadu_ps(p); }
    static void store(float* p, F x) { _mm512_storeu_ps(p, x); }
    static __m256i load_half(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
    static U load_u16(const std::uint16_t* p) { return _mm512_cvtepu16_epi32(load_half(p)); }
    static U load_s16(const std::int16_t* p) { return _mm512_cvtepi16_epi32(load_half(p)); }
    static __m256i narrow(U x) { return _mm512_cvtepi32_epi16(x); }  // low 16 bits of each
    static void store_u16(std::uint16_t* p, U x) {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), narrow(x));
    }
    static void stream_u16(std::uint16_t* p, U x) {
        _mm256_stream_si256(reinterpret_cast<__m256i*>(p), narrow(x));
    }

    static U load_u8(const std::uint8_t* p) {
        return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    }
    static void store_u8(std::uint8_t* p, U x) {  // low 8 bits of each
        _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(x));
    }

    static U iota() { return _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15); }
    static U bits(F x) { return _mm512_castps_si512(x); }
    static F real(U x) { return _mm512_castsi512_ps(x); }
    static U add(U a, U b) { return _mm512_add_epi32(a, b); }
    static U sub(U a, U b) { return _mm512_sub_epi32(a, b); }
    static U mul(U a, U b) { return _mm512_mullo_epi32(a, b); }
    static U max(U a, U b) { return _mm512_max_epi32(a, b); }  // as signed numbers, like min and largest
    static U min(U a, U b) { return _mm512_min_epi32(a, b); }
    static std::uint32_t largest(U a) { return static_cast<std::uint32_t>(_mm512_reduce_max_epi32(a)); }
    static U band(U a, U b) { return _mm512_and_si512(a, b); }
    static U bor(U a, U b) { return _mm512_or_si512(a, b); }
    static U bxor(U a, U b) { return _mm512_xor_si512(a, b); }
    template <int N>
    static U shl(U a) {
        return _mm512_slli_epi32(a, N);
    }
    template <int N>
    static U shr(U a) {
        return _mm512_srli_epi32(a, N);
    }

    static F addf(F a, F b) { return _mm512_add_ps(a, b); }
    static F subf(F a, F b) { return _mm512_sub_ps(a, b); }
    static F mulf(F a, F b) { return _mm512_mul_ps(a, b); }
    static F divf(F a, F b) { return _mm512_div_ps(a, b); }
    static F sqrtf(F a) { return _mm512_sqrt_ps(a); }
    static F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
    static F fms(F a, F b, F c) { return _mm512_fmsub_ps(a, b, c); }
    static F canonical_nan(F x) {
        return _mm512_mask_mov_ps(x, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), real(setu(0x7fc00000u)));
    }

    static F sign(F x) {  // -1, 0 or 1; a NaN stays one
        const F one = real(bor(band(bits(x), setu(0x80000000u)), setu(0x3f800000u)));
        return _mm512_mask_mov_ps(x, _mm512_cmp_ps_mask(x, _mm512_setzero_ps(), _CMP_NEQ_OQ), one);
    }

    static F load_f16(const std::uint16_t* p) { return _mm512_cvtph_ps(load_half(p)); }
    static __m256i to_f16(F x) { return _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT); }
    static void store_f16(std::uint16_t* p, F x) {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), to_f16(x));
    }
    static void stream_f16(std::uint16_t* p, F x) {
        _mm256_stream_si256(reinterpret_cast<__m256i*>(p), to_f16(x));
    }

    static D zero() { return _mm512_setzero_pd(); }
    static void add_squares(D* acc, F x) {
        const D low = _mm512_cvtps_pd(_mm512_castps512_ps256(x));
        const D high = _mm512_cvtps_pd(_mm512_extractf32x8_ps(x, 1));
        acc[0] = _mm512_fmadd_pd(low, low, acc[0]);
        acc[1] = _mm512_fmadd_pd(high, high, acc[1]);
    }
    static void store_d(double* p, D x) { _mm512_storeu_pd(p, x); }
    static void stream_line(void* to, const void* from) {  // 64 bytes, both aligned to them
        _mm512_stream_si512(static_cast<__m512i*>(to), _mm512_load_si512(from));
    }
    static void fence() { _mm_sfence(); }
};
