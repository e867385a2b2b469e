// One instruction set's path. Included by each kernels_<isa>.cpp, which defines VEC_HEADER, the file with its
// instructions, and KERNELS, the name of its function: see kernels_impl.h for the kernels.
#include "kernels.h"

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace offload::cpu_adam {
namespace {
#include VEC_HEADER
// then what is written over it
#include "kernels_impl.h"
}  // namespace

const Kernels& KERNELS() {
    static constexpr Kernels kKernels = make_kernels();
    return kKernels;
}

}  // namespace offload::cpu_adam
