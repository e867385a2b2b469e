// Python face of the kernels: addresses are integers, checked in offload/kernels/cpu_adam.py. Every call
// releases the GIL.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <limits>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <tuple>

#include "dispatch.h"
#include "float_env.h"
#include "kernels.h"
#include "thread_pool.h"

namespace py = pybind11;

namespace offload::cpu_adam {
namespace {

using Address = std::uintptr_t;

template <typename T>
T* at(Address address) {
    return reinterpret_cast<T*>(address);
}

int checked(int value, int count, const char* name) {
    if (value < 0 || value >= count) {
        throw std::invalid_argument(std::string(name) + ": expected 0 to " + std::to_string(count - 1) +
                                    " but got " + std::to_string(value) +
                                    "; use offload.kernels.cpu_adam, which names the values");
    }
    return value;
}

// body(begin, end) over chunks of [0, numel) on all threads, with the wanted floating-point environment in
// each.
template <typename Body>
void for_chunks(std::size_t numel, Subnormals subnormals, Body&& body) {
    auto chunk = [&](std::size_t index) {
        const FloatEnv env(subnormals);
        const std::size_t begin = index * kChunk;
        body(begin, std::min(begin + kChunk, numel));
    };
    parallel_for((numel + kChunk - 1) / kChunk, chunk);
}

using Constants = std::array<double, kConstants>;
using Targets = std::array<Address, 5>;  // parameter, master, two states, units; zeros but for Mode::kApart

void set_constants(StepArgs& args, const Constants& constants, double neg_step = 0.0) {
    const FloatEnv env(Subnormals::kKeep);  // the rounding of the constants is the environment's too
    for (int k = 0; k < kConstants; ++k) {
        args.constants[k] = static_cast<float>(constants[k]);
    }
    args.neg_step = static_cast<float>(neg_step);
}

StepKernel step_kernel(int rule, int state_kind, int mode, int grad_dtype, int master_kind) {
    const Kernels& kernels = *active_path().kernels;
    const int r = checked(rule, kRules, "rule");
    const int s = checked(state_kind, kStateKinds, "state_kind");
    const int m = checked(mode, kModes, "mode");
    const int g = checked(grad_dtype, kDtypes, "grad_dtype");
    const int w = checked(master_kind, kMasters, "master_kind");
    if (r == static_cast<int>(Rule::kAdam)) {
        return kernels.adam[s][m][g][w];
    }
    checked(state_kind, 1, "state_kind of a rule other than Adam");
    return kernels.other[r][m][g][w];
}

void step(int rule, int state_kind, int mode, std::size_t numel, Address grad, int grad_dtype, Address param,
          Address master, int master_kind, Address state0, Address state1, Address units, Address emit,
          const Constants& constants, std::uint64_t seed, std::uint64_t number, std::uint64_t offset,
          const Targets& targets) {
    const StepKernel kernel = step_kernel(rule, state_kind, mode, grad_dtype, master_kind);
    StepArgs args{};
    args.grad = at<const void>(grad);
    args.param = at<std::uint16_t>(param);
    args.master = at<void>(master);
    args.states[0] = at<void>(state0);
    args.states[1] = at<void>(state1);
    args.units = at<BlockUnits>(units);
    args.emit = at<void>(emit);
    args.target = {at<std::uint16_t>(targets[0]),
                   at<void>(targets[1]),
                   {at<void>(targets[2]), at<void>(targets[3])},
                   at<BlockUnits>(targets[4])};
    args.seed = seed;
    args.step = number;
    args.offset = offset;
    set_constants(args, constants);
    for_chunks(numel, Subnormals::kFlush,
               [&](std::size_t begin, std::size_t end) { kernel(args, begin, end); });
}

// With `save` float32 values to states, else states to float32 values.
void recode_states(bool save, int state_kind, std::size_t numel, Address exp_avg_fp32,
                   Address exp_avg_sq_fp32, Address exp_avg, Address exp_avg_sq, Address units,
                   std::uint64_t seed, std::uint64_t step, std::uint64_t offset) {
    const int kind = checked(state_kind, kStateKinds, "state_kind");
    const Kernels& kernels = *active_path().kernels;
    const StateKernel kernel = save ? kernels.save_states[kind] : kernels.load_states[kind];
    const StateArgs args{{at<float>(exp_avg_fp32), at<float>(exp_avg_sq_fp32)},
                         {at<void>(exp_avg), at<void>(exp_avg_sq)},
                         at<BlockUnits>(units),
                         seed,
                         step,
                         offset};
    for_chunks(numel, Subnormals::kFlush,
               [&](std::size_t begin, std::size_t end) { kernel(args, begin, end); });
}

// total = merge(total, sum_chunk(begin, end)) for every chunk of [0, numel), in rising order.
template <typename Sum, typename SumChunk, typename Merge>
Sum reduce_chunks(std::size_t numel, Sum total, SumChunk sum_chunk, Merge merge) {
    // A fixed number of chunks at a time, so that nothing is allocated.
    constexpr std::size_t kChunks = 1024;
    Sum chunks[kChunks];
    for (std::size_t base = 0; base < numel; base += kChunks * kChunk) {
        const std::size_t length = std::min(numel - base, kChunks * kChunk);
        for_chunks(length, Subnormals::kKeep, [&](std::size_t begin, std::size_t end) {
            chunks[begin / kChunk] = sum_chunk(base + begin, base + end);
        });
        for (std::size_t i = 0; i * kChunk < length; ++i) {
            total = merge(total, chunks[i]);
        }
    }
    return total;
}

double canonical(double sum) { return sum != sum ? std::numeric_limits<double>::quiet_NaN() : sum; }

template <typename SumChunk>
std::tuple<double, std::int64_t> sum_chunks(std::size_t numel, SumChunk sum_chunk) {
    const SquareSum total = reduce_chunks(numel, SquareSum{0.0, 0}, sum_chunk, [](SquareSum a, SquareSum b) {
        return SquareSum{a.sum + b.sum, a.non_finite + b.non_finite};
    });
    return {canonical(total.sum), total.non_finite};
}

// The first pass of LAMB; `param_squares` and `direction_squares` are the sums of what comes before in the
// parameter.
std::tuple<double, double> lamb_moments(std::size_t numel, Address grad, int grad_dtype, Address param,
                                        Address master, int master_kind, Address exp_avg, Address exp_avg_sq,
                                        const Constants& constants, double param_squares,
                                        double direction_squares) {
    const LambKernel kernel = active_path().kernels->lamb_moments[checked(
        grad_dtype, kDtypes, "grad_dtype")][checked(master_kind, kMasters, "master_kind")];
    StepArgs args{};
    args.grad = at<const void>(grad);
    args.param = at<std::uint16_t>(param);
    args.master = at<void>(master);
    args.states[0] = at<void>(exp_avg);
    args.states[1] = at<void>(exp_avg_sq);
    set_constants(args, constants);
    const LambSums total = reduce_chunks(
        numel, LambSums{param_squares, direction_squares},
        [&](std::size_t begin, std::size_t end) {
            const FloatEnv env(Subnormals::kFlush);
            return kernel(args, begin, end);
        },
        [](LambSums a, LambSums b) { return LambSums{a.param + b.param, a.direction + b.direction}; });
    return {canonical(total.param), canonical(total.direction)};
}

void lamb_apply(std::size_t numel, Address param, Address master, int master_kind, Address exp_avg,
                Address exp_avg_sq, Address emit, const Constants& constants, double neg_step) {
    const StepKernel kernel =
        active_path().kernels->lamb_apply[checked(master_kind, kMasters, "master_kind")];
    StepArgs args{};
    args.param = at<std::uint16_t>(param);
    args.master = at<void>(master);
    args.states[0] = at<void>(exp_avg);
    args.states[1] = at<void>(exp_avg_sq);
    args.emit = at<void>(emit);
    set_constants(args, constants, neg_step);
    for_chunks(numel, Subnormals::kFlush,
               [&](std::size_t begin, std::size_t end) { kernel(args, begin, end); });
}

std::tuple<double, std::int64_t> sum_of_squares(Address address, int dtype, std::size_t numel,
                                                Address blocks) {
    const SumKernel kernel = active_path().kernels->sum_of_squares[checked(dtype, kDtypes, "dtype")];
    return sum_chunks(numel, [&](std::size_t begin, std::size_t end) {
        const FloatEnv env(Subnormals::kFlush);
        return kernel(at<const void>(address), at<double>(blocks), begin, end);
    });
}

// The sum that sum_of_squares returns, of what it wrote to `blocks`.
double join_block_sums(Address blocks, std::size_t count) {
    const FloatEnv env(Subnormals::kKeep);
    const double* sums = at<const double>(blocks);
    double total = 0.0;
    for (std::size_t base = 0; base < count; base += kChunk / kSumBlock) {
        double chunk = 0.0;
        for (std::size_t i = base; i < std::min(base + kChunk / kSumBlock, count); ++i) {
            chunk += sums[i];
        }
        total += chunk;
    }
    return canonical(total);
}

// dst = src, or dst += src with `add`; then, with `measure`, the sum of squares of dst, while it is in the
// cache.
std::tuple<double, std::int64_t> take_gradient(Address src, int src_dtype, Address dst, int dst_dtype,
                                               std::size_t numel, bool add, bool measure, Address blocks) {
    const Kernels& kernels = *active_path().kernels;
    const int from = checked(src_dtype, kDtypes, "src_dtype");
    const int to = checked(dst_dtype, kDtypes, "dst_dtype");
    if (add && from != to && to != static_cast<int>(Dtype::kFloat32)) {
        throw std::invalid_argument("take_gradient: gradients add up in their own dtype or in float32");
    }
    UnaryKernel move = kernels.convert[from][to];
    if (add) {
        move =
            to == static_cast<int>(Dtype::kFloat32) ? kernels.accumulate[from] : kernels.accumulate_same[to];
    }
    const bool copy = !add && from == to;
    const std::size_t size = to == static_cast<int>(Dtype::kFloat32) ? 4 : 2;
    const SumKernel sum = kernels.sum_of_squares[to];
    return sum_chunks(numel, [&](std::size_t begin, std::size_t end) {
        if (copy) {
            std::memcpy(at<char>(dst) + begin * size, at<const char>(src) + begin * size,
                        (end - begin) * size);
        } else {
            move(at<const void>(src), at<void>(dst), begin, end);
        }
        if (!measure) {
            return SquareSum{0.0, 0};
        }
        const FloatEnv env(Subnormals::kFlush);
        return sum(at<const void>(dst), at<double>(blocks), begin, end);
    });
}

void run_unary(UnaryKernel kernel, Address src, Address dst, std::size_t numel) {
    for_chunks(numel, Subnormals::kKeep, [&](std::size_t begin, std::size_t end) {
        kernel(at<const void>(src), at<void>(dst), begin, end);
    });
}

void convert(Address src, int src_dtype, Address dst, int dst_dtype, std::size_t numel) {
    run_unary(active_path().kernels->convert[checked(src_dtype, kDtypes, "src_dtype")]
                                            [checked(dst_dtype, kDtypes, "dst_dtype")],
              src, dst, numel);
}

void split_master(Address src, Address param, Address remainder, std::size_t numel) {
    const SplitKernel kernel = active_path().kernels->split;
    for_chunks(numel, Subnormals::kKeep, [&](std::size_t begin, std::size_t end) {
        kernel(at<const float>(src), at<std::uint16_t>(param), at<std::int16_t>(remainder), begin, end);
    });
}

void join_master(Address param, Address remainder, Address dst, std::size_t numel) {
    const JoinKernel kernel = active_path().kernels->join;
    for_chunks(numel, Subnormals::kKeep, [&](std::size_t begin, std::size_t end) {
        kernel(at<const std::uint16_t>(param), at<const std::int16_t>(remainder), at<float>(dst), begin, end);
    });
}

void stream_in_place(Address a, Address b, Address c, Address d, float factor, std::size_t numel) {
    const StreamKernel kernel = active_path().kernels->stream;
    for_chunks(numel, Subnormals::kFlush, [&](std::size_t begin, std::size_t end) {
        kernel(at<float>(a), at<float>(b), at<float>(c), at<float>(d), factor, begin, end);
    });
}

// Float32 bit patterns in [begin, end) that split and join do not give back: themselves, or 0x7fc00000 for a
// NaN; or whose upper half is not of the pattern's class (finite numbers of at least 2^127 * (2 - 2^-8) round
// to infinity).
std::int64_t count_split_failures(std::uint64_t first, std::uint64_t last) {
    const Kernels& kernels = *active_path().kernels;
    std::atomic<std::int64_t> failures{0};
    constexpr std::uint32_t kMagnitude = 0x7fffffffu;
    constexpr std::uint32_t kInfinity = 0x7f800000u;
    constexpr std::size_t kBatch = 4096;
    for_chunks(last - first, Subnormals::kKeep, [&](std::size_t begin, std::size_t end) {
        float values[kBatch];
        float joined[kBatch];
        std::uint16_t param[kBatch];
        std::int16_t remainder[kBatch];
        std::int64_t bad = 0;
        for (std::size_t base = begin; base < end; base += kBatch) {
            const std::size_t n = std::min(kBatch, end - base);
            for (std::size_t k = 0; k < n; ++k) {
                values[k] = __builtin_bit_cast(float, static_cast<std::uint32_t>(first + base + k));
            }
            kernels.split(values, param, remainder, 0, n);
            kernels.join(param, remainder, joined, 0, n);
            for (std::size_t k = 0; k < n; ++k) {
                const std::uint32_t u = static_cast<std::uint32_t>(first + base + k);
                const std::uint32_t upper = std::uint32_t{param[k]} << 16;
                const bool nan = (u & kMagnitude) > kInfinity;
                const std::uint32_t want = nan ? 0x7fc00000u : u;
                const bool upper_nan = (upper & kMagnitude) > kInfinity;
                const bool upper_infinite = (upper & kMagnitude) == kInfinity;
                const bool to_infinity = !nan && (u & kMagnitude) >= 0x7f7f8000u;
                const bool same_sign = nan || ((upper ^ u) & ~kMagnitude) == 0;
                bad += __builtin_bit_cast(std::uint32_t, joined[k]) != want || upper_nan != nan ||
                       upper_infinite != to_infinity || !same_sign;
            }
        }
        failures.fetch_add(bad, std::memory_order_relaxed);
    });
    return failures.load();
}

// The kernels of a CUDA device, for whoever compiles them.
std::map<std::string, std::string> cuda_texts() {
    return {
#include "cuda_texts.inc"
    };
}

}  // namespace
}  // namespace offload::cpu_adam

