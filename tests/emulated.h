// What on_cuda.cu uses of CUDA, one thread after the other: a library of tests that a launch is given to.
#include <xmmintrin.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#define __global__

struct Extent {
    unsigned x;
};
static Extent blockIdx, threadIdx;
static constexpr Extent blockDim{256};

template <typename... Arguments, std::size_t... kNumbers>
void run(void (*kernel)(Arguments...), void** places, std::size_t blocks, unsigned flushes,
         std::index_sequence<kNumbers...>) {
    const unsigned saved = _mm_getcsr();
    _mm_setcsr(0x1f80u | flushes);
    for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x) {
        for (threadIdx.x = 0; threadIdx.x < blockDim.x; ++threadIdx.x) {
            kernel(*static_cast<std::remove_const_t<Arguments>*>(places[kNumbers])...);
        }
    }
    _mm_setcsr(saved);
}
template <typename... Arguments>
void run_all(void (*kernel)(Arguments...), void** places, std::size_t blocks, unsigned flushes) {
    run(kernel, places, blocks, flushes, std::index_sequence_for<Arguments...>{});
}

#define LAUNCH(name)                                                                     \
    extern "C" void launch_##name(void** places, std::size_t blocks, unsigned flushes) { \
        run_all(&offload::cpu_adam::name, places, blocks, flushes);                      \
    }
