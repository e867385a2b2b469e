// Optimizer states from and to float32, for checkpoints. Included after states.h.

template <typename States>
void save_states_range(const StateArgs& args, std::size_t begin, std::size_t end) {
    using T = typename States::Storage;
    const Input<float> m{args.values[0]}, v{args.values[1]};
    const Output<T> first{static_cast<T*>(args.states[0])}, second{static_cast<T*>(args.states[1])};
    for_segments(args.seed, args.step, args.offset, begin, end,
                 [&](std::size_t from, std::size_t to, const Random& random, std::uint64_t place) {
                     if constexpr (States::kKind == StateKind::kInt8) {
                         for_groups<kStateBlock>(
                             from, to,
                             [&](std::size_t i, const float* __restrict x, const float* __restrict y,
                                 T* __restrict a, T* __restrict b, BlockUnits* __restrict units) {
                                 typename States::Block block;
                                 Vec::U largest_x = Vec::setu(0), largest_y = Vec::setu(0);
                                 const Vec::U key = random.key(place + i);
                                 for (std::size_t k = 0; k < kStateBlock; k += Vec::kWidth) {
                                     const Vec::U first = States::magnitude(Vec::load(x + k));
                                     const Vec::U second = States::magnitude(Vec::load(y + k));
                                     largest_x = Vec::max(largest_x, first);
                                     largest_y = Vec::max(largest_y, second);
                                     Vec::store(block.m + k, Vec::load(x + k));
                                     Vec::store(block.magnitude + k, Vec::real(first));
                                     Vec::store(block.v + k, Vec::real(second));
                                     Vec::store(block.random + k, Vec::real(random.bits_of(key, k)));
                                 }
                                 States::write(block, largest_x, largest_y, a, b, units);
                             },
                             m, v, first, second, Array<BlockUnits, Access::kWrite, kStateBlock>{args.units});
                     } else {
                         for_groups<kGroup>(
                             from, to,
                             [&](std::size_t i, const float* __restrict x, const float* __restrict y,
                                 T* __restrict a, T* __restrict b) {
                                 Vec::U places = Random::places(place + i);
                                 for (std::size_t k = 0; k < kGroup; k += kPair) {
                                     Vec::F first[2], second[2];
                                     Vec::U bits[2];
                                     for (std::size_t j = 0; j < 2; ++j) {
                                         bits[j] = random.bits(places);
                                         places = Random::next(places);
                                         first[j] = Vec::canonical_nan(Vec::load(x + k + j * Vec::kWidth));
                                         second[j] = Vec::canonical_nan(Vec::load(y + k + j * Vec::kWidth));
                                     }
                                     States::template store<0>(a + k, first, bits);
                                     States::template store<1>(b + k, second, bits);
                                 }
                             },
                             m, v, first, second);
                     }
                 });
}

template <typename States>
void load_states_range(const StateArgs& args, std::size_t begin, std::size_t end) {
    using T = typename States::Storage;
    const Output<float> m{args.values[0]}, v{args.values[1]};
    const Input<T> first{static_cast<const T*>(args.states[0])},
        second{static_cast<const T*>(args.states[1])};
    if constexpr (States::kKind == StateKind::kInt8) {
        for_groups<kStateBlock>(
            begin, end,
            [](std::size_t, const T* __restrict a, const T* __restrict b, const BlockUnits* __restrict units,
               float* __restrict x, float* __restrict y) {
                const FirstReader from_m(units->first, a);
                const SecondReader from_v(units->second);
                for (std::size_t k = 0; k < kStateBlock; k += Vec::kWidth) {
                    Vec::store(x + k, Vec::canonical_nan(from_m.load(k)));
                    Vec::store(y + k, Vec::canonical_nan(from_v.load(b + k)));
                }
            },
            first, second, Array<const BlockUnits, Access::kRead, kStateBlock>{args.units}, m, v);
    } else {
        for_groups<kGroup>(
            begin, end,
            [](std::size_t, const T* __restrict a, const T* __restrict b, float* __restrict x,
               float* __restrict y) {
                for (std::size_t k = 0; k < kGroup; k += kPair) {
                    Vec::F first[2], second[2];
                    States::load(a + k, first);
                    States::load(b + k, second);
                    for (std::size_t j = 0; j < 2; ++j) {
                        Vec::store(x + k + j * Vec::kWidth, Vec::canonical_nan(first[j]));
                        Vec::store(y + k + j * Vec::kWidth, Vec::canonical_nan(second[j]));
                    }
                }
            },
            first, second, m, v);
    }
}
