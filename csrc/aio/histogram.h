// How long operations took: a histogram of fixed size, from which percentiles are read.
//
// Owns: the buckets.  Four per octave of nanoseconds, so that a percentile is at most a quarter too high.
// Must not know: operations, threads; the engine adds under its mutex.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>

namespace swap_aio {

class LatencyHistogram {
  public:
    void add(double seconds) {
        const auto ns = static_cast<std::uint64_t>(std::clamp(seconds * 1e9, 0.0, 1e18));
        ++counts_[bucket_of(ns)];
        ++total_;
        max_s_ = std::max(max_s_, seconds);
    }

    /// Smallest bucket end that at least the share `q` of the values does not exceed; 0 when there are none.
    double quantile_s(double q) const {
        if (total_ == 0) return 0;
        const auto rank = static_cast<std::uint64_t>(std::ceil(q * static_cast<double>(total_)));
        std::uint64_t seen = 0;
        for (std::size_t i = 0; i < counts_.size(); ++i) {
            seen += counts_[i];
            if (seen >= rank && counts_[i] != 0) return std::min(end_s(i), max_s_);
        }
        return max_s_;
    }

    double max_s() const { return max_s_; }

  private:
    static constexpr unsigned kSubBits = 2;
    static constexpr std::size_t kBuckets = std::size_t{64} << kSubBits;

    // The position of the highest bit, then the kSubBits bits below it.
    static std::size_t bucket_of(std::uint64_t ns) {
        if (ns < (1U << kSubBits)) return static_cast<std::size_t>(ns);
        const unsigned octave = std::bit_width(ns) - 1;
        const std::uint64_t sub = (ns >> (octave - kSubBits)) & ((1U << kSubBits) - 1);
        return (static_cast<std::size_t>(octave) << kSubBits) + static_cast<std::size_t>(sub);
    }

    static double end_s(std::size_t bucket) {
        if (bucket < (1U << kSubBits)) return static_cast<double>(bucket + 1) * 1e-9;
        const auto octave = static_cast<int>(bucket >> kSubBits);
        const double sub = static_cast<double>(bucket & ((1U << kSubBits) - 1)) + 1;
        return std::ldexp(1.0 + sub / (1U << kSubBits), octave) * 1e-9;
    }

    std::array<std::uint64_t, kBuckets> counts_{};
    std::uint64_t total_ = 0;
    double max_s_ = 0;
};

}  // namespace swap_aio
