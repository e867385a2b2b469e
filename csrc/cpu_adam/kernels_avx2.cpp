// The avx2 path: see kernels_path.h.
#include <immintrin.h>

#define VEC_HEADER "vec_avx2.h"
#define KERNELS avx2_kernels
#include "kernels_path.h"
