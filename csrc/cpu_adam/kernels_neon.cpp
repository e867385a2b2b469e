// The neon path: see kernels_impl.h for the kernels and vec_neon.h for the instructions.
#include "kernels.h"

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include <arm_neon.h>

namespace offload::cpu_adam {
namespace {
#include "vec_neon.h"
// then what is written over it
#include "kernels_impl.h"
}  // namespace

const Kernels& neon_kernels() {
    static constexpr Kernels kKernels = make_kernels();
    return kKernels;
}

}  // namespace offload::cpu_adam
