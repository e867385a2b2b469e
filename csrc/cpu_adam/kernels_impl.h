// The kernels, written once over Vec. Included by each kernels_<isa>.cpp after its Vec, inside an anonymous
// namespace: no function compiled for one instruction set can be linked into the path of another.
//
// Every kernel runs over whole groups of kGroup elements; what is left over goes through the same group code
// in a padded copy on the stack, so there is one arithmetic, not two. Exact IEEE operations and explicit fma
// only. A NaN result is always 0x7fc00000 (0x7fc0, 0x7e00 in 16 bits): which operand's payload an instruction
// keeps differs between machines.

constexpr std::size_t kGroup = 64;   // elements: a whole number of 64-byte lines in every stream
constexpr std::size_t kAhead = 512;  // elements between a group and what is prefetched for it

template <Dtype D>
using Storage = std::conditional_t<D == Dtype::kFloat32, float, std::uint16_t>;

// 16-bit formats: halves round up to bfloat16 in parameters (the split master's rounding); sums in bfloat16
// round to even.
enum class Rounding { kHalfUp, kHalfEven };

template <Dtype D>
inline Vec::F load_as(const Storage<D>* p) {
    if constexpr (D == Dtype::kFloat32) {
        return Vec::load(p);
    } else if constexpr (D == Dtype::kBfloat16) {
        return Vec::real(Vec::shl<16>(Vec::load_u16(p)));
    } else {
        return Vec::load_f16(p);
    }
}

// x holds no NaN but the canonical one: the carry of the rounding can then never leave the NaNs.
template <Rounding R>
inline Vec::U to_bf16(Vec::F x) {
    const Vec::U u = Vec::bits(x);
    if constexpr (R == Rounding::kHalfUp) {
        return Vec::shr<16>(Vec::add(u, Vec::setu(0x8000u)));
    } else {
        const Vec::U odd = Vec::band(Vec::shr<16>(u), Vec::setu(1u));
        return Vec::shr<16>(Vec::add(u, Vec::add(Vec::setu(0x7fffu), odd)));
    }
}

template <Dtype D, Rounding R, bool kStream = false>
inline void store_as(Storage<D>* p, Vec::F x) {
    if constexpr (D == Dtype::kFloat32) {
        Vec::store(p, x);
    } else if constexpr (D == Dtype::kBfloat16) {
        if constexpr (kStream) {
            Vec::stream_u16(p, to_bf16<R>(x));
        } else {
            Vec::store_u16(p, to_bf16<R>(x));
        }
    } else {
        if constexpr (kStream) {
            Vec::stream_f16(p, x);
        } else {
            Vec::store_f16(p, x);
        }
    }
}

// The split master: float32 bits = (param bits << 16) + sign-extended remainder.
inline Vec::F load_split(const std::uint16_t* param, const std::int16_t* remainder) {
    return Vec::real(Vec::add(Vec::shl<16>(Vec::load_u16(param)), Vec::load_s16(remainder)));
}

inline void store_split(std::uint16_t* param, std::int16_t* remainder, Vec::F x) {
    Vec::store_u16(param, to_bf16<Rounding::kHalfUp>(x));
    Vec::store_u16(reinterpret_cast<std::uint16_t*>(remainder), Vec::bits(x));
}

template <typename T>
inline void prefetch_group(const T* p) {
    const char* line = reinterpret_cast<const char*>(p);
    for (std::size_t offset = 0; offset < kGroup * sizeof(T); offset += 64) {
        __builtin_prefetch(line + offset, 0, 3);
    }
}

// A padded copy of n < kGroup elements; written back by the caller where the kernel writes.
template <typename T>
struct Staged {
    alignas(64) T data[kGroup] = {};
    Staged(const T* from, std::size_t n) {
        if (n != 0) {
            __builtin_memcpy(data, from, n * sizeof(T));
        }
    }
    void write_back(T* to, std::size_t n) const { __builtin_memcpy(to, data, n * sizeof(T)); }
};