PYBIND11_MODULE(_cpu_adam, m) {
    using namespace offload::cpu_adam;
    using Release = py::call_guard<py::gil_scoped_release>;
    m.doc() =
        "CPU optimizer kernels on raw addresses; use offload.kernels.cpu_adam, which checks its arguments.";
    m.def("step", &step, py::kw_only(), py::arg("rule"), py::arg("state_kind"), py::arg("mode"),
          py::arg("numel"), py::arg("grad"), py::arg("grad_dtype"), py::arg("param"), py::arg("master"),
          py::arg("master_kind"), py::arg("state0"), py::arg("state1"), py::arg("units"), py::arg("emit"),
          py::arg("constants"), py::arg("seed"), py::arg("number"), py::arg("offset"),
          py::arg("targets") = Targets{}, Release());
    m.def("lamb_moments", &lamb_moments, py::kw_only(), py::arg("numel"), py::arg("grad"),
          py::arg("grad_dtype"), py::arg("param"), py::arg("master"), py::arg("master_kind"),
          py::arg("exp_avg"), py::arg("exp_avg_sq"), py::arg("constants"), py::arg("param_squares"),
          py::arg("direction_squares"), Release());
    m.def("lamb_apply", &lamb_apply, py::kw_only(), py::arg("numel"), py::arg("param"), py::arg("master"),
          py::arg("master_kind"), py::arg("exp_avg"), py::arg("exp_avg_sq"), py::arg("emit"),
          py::arg("constants"), py::arg("neg_step"), Release());
    m.def("recode_states", &recode_states, py::kw_only(), py::arg("save"), py::arg("state_kind"),
          py::arg("numel"), py::arg("exp_avg_fp32"), py::arg("exp_avg_sq_fp32"), py::arg("exp_avg"),
          py::arg("exp_avg_sq"), py::arg("units"), py::arg("seed"), py::arg("step"), py::arg("offset"),
          Release());
    m.def("sum_of_squares", &sum_of_squares, py::arg("address"), py::arg("dtype"), py::arg("numel"),
          py::arg("blocks") = Address{0}, Release());
    m.def("join_block_sums", &join_block_sums, py::arg("blocks"), py::arg("count"), Release());
    m.def("take_gradient", &take_gradient, py::arg("src"), py::arg("src_dtype"), py::arg("dst"),
          py::arg("dst_dtype"), py::arg("numel"), py::arg("add"), py::arg("measure"),
          py::arg("blocks") = Address{0}, Release());
    m.def("convert", &convert, py::arg("src"), py::arg("src_dtype"), py::arg("dst"), py::arg("dst_dtype"),
          py::arg("numel"), Release());
    m.def("split_master", &split_master, py::arg("src"), py::arg("param"), py::arg("remainder"),
          py::arg("numel"), Release());
    m.def("join_master", &join_master, py::arg("param"), py::arg("remainder"), py::arg("dst"),
          py::arg("numel"), Release());
    m.def("stream_in_place", &stream_in_place, py::arg("a"), py::arg("b"), py::arg("c"), py::arg("d"),
          py::arg("factor"), py::arg("numel"), Release());
    m.def("count_split_failures", &count_split_failures, py::arg("first"), py::arg("last"), Release());
    m.def("cuda_texts", &cuda_texts);
    m.def("set_num_threads", &set_num_threads, py::arg("count"));
    m.def("num_threads", &num_threads);
    m.def("isa", [] { return std::string(active_path().name); });
    m.def("available_isas", &available_isas);
    m.def("force_isa", &force_isa, py::arg("name"));
}
