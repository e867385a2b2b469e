// The optimizer step, once for all rules, state formats, gradient types and master weights. Included after
// rules.h and states.h.

template <Master M>
constexpr bool kSplits = M == Master::kSplit;
template <Master M>
using MasterStorage = std::conditional_t<kSplits<M>, std::int16_t, float>;
// Whether a parameter is written beside the master, and in which format.
template <Master M>
constexpr bool kEmits = M == Master::kEmitBfloat16 || M == Master::kEmitFloat16;
template <Master M>
constexpr Dtype kEmitDtype = M == Master::kEmitFloat16 ? Dtype::kFloat16 : Dtype::kBfloat16;

template <Master M>
inline void load_master(const std::uint16_t* param, const MasterStorage<M>* master, Vec::F (&x)[2]) {
    if constexpr (kSplits<M>) {
        load_split(param, master, x);
    } else {
        load_as<Dtype::kFloat32>(master, x);
    }
}

// kStream: as for store_as, of what is emitted.
template <Master M, bool kStream = true>
inline void store_master(std::uint16_t* param, MasterStorage<M>* master, Storage<kEmitDtype<M>>* emit,
                         const Vec::F (&updated)[2]) {
    const Vec::F p[2] = {Vec::canonical_result(updated[0]), Vec::canonical_result(updated[1])};
    if constexpr (kSplits<M>) {
        store_split(param, master, p);
    } else {
        store_as<Dtype::kFloat32, Rounding::kHalfUp>(master, p);
        if constexpr (kEmits<M>) {
            store_as<kEmitDtype<M>, Rounding::kHalfUp, kStream>(emit, p);
        }
    }
}

// Formats without blocks: states go from memory to memory through registers.
template <typename Rule, typename States, Dtype G, Master M>
struct Elementwise {
    static constexpr std::size_t kSize = kGroup;
    using State = typename States::Storage;
    static constexpr int kStates = Rule::kStates;

    static void run(const Rule& rule, const Random& random, std::uint64_t place,
                    const Storage<G>* __restrict grad, std::uint16_t* __restrict param,
                    MasterStorage<M>* __restrict master, State* __restrict first, State* __restrict second,
                    BlockUnits*, Storage<kEmitDtype<M>>* __restrict emit) {
        Vec::U places = Random::places(place);
        for (std::size_t k = 0; k < kSize; k += kPair) {
            Vec::F p[2], raw[2], m[2], v[2];
            Vec::U bits[2]{};
            load_master<M>(advance<kSplits<M>>(param, k), master + k, p);
            load_as<G>(grad + k, raw);
            if constexpr (kStates > 0) {
                States::load(first + k, m);
            }
            if constexpr (kStates > 1) {
                States::load(second + k, v);
            }
            for (std::size_t j = 0; j < 2; ++j) {
                Vec::F s[kStates == 0 ? 1 : kStates];
                if constexpr (kStates > 0) {
                    s[0] = m[j];
                }
                if constexpr (kStates > 1) {
                    s[1] = v[j];
                }
                p[j] = rule.update(p[j], rule.gradient(raw[j], p[j]), s);
                if constexpr (kStates > 0) {
                    m[j] = Vec::canonical_result(s[0]);
                }
                if constexpr (kStates > 1) {
                    v[j] = Vec::canonical_result(s[1]);
                }
                if constexpr (States::kKind != StateKind::kFloat32) {
                    bits[j] = random.bits(places);
                    places = Random::next(places);
                }
            }
            if constexpr (kStates > 0) {
                States::template store<0>(first + k, m, bits);
                if constexpr (kStates > 1) {
                    States::template store<1>(second + k, v, bits);
                }
            }
            store_master<M>(advance<kSplits<M>>(param, k), master + k, advance<kEmits<M>>(emit, k), p);
        }
    }
};

// 8 bits in blocks: the new states wait in the first-level cache until the block's largest ones are known.
// Random numbers are made in the first pass, beside its divisions. Parameters are stored a pair of vectors
// late: what comes next does not wait behind them for their divisions.
template <typename Rule, Dtype G, Master M>
struct Blockwise {
    static constexpr std::size_t kSize = kStateBlock;
    static_assert(Rule::kStates == 2);