// ---- optimizer step
// ----------------------------------------------------------------------------------------------------

struct AdamConstants {
    Vec::F grad_scale, one_minus_beta1, one_minus_beta2, eps, neg_step, inv_sqrt_bc2, decay, weight_decay;
    explicit AdamConstants(const AdamArgs& a)
        : grad_scale(Vec::set(a.grad_scale)),
          one_minus_beta1(Vec::set(a.one_minus_beta1)),
          one_minus_beta2(Vec::set(a.one_minus_beta2)),
          eps(Vec::set(a.eps)),
          neg_step(Vec::set(a.neg_step)),
          inv_sqrt_bc2(Vec::set(a.inv_sqrt_bc2)),
          decay(Vec::set(a.decay)),
          weight_decay(Vec::set(a.weight_decay)) {}
};

template <Master M>
constexpr bool kEmits = M == Master::kEmitBfloat16 || M == Master::kEmitFloat16;
template <Master M>
constexpr Dtype kEmitDtype = M == Master::kEmitFloat16 ? Dtype::kFloat16 : Dtype::kBfloat16;
template <Master M>
using MasterStorage = std::conditional_t<M == Master::kSplit, std::int16_t, float>;

// The arithmetic of the step, in AdamArgs' words, for kGroup elements.
template <bool kDecoupled, Dtype G, Master M, bool kStream>
inline void adam_group(const AdamConstants& c, const Storage<G>* __restrict grad,
                       std::uint16_t* __restrict param, MasterStorage<M>* __restrict master,
                       float* __restrict exp_avg, float* __restrict exp_avg_sq,
                       std::uint16_t* __restrict emit) {
    for (std::size_t i = 0; i < kGroup; i += Vec::kWidth) {
        Vec::F p;
        if constexpr (M == Master::kSplit) {
            p = load_split(param + i, master + i);
        } else {
            p = Vec::load(master + i);
        }
        Vec::F g = Vec::mulf(load_as<G>(grad + i), c.grad_scale);
        if constexpr (!kDecoupled) {
            g = Vec::fma(c.weight_decay, p, g);
        }
        Vec::F m = Vec::load(exp_avg + i);
        Vec::F v = Vec::load(exp_avg_sq + i);
        m = Vec::canonical_nan(Vec::fma(c.one_minus_beta1, Vec::subf(g, m), m));
        v = Vec::canonical_nan(Vec::fma(c.one_minus_beta2, Vec::fms(g, g, v), v));
        const Vec::F denominator = Vec::fma(Vec::sqrtf(v), c.inv_sqrt_bc2, c.eps);
        if constexpr (kDecoupled) {
            p = Vec::mulf(p, c.decay);
        }
        p = Vec::canonical_nan(Vec::fma(c.neg_step, Vec::divf(m, denominator), p));
        Vec::store(exp_avg + i, m);
        Vec::store(exp_avg_sq + i, v);
        if constexpr (M == Master::kSplit) {
            store_split(param + i, master + i, p);
        } else {
            Vec::store(master + i, p);
        }
        if constexpr (kEmits<M>) {
            store_as<kEmitDtype<M>, Rounding::kHalfUp, kStream>(emit + i, p);
        }
    }
}

