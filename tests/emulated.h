// What on_cuda.cu uses of CUDA, one thread after the other: a library of tests that a launch is given to.
#include <ucontext.h>
#include <xmmintrin.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#define __global__
#define __grid_constant__

struct Extent {
    unsigned x;
};
static Extent blockIdx, threadIdx;
static constexpr Extent blockDim{256};

// The threads of a warp give each other what they have: each goes on when all have given it.
constexpr unsigned kLanes = 32;
struct Lane {
    ucontext_t context;
    alignas(64) char stack[1 << 16];
    unsigned char given[2][8];
    unsigned shuffles;
    bool done;
};
static Lane lanes[kLanes];
static ucontext_t host;
static void (*body)(void*);
static void* of_body;

static bool parted;  // threads of a warp have not done the same, which CUDA does not define

template <typename T>
T __shfl_sync(unsigned mask, T value, unsigned source) {
    static_assert(sizeof(T) == 8);
    parted = parted || mask != 0xffffffffu;
    Lane& own = lanes[threadIdx.x % kLanes];
    const unsigned number = own.shuffles++ % 2;
    std::memcpy(own.given[number], &value, sizeof(value));
    swapcontext(&own.context, &host);
    std::memcpy(&value, lanes[source % kLanes].given[number], sizeof(value));
    return value;
}
inline void run_lane() {
    body(of_body);
    lanes[threadIdx.x % kLanes].done = true;
}
inline void run_warp(unsigned first) {
    for (Lane& lane : lanes) {
        getcontext(&lane.context);
        lane.context.uc_stack.ss_sp = lane.stack;
        lane.context.uc_stack.ss_size = sizeof(lane.stack);
        lane.context.uc_link = &host;
        makecontext(&lane.context, run_lane, 0);
        lane.shuffles = 0;
        lane.done = false;
    }
    for (bool left = true; left;) {
        left = false;
        for (const Lane& lane : lanes) {
            parted = parted || lane.done != lanes[0].done || lane.shuffles != lanes[0].shuffles;
        }
        for (unsigned number = 0; number < kLanes; ++number) {
            if (!lanes[number].done) {
                threadIdx.x = first + number;
                swapcontext(&host, &lanes[number].context);
                left = left || !lanes[number].done;
            }
        }
    }
}

// Returns whether the threads of each warp have kept together.
template <bool kWarps, typename... Arguments, std::size_t... kNumbers>
bool run(void (*kernel)(Arguments...), void** places, std::size_t blocks, unsigned flushes,
         std::index_sequence<kNumbers...>) {
    const unsigned saved = _mm_getcsr();
    parted = false;
    _mm_setcsr(0x1f80u | flushes);
    auto call = [&] { kernel(*static_cast<std::remove_const_t<Arguments>*>(places[kNumbers])...); };
    body = [](void* self) { (*static_cast<decltype(call)*>(self))(); };
    of_body = &call;
    for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x) {
        for (threadIdx.x = 0; !kWarps && threadIdx.x < blockDim.x; ++threadIdx.x) {
            call();
        }
        for (unsigned first = 0; kWarps && first < blockDim.x; first += kLanes) {
            run_warp(first);
        }
    }
    _mm_setcsr(saved);
    return !parted;
}
template <bool kWarps, typename... Arguments>
bool run_all(void (*kernel)(Arguments...), void** places, std::size_t blocks, unsigned flushes) {
    return run<kWarps>(kernel, places, blocks, flushes, std::index_sequence_for<Arguments...>{});
}

#define LAUNCH(name, warps)                                                              \
    extern "C" bool launch_##name(void** places, std::size_t blocks, unsigned flushes) { \
        return run_all<warps>(&offload::cpu_adam::name, places, blocks, flushes);        \
    }
