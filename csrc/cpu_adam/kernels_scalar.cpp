// The scalar path: see kernels_path.h.
#define VEC_HEADER "vec_scalar.h"
#define KERNELS scalar_kernels
#include "kernels_path.h"
