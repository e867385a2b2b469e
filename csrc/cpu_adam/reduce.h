// Sums of squares, in the order that kernels.h fixes. Included after storage.h.

// The sum of squares of one block of at most kSumBlock elements.
class SquareLanes {
  public:
    SquareLanes() {
        for (auto& a : acc_) {
            a = Vec::zero();
        }
    }
    // Elements k to k + Vec::kWidth of a group of kGroup.
    void add(std::size_t k, Vec::F x) {
        Vec::add_squares(acc_ + k % kSumLanes / Vec::kWidth * Vec::kAccumulators, x);
    }
    double total() const {
        alignas(64) double lanes[kSumLanes];
        constexpr std::size_t kPerVector = Vec::kWidth / Vec::kAccumulators;
        for (std::size_t k = 0; k < kVectors; ++k) {
            Vec::store_d(lanes + k * kPerVector, acc_[k]);
        }
        for (std::size_t half = kSumLanes / 2; half != 0; half /= 2) {
            for (std::size_t k = 0; k < half; ++k) {
                lanes[k] += lanes[k + half];
            }
        }
        return lanes[0];
    }

  private:
    static constexpr std::size_t kVectors = kSumLanes / Vec::kWidth * Vec::kAccumulators;
    Vec::D acc_[kVectors];
};

template <Dtype G>
double sum_block(const Storage<G>* x, std::size_t n) {
    SquareLanes lanes;  // what pads the last group is zero and adds nothing
    for_groups<kGroup, 2 * kAhead>(
        0, n,
        [&](std::size_t, const Storage<G>* group) {
            for (std::size_t k = 0; k < kGroup; k += Vec::kWidth) {
                lanes.add(k, load_as<G>(group + k));
            }
        },
        Input<Storage<G>>{x});
    return lanes.total();
}

template <Dtype G>
SquareSum sum_range(const void* x, double* blocks, std::size_t begin, std::size_t end) {
    constexpr std::uint32_t kExponent = G == Dtype::kFloat32    ? 0x7f800000u
                                        : G == Dtype::kBfloat16 ? 0x7f80u
                                                                : 0x7c00u;
    const auto* data = static_cast<const Storage<G>*>(x);
    SquareSum total{0.0, 0};
    for (std::size_t i = begin; i < end; i += kSumBlock) {
        const std::size_t n = end - i < kSumBlock ? end - i : kSumBlock;
        const double block = sum_block<G>(data + i, n);
        total.sum += block;
        if (blocks != nullptr) {
            blocks[i / kSumBlock] = block;
        }
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
