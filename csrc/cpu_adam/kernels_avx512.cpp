// The avx512 path: see kernels_impl.h for the kernels and vec_avx512.h for the instructions.
#include "kernels.h"

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include <immintrin.h>

namespace offload::cpu_adam {
namespace {
#include "vec_avx512.h"
// then what is written over it
#include "kernels_impl.h"
}  // namespace

const Kernels& avx512_kernels() {
    static constexpr Kernels kKernels = make_kernels();
    return kKernels;
}

}  // namespace offload::cpu_adam