template <bool kDecoupled, Dtype G, Master M>
void adam_range(const AdamArgs& args, std::size_t begin, std::size_t end) {
    constexpr bool kSplits = M == Master::kSplit;
    const AdamConstants c(args);
    const auto* grad = static_cast<const Storage<G>*>(args.grad);
    auto* master = static_cast<MasterStorage<M>*>(args.master);
    std::uint16_t* param = args.param;
    float* exp_avg = args.exp_avg;
    float* exp_avg_sq = args.exp_avg_sq;
    std::uint16_t* emit = args.emit;

    const auto partial = [&](std::size_t i, std::size_t n) {
        Staged<Storage<G>> g(grad + i, n);
        Staged<MasterStorage<M>> w(master + i, n);
        Staged<float> m(exp_avg + i, n);
        Staged<float> v(exp_avg_sq + i, n);
        Staged<std::uint16_t> h(param + (kSplits ? i : 0), kSplits ? n : 0);
        Staged<std::uint16_t> out(nullptr, 0);
        adam_group<kDecoupled, G, M, false>(c, g.data, h.data, w.data, m.data, v.data, out.data);
        w.write_back(master + i, n);
        m.write_back(exp_avg + i, n);
        v.write_back(exp_avg_sq + i, n);
        if constexpr (kSplits) {
            h.write_back(param + i, n);
        } else if constexpr (kEmits<M>) {
            out.write_back(emit + i, n);
        }
    };

    std::size_t i = begin;
    if constexpr (kEmits<M>) {  // non-temporal stores want whole aligned lines
        const std::size_t head =
            (64 - reinterpret_cast<std::uintptr_t>(emit + i) % 64) % 64 / sizeof(std::uint16_t);
        if (head != 0) {
            const std::size_t n = head < end - i ? head : end - i;
            partial(i, n);
            i += n;
        }
    }
    for (; end - i >= kGroup; i += kGroup) {
        prefetch_group(grad + i + kAhead);
        prefetch_group(master + i + kAhead);
        prefetch_group(exp_avg + i + kAhead);
        prefetch_group(exp_avg_sq + i + kAhead);
        if constexpr (kSplits) {
            prefetch_group(param + i + kAhead);
            adam_group<kDecoupled, G, M, false>(c, grad + i, param + i, master + i, exp_avg + i,
                                                exp_avg_sq + i, nullptr);
        } else if constexpr (kEmits<M>) {
            adam_group<kDecoupled, G, M, true>(c, grad + i, nullptr, master + i, exp_avg + i, exp_avg_sq + i,
                                               emit + i);
        } else {
            adam_group<kDecoupled, G, M, false>(c, grad + i, nullptr, master + i, exp_avg + i, exp_avg_sq + i,
                                                nullptr);
        }
    }
    if (i != end) {
        partial(i, end - i);
    }
    if constexpr (kEmits<M>) {
        Vec::fence();
    }
}

// ---- sum of squares
// ----------------------------------------------------------------------------------------------------

template <Dtype G>
double sum_block(const Storage<G>* __restrict x, std::size_t n) {
    constexpr std::size_t kPerRow = kSumLanes / Vec::kWidth;
    Vec::D acc[kPerRow * Vec::kAccumulators];
    for (auto& a : acc) {
        a = Vec::zero();
    }
    const auto add_group = [&](const Storage<G>* group) {
        for (std::size_t row = 0; row < kGroup; row += kSumLanes) {
            for (std::size_t k = 0; k < kPerRow; ++k) {
                Vec::add_squares(acc + k * Vec::kAccumulators, load_as<G>(group + row + k * Vec::kWidth));
            }
        }
    };
    std::size_t i = 0;
    for (; n - i >= kGroup; i += kGroup) {
        prefetch_group(x + i + 2 * kAhead);
        add_group(x + i);
    }
    if (i != n) {
        const Staged<Storage<G>> rest(x + i, n - i);  // zeros add nothing
        add_group(rest.data);
    }
    alignas(64) double lanes[kSumLanes];
    constexpr std::size_t kPerVector = Vec::kWidth / Vec::kAccumulators;
    for (std::size_t k = 0; k < kPerRow * Vec::kAccumulators; ++k) {
        Vec::store_d(lanes + k * kPerVector, acc[k]);
    }
    for (std::size_t half = kSumLanes / 2; half != 0; half /= 2) {
        for (std::size_t k = 0; k < half; ++k) {
            lanes[k] += lanes[k + half];
        }
    }
    return lanes[0];
}

