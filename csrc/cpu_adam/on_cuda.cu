// The kernels on a CUDA device: the scalar path, a group of elements per thread. So there is one arithmetic,
// and its bits. NVRTC compiles this at run time, with the headers of this folder and std_on_cuda.h in place
// of the standard ones; offload/kernels/nvrtc.py says how. A macro names what is compiled: STEP with RULE,
// STATES, GRADIENT and MASTER; MOVE with FROM and TO; or SUM with FROM.
#include "kernels.h"

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace offload::cpu_adam {
namespace {
#include "vec_scalar.h"
// then, in the order of kernels_impl.h
#include "groups.h"
// then
#include "storage.h"
// then
#include "random.h"
// then
#include "states.h"
// then
#include "rules.h"
// then
#include "steps.h"
// then
#include "elementwise.h"

static_assert(sizeof(StepArgs) == 192);  // offload/kernels/nvrtc.py fills it

inline std::size_t thread_number() { return std::size_t{blockIdx.x} * blockDim.x + threadIdx.x; }

// operation(begin, end) on this thread's group of `numel` elements.
template <typename Operation>
inline void for_own_group(std::size_t numel, const Operation& operation) {
    const std::size_t begin = thread_number() * kGroup;
    if (begin < numel) {
        operation(begin, numel - begin < kGroup ? numel : begin + kGroup);
    }
}
}  // namespace

#if defined(STEP)
extern "C" __global__ void step(const StepArgs args, std::size_t numel) {
    for_own_group(numel, [&](std::size_t begin, std::size_t end) {
        step_range<RULE, STATES, Mode::kStep, Dtype::GRADIENT, Master::MASTER>(args, begin, end);
    });
}
#endif

#if defined(MOVE)
extern "C" __global__ void convert(const void* src, void* dst, std::size_t numel) {
    for_own_group(numel, [&](std::size_t begin, std::size_t end) {
        convert_range<Dtype::FROM, Dtype::TO>(src, dst, begin, end);
    });
}
extern "C" __global__ void accumulate(const void* src, void* dst, std::size_t numel) {
    for_own_group(numel, [&](std::size_t begin, std::size_t end) {
        accumulate_range<Dtype::FROM, Dtype::TO>(src, dst, begin, end);
    });
}
#endif

// The sum of squares in the order that kernels.h fixes, in three passes: what threads do in each is known
// beforehand.
#if defined(SUM)
// A thread per lane of a block.
extern "C" __global__ void sum_lanes(const void* x, double* lanes, std::int64_t* not_finite,
                                     std::size_t numel) {
    const auto* data = static_cast<const Storage<Dtype::FROM>*>(x);
    const std::size_t number = thread_number(), begin = number / kSumLanes * kSumBlock;
    if (begin >= numel) {
        return;
    }
    const std::size_t end = numel - begin < kSumBlock ? numel : begin + kSumBlock;
    double sum = 0.0;
    std::int64_t count = 0;
    for (std::size_t i = begin + number % kSumLanes; i < end; i += kSumLanes) {
        const float value = load_as<Dtype::FROM>(data + i);
        const std::uint32_t magnitude = Vec::bits(value) & 0x7fffffffu;
        const double wide =
            magnitude < 0x00800000u ? 0.0 : static_cast<double>(value);  // subnormals count as zero
        sum += wide * wide;
        count += magnitude >= 0x7f800000u;
    }
    lanes[number] = sum;
    not_finite[number] = count;
}
// A thread per chunk: the lanes of a block as a binary tree, blocks in rising order.
extern "C" __global__ void sum_chunks(const double* lanes, const std::int64_t* not_finite, double* chunks,
                                      std::int64_t* counts, std::size_t blocks) {
    constexpr std::size_t kBlocks = kChunk / kSumBlock;
    const std::size_t chunk = thread_number();
    if (chunk * kBlocks >= blocks) {
        return;
    }
    const std::size_t end = blocks - chunk * kBlocks < kBlocks ? blocks : (chunk + 1) * kBlocks;
    double sum = 0.0;
    std::int64_t count = 0;
    for (std::size_t block = chunk * kBlocks; block < end; ++block) {
        double tree[kSumLanes];
        for (std::size_t k = 0; k < kSumLanes; ++k) {
            tree[k] = lanes[block * kSumLanes + k];
            count += not_finite[block * kSumLanes + k];
        }
        for (std::size_t half = kSumLanes / 2; half != 0; half /= 2) {
            for (std::size_t k = 0; k < half; ++k) {
                tree[k] += tree[k + half];
            }
        }
        sum += tree[0];
    }
    chunks[chunk] = sum;
    counts[chunk] = count;
}
// One thread: chunks in rising order.
extern "C" __global__ void sum_all(const double* chunks, const std::int64_t* counts, double* total,
                                   std::size_t size) {
    if (thread_number() != 0) {
        return;
    }
    double sum = 0.0;
    std::int64_t count = 0;
    for (std::size_t chunk = 0; chunk < size; ++chunk) {
        sum += chunks[chunk];
        count += counts[chunk];
    }
    const std::uint64_t quiet_nan = 0x7ff8000000000000u;
    if (sum != sum) {
        __builtin_memcpy(total, &quiet_nan, sizeof(sum));
    } else {
        *total = sum;
    }
    __builtin_memcpy(total + 1, &count, sizeof(count));
}
#endif
}  // namespace offload::cpu_adam
