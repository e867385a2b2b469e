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
    static void store_u16(std::uint16_t* p, U x) { vst1_u16(p, vmovn_u32(x)); }  // low 16 bits of each
    static void stream_u16(std::uint16_t* p, U x) { store_u16(p, x); }
    static U load_u8(const std::uint8_t* p) {
        std::uint32_t four;
        __builtin_memcpy(&four, p, sizeof(four));
        return vmovl_u16(vget_low_u16(vmovl_u8(vcreate_u8(four))));
    }
    static void store_u8(std::uint8_t* p, U x) {  // low 8 bits of each
        const uint16x4_t words = vmovn_u32(x);
        const uint8x8_t bytes = vmovn_u16(vcombine_u16(words, words));
        const std::uint32_t four = vget_lane_u32(vreinterpret_u32_u8(bytes), 0);
        __builtin_memcpy(p, &four, sizeof(four));
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
    static U max(U a, U b) {  // as signed numbers, like min and largest
        return vreinterpretq_u32_s32(vmaxq_s32(vreinterpretq_s32_u32(a), vreinterpretq_s32_u32(b)));
    }
    static U min(U a, U b) {
        return vreinterpretq_u32_s32(vminq_s32(vreinterpretq_s32_u32(a), vreinterpretq_s32_u32(b)));
    }
    static std::uint32_t largest(U a) {
        return static_cast<std::uint32_t>(vmaxvq_s32(vreinterpretq_s32_u32(a)));
    }
    static U band(U a, U b) { return vandq_u32(a, b); }
    static U bor(U a, U b) { return vorrq_u32(a, b); }
    static U bxor(U a, U b) { return veorq_u32(a, b); }
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
    static F fms(F a, F b, F c) { return vfmaq_f32(vnegq_f32(c), a, b); }
    static F canonical_nan(F x) { return vbslq_f32(vceqq_f32(x, x), x, real(setu(0x7fc00000u))); }
    static F sign(F x) {  // -1, 0 or 1; a NaN stays one
        const F one = real(bor(band(bits(x), setu(0x80000000u)), setu(0x3f800000u)));
        return vbslq_f32(vcgtq_f32(vabsq_f32(x), vdupq_n_f32(0.0f)), one, x);
    }

    static F load_f16(const std::uint16_t* p) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p))); }
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