template <Dtype G>
SquareSum sum_range(const void* x, std::size_t begin, std::size_t end) {
    constexpr std::uint32_t kExponent = G == Dtype::kFloat32    ? 0x7f800000u
                                        : G == Dtype::kBfloat16 ? 0x7f80u
                                                                : 0x7c00u;
    const auto* data = static_cast<const Storage<G>*>(x);
    SquareSum total{0.0, 0};
    for (std::size_t i = begin; i < end; i += kSumBlock) {
        const std::size_t n = end - i < kSumBlock ? end - i : kSumBlock;
        const double block = sum_block<G>(data + i, n);
        total.sum += block;
        // A block of finite float32 cannot overflow float64 (4096 * 2^256), so only here may there be
        // something to count.
        if (!(block <= 0x1p1023)) {
            for (std::size_t j = i; j < i + n; ++j) {
                std::uint32_t u = 0;
                __builtin_memcpy(&u, data + j, sizeof(data[j]));
                total.non_finite += (u & kExponent) == kExponent;
            }
        }
    }
    return total;
}

// ---- element-wise helpers
// ----------------------------------------------------------------------------------------------

template <Dtype From, Dtype To, typename Operation>
inline void map_range(const void* src, void* dst, std::size_t begin, std::size_t end, Operation operation) {
    const auto* from = static_cast<const Storage<From>*>(src);
    auto* to = static_cast<Storage<To>*>(dst);
    std::size_t i = begin;
    for (; end - i >= kGroup; i += kGroup) {
        prefetch_group(from + i + kAhead);
        prefetch_group(to + i + kAhead);
        operation(from + i, to + i);
    }
    if (i != end) {
        const std::size_t n = end - i;
        const Staged<Storage<From>> a(from + i, n);
        Staged<Storage<To>> b(to + i, n);
        operation(a.data, b.data);
        b.write_back(to + i, n);
    }
}

// dst = round(dst + src). A float32 sum of two 16-bit numbers, rounded again to their 16 bits, is correctly
// rounded.
template <Dtype From, Dtype To>
void accumulate_range(const void* src, void* dst, std::size_t begin, std::size_t end) {
    map_range<From, To>(
        src, dst, begin, end, [](const Storage<From>* __restrict x, Storage<To>* __restrict y) {
            for (std::size_t k = 0; k < kGroup; k += Vec::kWidth) {
                const Vec::F sum = Vec::canonical_nan(Vec::addf(load_as<To>(y + k), load_as<From>(x + k)));
                store_as<To, Rounding::kHalfEven>(y + k, sum);
            }
        });
}

template <Dtype From, Dtype To>
void convert_range(const void* src, void* dst, std::size_t begin, std::size_t end) {
    if constexpr (From == To) {
        using T = Storage<From>;
        __builtin_memcpy(static_cast<T*>(dst) + begin, static_cast<const T*>(src) + begin,
                         (end - begin) * sizeof(T));
    } else {
        map_range<From, To>(
            src, dst, begin, end, [](const Storage<From>* __restrict x, Storage<To>* __restrict y) {
                for (std::size_t k = 0; k < kGroup; k += Vec::kWidth) {
                    store_as<To, Rounding::kHalfUp>(y + k, Vec::canonical_nan(load_as<From>(x + k)));
                }
            });
    }
}

void split_range(const float* src, std::uint16_t* param, std::int16_t* remainder, std::size_t begin,
                 std::size_t end) {
    const auto group = [](const float* __restrict x, std::uint16_t* __restrict h,
                          std::int16_t* __restrict l) {
        for (std::size_t k = 0; k < kGroup; k += Vec::kWidth) {
            store_split(h + k, l + k, Vec::canonical_nan(Vec::load(x + k)));
        }
    };
    std::size_t i = begin;
    for (; end - i >= kGroup; i += kGroup) {
        prefetch_group(src + i + kAhead);
        group(src + i, param + i, remainder + i);
    }
    if (i != end) {
        const std::size_t n = end - i;
        const Staged<float> x(src + i, n);
        Staged<std::uint16_t> h(nullptr, 0);
        Staged<std::int16_t> l(nullptr, 0);
        group(x.data, h.data, l.data);
        h.write_back(param + i, n);
        l.write_back(remainder + i, n);
    }
}

