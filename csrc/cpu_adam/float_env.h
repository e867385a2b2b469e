// Sets the floating-point environment for a scope and restores the caller's, so that results depend on
// neither torch.set_flush_denormal nor on anything else that a thread did before.
#pragma once

#include <cstdint>

#if defined(__SSE2__)
#include <xmmintrin.h>
#endif

namespace offload::cpu_adam {

enum class Subnormals {
    kKeep,   // IEEE 754
    kFlush,  // subnormal inputs and results count as zero: they would be many times slower on some processors
};

class FloatEnv {
  public:
    explicit FloatEnv(Subnormals subnormals) {
#if defined(__SSE2__)
        saved_ = _mm_getcsr();
        // 0x1f80: all exceptions masked, round to nearest even; 0x8040: flush results, treat inputs as zero.
        _mm_setcsr(subnormals == Subnormals::kFlush ? 0x1f80u | 0x8040u : 0x1f80u);
#elif defined(__aarch64__)
        asm volatile("mrs %0, fpcr" : "=r"(saved_));
        const std::uint64_t wanted =
            subnormals == Subnormals::kFlush ? std::uint64_t{1} << 24 : 0;  // FZ, nearest even
        asm volatile("msr fpcr, %0" : : "r"(wanted) : "memory");
#else
        (void)subnormals;
#endif
    }
    ~FloatEnv() {
#if defined(__SSE2__)
        _mm_setcsr(saved_);
#elif defined(__aarch64__)
        asm volatile("msr fpcr, %0" : : "r"(saved_) : "memory");
#endif
    }
    FloatEnv(const FloatEnv&) = delete;
    FloatEnv& operator=(const FloatEnv&) = delete;

  private:
#if defined(__SSE2__)
    unsigned saved_ = 0;
#elif defined(__aarch64__)
    std::uint64_t saved_ = 0;
#endif
};

}  // namespace offload::cpu_adam