    static void run(const Rule& rule, const Random& random, std::uint64_t place,
                    const Storage<G>* __restrict grad, std::uint16_t* __restrict param,
                    MasterStorage<M>* __restrict master, std::uint8_t* __restrict first,
                    std::uint8_t* __restrict second, BlockUnits* __restrict units,
                    Storage<kEmitDtype<M>>* __restrict emit) {
        Int8States::Block block;
        Vec::F late[2]{};
        Vec::U largest_m = Vec::setu(0), largest_v = Vec::setu(0);
        const FirstReader from_m(units->first, first);
        const SecondReader from_v(units->second);
        const Vec::U key = random.key(place);
        for (std::size_t k = 0; k < kSize; k += kPair) {
            Vec::F p[2], raw[2];
            load_master<M>(advance<kSplits<M>>(param, k), master + k, p);
            load_as<G>(grad + k, raw);
            for (std::size_t j = 0; j < 2; ++j) {
                const std::size_t at = k + j * Vec::kWidth;
                Vec::F s[2] = {from_m.load(at), from_v.load(second + at)};
                p[j] = rule.update(p[j], rule.gradient(raw[j], p[j]), s);
                const Vec::U magnitude = Int8States::magnitude(s[0]);
                largest_m = Vec::max(largest_m, magnitude);
                largest_v = Vec::max(largest_v, Vec::bits(s[1]));
                Vec::store(block.m + at, s[0]);
                Vec::store(block.magnitude + at, Vec::real(magnitude));
                Vec::store(block.v + at, s[1]);
                Vec::store(block.random + at, Vec::real(random.bits_of(key, at)));
            }
            if (k > 0) {
                store_master<M>(advance<kSplits<M>>(param, k - kPair), master + k - kPair,
                                advance<kEmits<M>>(emit, k - kPair), late);
            }
            late[0] = p[0];
            late[1] = p[1];
        }
        Int8States::write(block, largest_m, largest_v, first, second, units);
        constexpr std::size_t kLast = kSize - kPair;
        store_master<M>(advance<kSplits<M>>(param, kLast), master + kLast, advance<kEmits<M>>(emit, kLast),
                        late);
    }
};

template <typename Rule, typename States, Dtype G, Master M>
using Pass = std::conditional_t<States::kKind == StateKind::kInt8, Blockwise<Rule, G, M>,
                                Elementwise<Rule, States, G, M>>;

// Emission in 16 bits goes past the caches, in whole aligned lines: the elements before the first such line,
// or in a block format the whole block, take a detour.
template <typename T>
std::size_t elements_to_line(const T* p) {
    return (64 - reinterpret_cast<std::uintptr_t>(p) % 64) % 64 / sizeof(T);
}

// Numbers of a group that are worked on beside those in memory; nothing where the array is absent.
template <bool kPresent, typename T, std::size_t kSize>
struct Copied {
    alignas(64) T data[kSize];
    explicit Copied(const T* from) { __builtin_memcpy(data, from, sizeof(data)); }
    T* at() { return data; }
    void leave(T* to) const {
        if constexpr (sizeof(data) % 64 == 0) {
            for (std::size_t line = 0; line < sizeof(data); line += 64) {
                Vec::stream_line(reinterpret_cast<char*>(to) + line,
                                 reinterpret_cast<const char*>(data) + line);
            }
        } else {
            __builtin_memcpy(to, data, sizeof(data));
        }
    }
};
template <typename T, std::size_t kSize>
struct Copied<false, T, kSize> {
    explicit Copied(const T*) {}
    T* at() { return nullptr; }
    void leave(T*) const {}
};

