// What every instruction-set path offers: element kernels as pure functions over a range [begin, end) of raw
// pointers.
//
// Guarantee: element i of a result depends on element i of the inputs and on the constants only, never on
// where the range starts, its length, the alignment of the pointers, the thread that runs it or the
// instruction set. The only reduction, sum_of_squares_chunk, has a fixed order (see kSumBlock). Knows neither
// threads (thread_pool.h) nor which path is best (dispatch.h).
#pragma once

#include <cstddef>
#include <cstdint>

namespace offload::cpu_adam {

enum class Dtype : int { kFloat32 = 0, kBfloat16 = 1, kFloat16 = 2 };
inline constexpr int kDtypes = 3;

// Where the float32 master weight lives and what else is written. kSplit: upper half in the bfloat16
// parameter, signed 16-bit remainder beside it. The others: a float32 array, and for kEmit* a 16-bit copy
// written in the same pass.
enum class Master : int { kSplit = 0, kFloat32 = 1, kEmitBfloat16 = 2, kEmitFloat16 = 3 };
inline constexpr int kMasters = 4;

// Elements handed out to a thread at a time; a multiple of kSumBlock.
inline constexpr std::size_t kChunk = 64 * 1024;
// sum_of_squares: inside a block of kSumBlock elements, element j is added to lane j % kSumLanes in rising
// order, the lanes are combined as a binary tree (lane k += lane k + 16, + 8, ... + 1), blocks are added in
// rising order.
inline constexpr std::size_t kSumBlock = 4096;
inline constexpr std::size_t kSumLanes = 32;

// How optimizer states are stored. kInt8: one byte each, in blocks of kStateBlock elements with one
// BlockUnits (see states.h for the formats).
enum class StateKind : int { kFloat32 = 0, kBfloat16 = 1, kInt8 = 2 };
inline constexpr int kStateKinds = 3;
inline constexpr std::size_t kStateBlock = 128;
struct BlockUnits {
    std::uint8_t first;
    std::uint8_t second;
};

// What a step writes.
enum class Mode : int {
    kStep = 0,   // master and states, and the 16-bit parameter for kEmit*
    kApart = 1,  // kStep, but what is new goes to arrays of its own: the old content stays
};
inline constexpr int kModes = 2;

inline constexpr int kStates = 2;
inline constexpr int kConstants = 9;

// One optimizer step over flat arrays. The constants are the rule's, rounded once from double. Of
// m, a one_minus_beta is -beta instead where beta < 0.5 (-0 for 0), and then m = beta * m + (1 - beta) * g:
//   kAdam: grad_scale, l2, decay, one_minus_beta1, beta2, one_minus_beta2, eps, neg_step, inv_sqrt_bc2
//     g  = grad * grad_scale                      (l2 != 0: g += l2 * p)
//     m += one_minus_beta1 * (g - m)
//     v  = beta2 * v + one_minus_beta2 * g * g
//     p  = p * decay + neg_step * (m / (sqrt(v) * inv_sqrt_bc2 + eps))
//   kSgd: grad_scale, l2, neg_lr
//     p += neg_lr * g
//   kMomentum: grad_scale, l2, neg_lr, keep, take, nesterov
//     b  = keep * b + take * g
//     p += neg_lr * (nesterov != 0 ? nesterov * b + g : b)
//   kLion: grad_scale, l2, decay, neg_lr, one_minus_beta1, one_minus_beta2
//     p  = p * decay + neg_lr * sign(m + one_minus_beta1 * (g - m))
//     m += one_minus_beta2 * (g - m)
//   kAdagrad: grad_scale, l2, neg_lr, eps
//     s += g * g
//     p += neg_lr * (g / (sqrt(s) + eps))
//   LAMB: grad_scale, l2, decay, one_minus_beta1, beta2, one_minus_beta2, eps, inv_bc1, inv_sqrt_bc2
//     m, v as for kAdam
//     u  = m * inv_bc1 / (sqrt(v) * inv_sqrt_bc2 + eps) + decay * p
//     p += neg_step * u
// where g is that of kAdam.
enum class Rule : int { kAdam = 0, kSgd = 1, kMomentum = 2, kLion = 3, kAdagrad = 4 };
inline constexpr int kRules = 5;

// Where kApart writes; each starts at a 64-byte line.
struct Target {
    std::uint16_t* param;
    void* master;
    void* states[kStates];
    BlockUnits* units;
};

struct StepArgs {
    const void* grad;       // (numel,) grad dtype
    std::uint16_t* param;   // (numel,) bfloat16 bits, kSplit only
    void* master;           // (numel,) float32, or int16 for kSplit
    void* states[kStates];  // (numel,) float32, bfloat16 bits or uint8
    BlockUnits* units;      // (ceil(numel / kStateBlock),) kInt8 only; element 0 starts a block
    void* emit;             // (numel,) bfloat16 or float16 bits, kEmit* only
    Target target;          // kApart only
    std::uint64_t seed;     // of the random numbers, not kFloat32
    std::uint64_t step;     // number of the step whose states are written, for the random numbers
    std::uint64_t offset;   // global index of element 0, for the random numbers
    float constants[kConstants];
    float neg_step;  // LAMB's second pass only
};

// Two optimizer states and what they are in float32.
struct StateArgs {
    float* values[kStates];  // (numel,) float32
    void* states[kStates];   // as in StepArgs, like the rest
    BlockUnits* units;
    std::uint64_t seed;
    std::uint64_t step;
    std::uint64_t offset;
};

struct LambSums {
    double param;
    double direction;
};

struct SquareSum {
    double sum;
    std::int64_t non_finite;  // elements that are infinite or NaN
};

using StepKernel = void (*)(const StepArgs& args, std::size_t begin, std::size_t end);
using LambKernel = LambSums (*)(const StepArgs& args, std::size_t begin, std::size_t end);
using StateKernel = void (*)(const StateArgs& args, std::size_t begin, std::size_t end);
// With `blocks`, each block's sum is written to blocks[index of its first element / kSumBlock], too.
using SumKernel = SquareSum (*)(const void* x, double* blocks, std::size_t begin, std::size_t end);
// src is read, dst is written or updated, at the same element indices.
using UnaryKernel = void (*)(const void* src, void* dst, std::size_t begin, std::size_t end);
using SplitKernel = void (*)(const float* src, std::uint16_t* param, std::int16_t* remainder,
                             std::size_t begin, std::size_t end);
using JoinKernel = void (*)(const std::uint16_t* param, const std::int16_t* remainder, float* dst,
                            std::size_t begin, std::size_t end);
using StreamKernel = void (*)(float* a, float* b, float* c, float* d, float factor, std::size_t begin,
                              std::size_t end);

struct Kernels {
    // For kInt8 begin is a multiple of kStateBlock, and a range that ends inside a block ends the block.
    StepKernel adam[kStateKinds][kModes][kDtypes][kMasters];
    StepKernel other[kRules][kModes][kDtypes][kMasters];  // rules but kAdam: float32 states
    LambKernel lamb_moments[kDtypes][kMasters];           // begin is a multiple of kSumBlock
    StepKernel lamb_apply[kMasters];
    StateKernel save_states[kStateKinds];   // float32 to states; ranges as for adam
    StateKernel load_states[kStateKinds];   // states to float32
    SumKernel sum_of_squares[kDtypes];      // begin is a multiple of kSumBlock
    UnaryKernel accumulate[kDtypes];        // float32 dst += src
    UnaryKernel accumulate_same[kDtypes];   // dst = round_to_nearest_even(dst + src)
    UnaryKernel convert[kDtypes][kDtypes];  // [from][to]
    SplitKernel split;
    JoinKernel join;
    StreamKernel stream;  // multiplies four arrays in place: the memory roofline of the benchmark
};

const Kernels& scalar_kernels();
#if defined(OFFLOAD_HAVE_NEON)
const Kernels& neon_kernels();
#endif
#if defined(OFFLOAD_HAVE_AVX2)
const Kernels& avx2_kernels();
#endif
#if defined(OFFLOAD_HAVE_AVX512)
const Kernels& avx512_kernels();
#endif

}  // namespace offload::cpu_adam
