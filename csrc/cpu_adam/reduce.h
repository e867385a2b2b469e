// The sum of squares, in the order that kernels.h fixes. Included after storage.h.

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
    // What pads the last group is zero and adds nothing.
    for_groups<kGroup, 2 * kAhead>(
        0, n, [&](std::size_t, const Storage<G>* group) { add_group(group); }, Input<Storage<G>>{x});
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
