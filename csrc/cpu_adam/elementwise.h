// Accumulation, conversions, the split master's two directions and the bench's roofline. Included after
// storage.h.

template <Dtype From, Dtype To, typename Operation>
inline void map_range(const void* src, void* dst, std::size_t begin, std::size_t end, Operation operation) {
    for_groups<kGroup>(
        begin, end,
        [&](std::size_t, const Storage<From>* __restrict x, Storage<To>* __restrict y) {
            for (std::size_t k = 0; k < kGroup; k += kPair) {
                operation(x + k, y + k);
            }
        },
        Input<Storage<From>>{static_cast<const Storage<From>*>(src)},
        InOut<Storage<To>>{static_cast<Storage<To>*>(dst)});
}

// dst = round(dst + src). A float32 sum of two 16-bit numbers, rounded again to their 16 bits, is correctly
// rounded.
template <Dtype From, Dtype To>
void accumulate_range(const void* src, void* dst, std::size_t begin, std::size_t end) {
    map_range<From, To>(src, dst, begin, end, [](const Storage<From>* x, Storage<To>* y) {
        Vec::F a[2], b[2];
        load_as<To>(y, a);
        load_as<From>(x, b);
        store_as<To, Rounding::kHalfEven>(
            y, {Vec::canonical_nan(Vec::addf(a[0], b[0])), Vec::canonical_nan(Vec::addf(a[1], b[1]))});
    });
}

template <Dtype From, Dtype To>
void convert_range(const void* src, void* dst, std::size_t begin, std::size_t end) {
    if constexpr (From == To) {
        using T = Storage<From>;
        __builtin_memcpy(static_cast<T*>(dst) + begin, static_cast<const T*>(src) + begin,
                         (end - begin) * sizeof(T));
    } else {
        map_range<From, To>(src, dst, begin, end, [](const Storage<From>* x, Storage<To>* y) {
            Vec::F a[2];
            load_as<From>(x, a);
            store_as<To, Rounding::kHalfUp>(y, {Vec::canonical_nan(a[0]), Vec::canonical_nan(a[1])});
        });
    }
}

void split_range(const float* src, std::uint16_t* param, std::int16_t* remainder, std::size_t begin,
                 std::size_t end) {
    for_groups<kGroup>(
        begin, end,
        [](std::size_t, const float* __restrict x, std::uint16_t* __restrict h, std::int16_t* __restrict l) {
            for (std::size_t k = 0; k < kGroup; k += kPair) {
                store_split(h + k, l + k,
                            {Vec::canonical_nan(Vec::load(x + k)),
                             Vec::canonical_nan(Vec::load(x + k + Vec::kWidth))});
            }
        },
        Input<float>{src}, Output<std::uint16_t>{param}, Output<std::int16_t>{remainder});
}

void join_range(const std::uint16_t* param, const std::int16_t* remainder, float* dst, std::size_t begin,
                std::size_t end) {
    for_groups<kGroup>(
        begin, end,
        [](std::size_t, const std::uint16_t* __restrict h, const std::int16_t* __restrict l,
           float* __restrict x) {
            for (std::size_t k = 0; k < kGroup; k += kPair) {
                Vec::F a[2];
                load_split(h + k, l + k, a);
                Vec::store(x + k, Vec::canonical_nan(a[0]));
                Vec::store(x + k + Vec::kWidth, Vec::canonical_nan(a[1]));
            }
        },
        Input<std::uint16_t>{param}, Input<std::int16_t>{remainder}, Output<float>{dst});
}

// Multiplies four arrays in place, with the prefetch of the optimizer step: as little arithmetic as there can
// be.
void stream_range(float* a, float* b, float* c, float* d, float factor, std::size_t begin, std::size_t end) {
    const Vec::F by = Vec::set(factor);
    for_groups<kGroup>(
        begin, end,
        [&](std::size_t, auto* __restrict... array) {
            for (std::size_t k = 0; k < kGroup; k += Vec::kWidth) {
                (Vec::store(array + k, Vec::mulf(Vec::load(array + k), by)), ...);
            }
        },
        InOut<float>{a}, InOut<float>{b}, InOut<float>{c}, InOut<float>{d});
}
