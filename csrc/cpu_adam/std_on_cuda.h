// What the kernels use of the C++ standard library, for NVRTC, which has none of it.
#pragma once

#define __builtin_prefetch(...) ((void)0)
#define __builtin_memcpy memcpy
#define __builtin_memset memset

namespace std {

using size_t = decltype(sizeof(0));
using uint8_t = unsigned char;
using int16_t = short;
using uint16_t = unsigned short;
using int32_t = int;
using uint32_t = unsigned int;
using int64_t = long long;
using uint64_t = unsigned long long;
using uintptr_t = unsigned long long;

template <bool kFirst, typename T, typename F>
struct conditional {
    using type = T;
};
template <typename T, typename F>
struct conditional<false, T, F> {
    using type = F;
};
template <bool kFirst, typename T, typename F>
using conditional_t = typename conditional<kFirst, T, F>::type;

template <typename T>
struct remove_const {
    using type = T;
};
template <typename T>
struct remove_const<const T> {
    using type = T;
};
template <typename T>
using remove_const_t = typename remove_const<T>::type;

inline float fma(float a, float b, float c) { return __fmaf_rn(a, b, c); }
inline float sqrt(float a) { return __fsqrt_rn(a); }
inline float copysign(float a, float b) { return copysignf(a, b); }

}  // namespace std
