// The avx512 path: see kernels_path.h.
#include <immintrin.h>

#define VEC_HEADER "vec_avx512.h"
#define KERNELS avx512_kernels
#include "kernels_path.h"
