// The kernels on a CUDA device: the scalar path, a group of elements per thread. So there is one arithmetic,
// and its bits. NVRTC compiles this at run time, with the headers of this folder and std_on_cuda.h in place
// of the standard ones; offload/kernels/nvrtc.py says how. A macro names what is compiled: STEP with RULE,
// STATES, GRADIENT and MASTER; MOVE with FROM and TO; or SUM with FROM.
#include "kernels.h"

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 700  // has none: threads copy what they index
#define __grid_constant__
#endif

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

// A launch works on so many ranges at most, that the host launches once for many parameters: what tells of
// them are arguments, of which there are 4 KiB.
constexpr std::size_t kRanges = 56;
[[maybe_unused]] constexpr std::size_t kWarp = 32;

struct StepRange {
    const void* grad;
    std::uint16_t* param;
    void* master;
    void* states[kStates];
    void* emit;
    std::uint64_t offset;
    std::uint64_t numel;
};
// Ranges with the same hyper-parameters; `first` is the first thread block of each.
struct StepBatch {
    float constants[kConstants];
    std::uint64_t seed;
    std::uint64_t step;
    StepRange ranges[kRanges];
    std::uint32_t first[kRanges];
    std::uint32_t count;
};
static_assert(sizeof(StepBatch) == 3872);  // offload/kernels/nvrtc.py fills it

struct SumRange {
    const void* data;
    std::uint64_t numel;
    double* total;  // and a std::int64_t behind it
};
struct SumBatch {
    double* sums;  // of each block; the last chunk of a range is filled up with blocks of zeros
    std::int64_t* counts;
    SumRange ranges[kRanges];
    std::uint32_t first[kRanges];
    std::uint32_t count;
};
static_assert(sizeof(SumBatch) == 1592);

[[maybe_unused]] inline std::size_t thread_number() {
    return std::size_t{blockIdx.x} * blockDim.x + threadIdx.x;
}

// The range that this thread block works on: the last one that begins there or before.
inline std::uint32_t own_range(const std::uint32_t* first, std::uint32_t count) {
    std::uint32_t low = 0, high = count;
    while (high - low > 1) {
        const std::uint32_t middle = (low + high) / 2;
        if (first[middle] <= blockIdx.x) {
            low = middle;
        } else {
            high = middle;
        }
    }
    return low;
}

// operation(begin, end) on the group of thread `number`, of `numel` elements.
template <typename Operation>
inline void for_own_group(std::size_t number, std::size_t numel, const Operation& operation) {
    const std::size_t begin = number * kGroup;
    if (begin < numel) {
        operation(begin, numel - begin < kGroup ? numel : begin + kGroup);
    }
}
}  // namespace

#if defined(STEP)
extern "C" __global__ void step(const __grid_constant__ StepBatch batch) {
    const std::uint32_t own = own_range(batch.first, batch.count);
    const StepRange& range = batch.ranges[own];
    StepArgs args{};
    args.grad = range.grad;
    args.param = range.param;
    args.master = range.master;
    args.emit = range.emit;
    for (int k = 0; k < kStates; ++k) {
        args.states[k] = range.states[k];
    }
    args.seed = batch.seed;
    args.step = batch.step;
    args.offset = range.offset;
    for (int k = 0; k < kConstants; ++k) {
        args.constants[k] = batch.constants[k];
    }
    const std::size_t number = std::size_t{blockIdx.x - batch.first[own]} * blockDim.x + threadIdx.x;
    for_own_group(number, range.numel, [&](std::size_t begin, std::size_t end) {
        step_range<RULE, STATES, Mode::kStep, Dtype::GRADIENT, Master::MASTER>(args, begin, end);
    });
}
#endif