void join_range(const std::uint16_t* param, const std::int16_t* remainder, float* dst, std::size_t begin,
                std::size_t end) {
    const auto group = [](const std::uint16_t* __restrict h, const std::int16_t* __restrict l,
                          float* __restrict x) {
        for (std::size_t k = 0; k < kGroup; k += Vec::kWidth) {
            Vec::store(x + k, Vec::canonical_nan(load_split(h + k, l + k)));
        }
    };
    std::size_t i = begin;
    for (; end - i >= kGroup; i += kGroup) {
        prefetch_group(param + i + kAhead);
        prefetch_group(remainder + i + kAhead);
        group(param + i, remainder + i, dst + i);
    }
    if (i != end) {
        const std::size_t n = end - i;
        const Staged<std::uint16_t> h(param + i, n);
        const Staged<std::int16_t> l(remainder + i, n);
        Staged<float> x(nullptr, 0);
        group(h.data, l.data, x.data);
        x.write_back(dst + i, n);
    }
}

// Multiplies four arrays in place, with the prefetch of the optimizer step: as little arithmetic as there can
// be.
void stream_range(float* a, float* b, float* c, float* d, float factor, std::size_t begin, std::size_t end) {
    float* const arrays[4] = {a, b, c, d};
    const Vec::F by = Vec::set(factor);
    std::size_t i = begin;
    for (; end - i >= kGroup; i += kGroup) {
        for (float* x : arrays) {
            prefetch_group(x + i + kAhead);
        }
        for (std::size_t k = 0; k < kGroup; k += Vec::kWidth) {
            for (float* x : arrays) {
                Vec::store(x + i + k, Vec::mulf(Vec::load(x + i + k), by));
            }
        }
    }
}

// ---- table
// -------------------------------------------------------------------------------------------------------------

template <bool kDecoupled, Dtype G>
constexpr void fill_adam(AdamKernel (&row)[kMasters]) {
    row[static_cast<int>(Master::kSplit)] = adam_range<kDecoupled, G, Master::kSplit>;
    row[static_cast<int>(Master::kFloat32)] = adam_range<kDecoupled, G, Master::kFloat32>;
    row[static_cast<int>(Master::kEmitBfloat16)] = adam_range<kDecoupled, G, Master::kEmitBfloat16>;
    row[static_cast<int>(Master::kEmitFloat16)] = adam_range<kDecoupled, G, Master::kEmitFloat16>;
}

template <Dtype G>
constexpr void fill_dtype(Kernels& k) {
    constexpr int g = static_cast<int>(G);
    fill_adam<false, G>(k.adam[0][g]);
    fill_adam<true, G>(k.adam[1][g]);
    k.sum_of_squares[g] = sum_range<G>;
    k.accumulate[g] = accumulate_range<G, Dtype::kFloat32>;
    k.accumulate_same[g] = accumulate_range<G, G>;
    k.convert[g][0] = convert_range<G, Dtype::kFloat32>;
    k.convert[g][1] = convert_range<G, Dtype::kBfloat16>;
    k.convert[g][2] = convert_range<G, Dtype::kFloat16>;
}

constexpr Kernels make_kernels() {
    Kernels k{};
    fill_dtype<Dtype::kFloat32>(k);
    fill_dtype<Dtype::kBfloat16>(k);
    fill_dtype<Dtype::kFloat16>(k);
    k.split = split_range;
    k.join = join_range;
    k.stream = stream_range;
    return k;
}
