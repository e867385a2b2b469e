// The neon path: see kernels_path.h.
#include <arm_neon.h>

#define VEC_HEADER "vec_neon.h"
#define KERNELS neon_kernels
#include "kernels_path.h"