#if defined(MOVE)
extern "C" __global__ void convert(const void* src, void* dst, std::size_t numel) {
    for_own_group(thread_number(), numel, [&](std::size_t begin, std::size_t end) {
        convert_range<Dtype::FROM, Dtype::TO>(src, dst, begin, end);
    });
}
extern "C" __global__ void accumulate(const void* src, void* dst, std::size_t numel) {
    for_own_group(thread_number(), numel, [&](std::size_t begin, std::size_t end) {
        accumulate_range<Dtype::FROM, Dtype::TO>(src, dst, begin, end);
    });
}
#endif

// The sums of squares in the order that kernels.h fixes, in two passes.
#if defined(SUM)
// A warp per block: a thread per lane, then the lanes as a binary tree.
extern "C" __global__ void sum_blocks(const __grid_constant__ SumBatch batch) {
    static_assert(kSumLanes == kWarp);
    const std::uint32_t own = own_range(batch.first, batch.count);
    const std::size_t numel = batch.ranges[own].numel, lane = threadIdx.x % kWarp;
    const auto* data = static_cast<const Storage<Dtype::FROM>*>(batch.ranges[own].data);
    const std::size_t number = thread_number() / kWarp;
    const std::size_t begin = (number - std::size_t{batch.first[own]} * (blockDim.x / kWarp)) * kSumBlock;
    const std::size_t end = begin >= numel ? begin : numel - begin < kSumBlock ? numel : begin + kSumBlock;
    double sum = 0.0;
    std::int64_t count = 0;
    for (std::size_t i = begin + lane; i < end; i += kSumLanes) {
        const float value = load_as<Dtype::FROM>(data + i);
        const std::uint32_t magnitude = Vec::bits(value) & 0x7fffffffu;
        const double wide =
            magnitude < 0x00800000u ? 0.0 : static_cast<double>(value);  // subnormals count as zero
        sum += wide * wide;
        count += magnitude >= 0x7f800000u;
    }
    for (unsigned half = kSumLanes / 2; half != 0; half /= 2) {
        sum += __shfl_sync(0xffffffffu, sum, static_cast<unsigned>(lane) + half);
        count += __shfl_sync(0xffffffffu, count, static_cast<unsigned>(lane) + half);
    }
    if (lane == 0) {
        batch.sums[number] = sum;
        batch.counts[number] = count;
    }
}
// A warp per range: a thread per chunk, whose blocks it adds in rising order; then chunks in rising order.
extern "C" __global__ void sum_ranges(const __grid_constant__ SumBatch batch) {
    constexpr std::size_t kBlocks = kChunk / kSumBlock;
    const std::size_t own = thread_number() / kWarp, lane = threadIdx.x % kWarp;
    if (own >= batch.count) {
        return;
    }
    const SumRange& range = batch.ranges[own];
    const std::size_t chunks = (range.numel + kChunk - 1) / kChunk;
    const std::size_t first = std::size_t{batch.first[own]} * (blockDim.x / kWarp);
    double total = 0.0;
    std::int64_t count = 0;
    for (std::size_t begin = 0; begin < chunks; begin += kWarp) {
        double sum = 0.0;
        for (std::size_t k = 0; begin + lane < chunks && k < kBlocks; ++k) {
            sum += batch.sums[first + (begin + lane) * kBlocks + k];
            count += batch.counts[first + (begin + lane) * kBlocks + k];
        }
        for (unsigned k = 0; k < kWarp; ++k) {
            const double next = __shfl_sync(0xffffffffu, sum, k);
            if (begin + k < chunks) {
                total += next;
            }
        }
    }
    for (unsigned half = kWarp / 2; half != 0; half /= 2) {
        count += __shfl_sync(0xffffffffu, count, static_cast<unsigned>(lane) + half);
    }
    if (lane == 0) {
        const std::uint64_t quiet_nan = 0x7ff8000000000000u;
        if (total != total) {
            __builtin_memcpy(range.total, &quiet_nan, sizeof(total));
        } else {
            *range.total = total;
        }
        __builtin_memcpy(range.total + 1, &count, sizeof(count));
    }
}
#endif
}  // namespace offload::cpu_adam
