// The scalar path: see kernels_impl.h for the kernels and vec_scalar.h for the instructions.
#include "kernels.h"

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace offload::cpu_adam {
namespace {
#include "vec_scalar.h"
// then what is written over it
#include "kernels_impl.h"
}  // namespace

const Kernels& scalar_kernels() {
    static constexpr Kernels kKernels = make_kernels();
    return kKernels;
}

}  // namespace offload::cpu_adam
