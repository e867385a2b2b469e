// What the x86-64 processor offers, where the operating system saves the registers that belong to it.
//
// From the instructions themselves: the compiler's __builtin_cpu_supports reads a table that not every
// runtime of compilers fills.
#pragma once

#if defined(__x86_64__)

#include <cpuid.h>

namespace offload {

struct X86Features {
    bool sse42 = false;
    bool avx2 = false;    // with FMA and F16C
    bool avx512 = false;  // F, BW, DQ and VL, with AVX2
};

inline const X86Features& x86_features() {
    static const X86Features kFeatures = [] {
        const auto bit = [](unsigned word, int at) { return (word >> at & 1U) != 0; };
        X86Features found;
        unsigned a = 0;
        unsigned b = 0;
        unsigned c = 0;
        unsigned d = 0;
        if (__get_cpuid(1, &a, &b, &c, &d) == 0) return found;
        found.sse42 = bit(c, 20);
        const bool fma = bit(c, 12);
        const bool f16c = bit(c, 29);
        if (!bit(c, 27)) return found;  // the operating system does not let XGETBV tell
        unsigned saved = 0;
        unsigned upper = 0;
        __asm__("xgetbv" : "=a"(saved), "=d"(upper) : "c"(0));
        if (__get_cpuid_count(7, 0, &a, &b, &c, &d) == 0) return found;
        const bool ymm = (saved & 0x06U) == 0x06U;
        const bool zmm = (saved & 0xe6U) == 0xe6U;
        found.avx2 = ymm && fma && f16c && bit(b, 5);
        found.avx512 = found.avx2 && zmm && bit(b, 16) && bit(b, 17) && bit(b, 30) && bit(b, 31);
        return found;
    }();
    return kFeatures;
}

}  // namespace offload

#endif
