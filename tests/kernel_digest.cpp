// Prints a digest of what every kernel of every path writes, for test_cpu_adam_neon.py: one line per path,
// the same digest on every machine. Knows no Python, so that it can be compiled for another processor.
#include <cstdio>
#include <cstring>
#include <type_traits>
#include <vector>

#include "float_env.h"
#include "kernels.h"

using namespace offload::cpu_adam;

namespace {

constexpr std::size_t kNumel = 1000;
constexpr std::size_t kBegin = 128, kEnd = 1000 - 27;

struct alignas(64) Line {  // where a step writes to arrays of its own, they start at one
    unsigned char bytes[64];
};

struct Memory {
    std::vector<Line> lines;
    std::uint64_t state;
    static constexpr std::size_t kSize = (kNumel * 4 + 64) / 64 * 64 + 64;
    unsigned char* data() { return lines.data()->bytes; }
    void assign(int value) {
        lines.resize(kSize / 64);
        std::memset(data(), value, kSize);
    }
    std::uint64_t next() {  // xorshift64*
        state ^= state >> 12;
        state ^= state << 25;
        state ^= state >> 27;
        return state * 0x2545f4914f6cdd1du;
    }
    // Floating-point numbers of any sign between 2^-low and 2^high, or unsigned ones.
    void fill(Dtype dtype, int low, int high, bool is_signed) {
        const std::size_t size = dtype == Dtype::kFloat32 ? 4 : 2;
        assign(0);
        for (std::size_t i = 0; i < kNumel; ++i) {
            const std::uint64_t r = next();
            const unsigned exponent =
                static_cast<unsigned>(r % static_cast<unsigned>(high - low)) + static_cast<unsigned>(low);
            const unsigned sign = is_signed ? static_cast<unsigned>(r >> 40 & 1) : 0;
            std::uint32_t u = sign << 31 | (exponent + 127) << 23 | static_cast<std::uint32_t>(r >> 41);
            if (dtype == Dtype::kBfloat16) {
                u >>= 16;
            } else if (dtype == Dtype::kFloat16) {
                u = sign << 15 | ((exponent + 15) & 31) << 10 | static_cast<std::uint32_t>(r >> 54);
            }
            std::memcpy(data() + i * size, &u, size);
        }
    }
    template <typename T>
    T* at() {
        return reinterpret_cast<T*>(data());
    }
};

struct Digest {
    std::uint64_t value = 0xcbf29ce484222325u;  // FNV-1a
    void add(const void* data, std::size_t size) {
        for (std::size_t i = 0; i < size; ++i) {
            value = (value ^ static_cast<const unsigned char*>(data)[i]) * 0x100000001b3u;
        }
    }
    void add(Memory& memory) { add(memory.data(), Memory::kSize); }
};

std::uint64_t digest(const Kernels& kernels) {
    const FloatEnv env(Subnormals::kFlush);
    Digest found;
    const auto steps = [&](auto kernel, StateKind kind, int g, int w) {
        Memory grad{{}, 1}, param{{}, 3}, master{{}, 4}, m{{}, 5}, v{{}, 6}, units{{}, 7}, emit{{}, 8};
        const auto dtype = static_cast<Dtype>(g);
        grad.fill(dtype, -12, -6, true);
        param.fill(Dtype::kBfloat16, -8, -2, true);
        master.fill(w == 0 ? Dtype::kBfloat16 : Dtype::kFloat32, -8, -2, true);
        m.fill(kind == StateKind::kFloat32 ? Dtype::kFloat32 : Dtype::kBfloat16, -12, -6, true);
        v.fill(kind == StateKind::kFloat32 ? Dtype::kFloat32 : Dtype::kBfloat16, -24, -12, false);
        units.assign(110);
        emit.assign(0);
        Memory targets[5];  // parameter, master, both states, units
        for (Memory& target : targets) {
            target.assign(0);
        }
        StepArgs args{};
        args.grad = grad.at<void>();
        args.param = param.at<std::uint16_t>();
        args.master = master.at<void>();
        args.states[0] = m.at<void>();
        args.states[1] = v.at<void>();
        args.units = units.at<BlockUnits>();
        args.emit = emit.at<void>();
        args.target = {targets[0].at<std::uint16_t>(),
                       targets[1].at<void>(),
                       {targets[2].at<void>(), targets[3].at<void>()},
                       targets[4].at<BlockUnits>()};
        args.seed = 9;
        args.step = 10;
        args.offset = 65536 - 512;
        const float constants[kConstants] = {0.5f, 0.01f, 0.999f, 0.1f, 0.95f, 0.05f, 1e-8f, -1e-3f, 1.25f};
        std::memcpy(args.constants, constants, sizeof(constants));
        args.neg_step = 0.25f;
        if constexpr (std::is_same_v<decltype(kernel), LambKernel>) {
            const LambSums sums = kernel(args, 0, kEnd);
            found.add(&sums, sizeof(sums));
        } else {
            kernel(args, kBegin, kEnd);
        }
        for (Memory* memory : {&param, &master, &m, &v, &units, &emit}) {
            found.add(*memory);
        }
        for (Memory& target : targets) {
            found.add(target);
        }
    };
    for (int g = 0; g < kDtypes; ++g) {
        for (int w = 0; w < kMasters; ++w) {
            for (int kind = 0; kind < kStateKinds; ++kind) {
                for (int mode = 0; mode < kModes; ++mode) {
                    steps(kernels.adam[kind][mode][g][w], static_cast<StateKind>(kind), g, w);
                }
            }
            for (int rule = 1; rule < kRules; ++rule) {
                for (const auto& mode : kernels.other[rule]) {
                    steps(mode[g][w], StateKind::kFloat32, g, w);
                }
            }
            steps(kernels.lamb_moments[g][w], StateKind::kFloat32, g, w);
            steps(kernels.lamb_apply[w], StateKind::kFloat32, g, w);
        }
        Memory source{{}, 11}, target{{}, 12};
        for (int to = 0; to < kDtypes; ++to) {
            for (const UnaryKernel kernel : {kernels.convert[g][to], kernels.accumulate_same[to]}) {
                source.fill(static_cast<Dtype>(kernel == kernels.convert[g][to] ? g : to), -9, -4, true);
                target.fill(static_cast<Dtype>(to), -9, -4, true);
                kernel(source.data(), target.data(), kBegin, kEnd);
                found.add(target);
            }
        }
        source.fill(static_cast<Dtype>(g), -9, -4, true);
        target.fill(Dtype::kFloat32, -9, -4, true);
        kernels.accumulate[g](source.data(), target.data(), kBegin, kEnd);
        found.add(target);
        const SquareSum sum = kernels.sum_of_squares[g](source.data(), nullptr, 0, kEnd);
        found.add(&sum.sum, sizeof(sum.sum));
        found.add(&sum.non_finite, sizeof(sum.non_finite));
    }
    return found.value;
}

}  // namespace

int main() {
    std::printf("scalar %016llx\n", static_cast<unsigned long long>(digest(scalar_kernels())));
#if defined(OFFLOAD_HAVE_NEON)
    std::printf("neon %016llx\n", static_cast<unsigned long long>(digest(neon_kernels())));
#endif
    return 0;
}