template <typename Rule, typename States, Mode kMode, Dtype G, Master M>
void step_range(const StepArgs& args, std::size_t begin, std::size_t end) {
    using P = Pass<Rule, States, G, M>;
    using State = typename States::Storage;
    using Emission = Storage<kEmitDtype<M>>;
    constexpr bool kBlocks = States::kKind == StateKind::kInt8;
    constexpr bool kApart = kMode == Mode::kApart;
    constexpr Access kAccess = kApart ? Access::kRead : Access::kUpdate;

    const Rule rule(args.constants);

    std::conditional_t<kSplits<M>, Array<std::uint16_t, kAccess>, Absent<std::uint16_t>> param;
    std::conditional_t<(Rule::kStates > 0), Array<State, kAccess>, Absent<State>> first;
    std::conditional_t<(Rule::kStates > 1), Array<State, kAccess>, Absent<State>> second;
    std::conditional_t<kBlocks, Array<BlockUnits, kAccess, kStateBlock>, Absent<BlockUnits>> units;
    std::conditional_t<kEmits<M>, Output<Emission>, Absent<Emission>> emit;
    const Input<Storage<G>> grad{static_cast<const Storage<G>*>(args.grad)};
    const Array<MasterStorage<M>, kAccess> master{static_cast<MasterStorage<M>*>(args.master)};
    std::conditional_t<kApart && kSplits<M>, Output<std::uint16_t>, Absent<std::uint16_t>> param_to;
    std::conditional_t<kApart, Output<MasterStorage<M>>, Absent<MasterStorage<M>>> master_to;
    std::conditional_t<kApart && (Rule::kStates > 0), Output<State>, Absent<State>> first_to;
    std::conditional_t<kApart && (Rule::kStates > 1), Output<State>, Absent<State>> second_to;
    std::conditional_t<kApart && kBlocks, Array<BlockUnits, Access::kWrite, kStateBlock>, Absent<BlockUnits>>
        units_to;
    if constexpr (kApart) {
        master_to.base = static_cast<MasterStorage<M>*>(args.target.master);
        if constexpr (kSplits<M>) {
            param_to.base = args.target.param;
        }
        if constexpr (Rule::kStates > 0) {
            first_to.base = static_cast<State*>(args.target.states[0]);
        }
        if constexpr (Rule::kStates > 1) {
            second_to.base = static_cast<State*>(args.target.states[1]);
        }
        if constexpr (kBlocks) {
            units_to.base = args.target.units;
        }
    }
    if constexpr (kSplits<M>) {
        param.base = args.param;
    }
    if constexpr (Rule::kStates > 0) {
        first.base = static_cast<State*>(args.states[0]);
    }
    if constexpr (Rule::kStates > 1) {
        second.base = static_cast<State*>(args.states[1]);
    }
    if constexpr (kBlocks) {
        units.base = args.units;
    }
    if constexpr (kEmits<M>) {
        emit.base = static_cast<Emission*>(args.emit);
    }

    const auto segment = [&](std::size_t from, std::size_t to, const Random& random, std::uint64_t place) {
        const auto run_group = [&](std::size_t i, const Storage<G>* g, std::uint16_t* h, MasterStorage<M>* w,
                                   State* s0, State* s1, BlockUnits* u, Emission* out) {
            if constexpr (kBlocks && kEmits<M>) {
                if (elements_to_line(out) != 0) {
                    alignas(64) Emission aligned[P::kSize];
                    P::run(rule, random, place + i, g, h, w, s0, s1, u, aligned);
                    __builtin_memcpy(out, aligned, sizeof(aligned));
                    return;
                }
            }
            P::run(rule, random, place + i, g, h, w, s0, s1, u, out);
        };
        const auto group = [&](std::size_t i, const Storage<G>* g, std::uint16_t* h, MasterStorage<M>* w,
                               State* s0, State* s1, BlockUnits* u, Emission* out, std::uint16_t* h_to,
                               MasterStorage<M>* w_to, State* s0_to, State* s1_to, BlockUnits* u_to) {
            if constexpr (kApart) {
                Copied<kSplits<M>, std::uint16_t, P::kSize> new_h(h);
                Copied<true, MasterStorage<M>, P::kSize> new_w(w);
                Copied<(Rule::kStates > 0), State, P::kSize> new_s0(s0);
                Copied<(Rule::kStates > 1), State, P::kSize> new_s1(s1);
                Copied<kBlocks, BlockUnits, 1> new_u(u);
                run_group(i, g, new_h.at(), new_w.at(), new_s0.at(), new_s1.at(), new_u.at(), out);
                new_h.leave(h_to);
                new_w.leave(w_to);
                new_s0.leave(s0_to);
                new_s1.leave(s1_to);
                new_u.leave(u_to);
            } else {
                run_group(i, g, h, w, s0, s1, u, out);
            }
        };
        const auto walk = [&](auto&& over) {
            over(group, grad, param, master, first, second, units, emit, param_to, master_to, first_to,
                 second_to, units_to);
        };
        if constexpr (!kBlocks && (kEmits<M> || kApart)) {
            const std::size_t head =
                kApart ? (P::kSize - from % P::kSize) % P::kSize : elements_to_line(emit.at(from));
            if (head != 0) {
                const std::size_t n = head < to - from ? head : to - from;
                walk([&](const auto&... arrays) { for_partial<P::kSize>(from, n, arrays...); });
                from += n;
            }
        }
        walk([&](const auto&... arrays) { for_groups<P::kSize>(from, to, arrays...); });
    };
    if constexpr (States::kKind == StateKind::kFloat32 || Rule::kStates == 0) {
        segment(begin, end, Random(0, 0, 0), 0);
    } else {
        for_segments(args.seed, args.step, args.offset, begin, end, segment);
    }
    if constexpr (kEmits<M> || kApart) {
        Vec::fence();
    }
}
