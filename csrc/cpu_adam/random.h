// Random bits for stochastic rounding, a pure function of (seed, step, global element index): they depend on
// neither threads nor division into ranges nor instruction set. Included after groups.h.
//
// Every block of kBlock elements has a key of 64 bits; an element's bits are its place in the block, mixed
// twice with half of the key by a multiplicative hash whose every output bit depends on every input bit.
// Source: C. Wellons, "Prospecting for hash functions" (the multipliers and shifts); Steele, Lea, Flood,
// "Fast splittable pseudorandom number generators", OOPSLA 2014 (the key).

inline std::uint64_t mix64(std::uint64_t x) {
    x += 0x9e3779b97f4a7c15u;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return x ^ x >> 31;
}

// Bits of 0, 1, ...
struct Numbers {
    alignas(64) float data[kStateBlock];
    constexpr Numbers() : data() {
        for (std::uint32_t k = 0; k < kStateBlock; ++k) {
            data[k] = __builtin_bit_cast(float, k);
        }
    }
};
constexpr Numbers kNumbers;

struct Random {
    static constexpr std::uint64_t kBlock = std::uint64_t{1} << 16;
    Vec::U low, high;

    Random(std::uint64_t seed, std::uint64_t step, std::uint64_t block) {
        const std::uint64_t key = mix64(mix64(mix64(seed) ^ step) ^ block);
        low = Vec::setu(static_cast<std::uint32_t>(key));
        high = Vec::setu(static_cast<std::uint32_t>(key >> 32));
    }
    // The places of Vec::kWidth elements, the first of which is number `place` of the block.
    static Vec::U places(std::uint64_t place) {
        return Vec::add(Vec::setu(static_cast<std::uint32_t>(place)), Vec::iota());
    }
    static Vec::U next(Vec::U places) { return Vec::add(places, Vec::setu(Vec::kWidth)); }
    // 32 bits for each of the elements at these places.
    Vec::U bits(Vec::U places) const { return mixed(Vec::bxor(places, low)); }
    // The same for elements k to k + Vec::kWidth of kStateBlock, the first of which has a place that is a
    // multiple of it: no sum carries into the key.
    Vec::U key(std::uint64_t place) const {
        return Vec::bxor(Vec::setu(static_cast<std::uint32_t>(place)), low);
    }
    Vec::U bits_of(Vec::U key, std::size_t k) const {
        return mixed(Vec::bxor(key, Vec::bits(Vec::load(kNumbers.data + k))));
    }

  private:
    Vec::U mixed(Vec::U x) const {
        x = Vec::mul(x, Vec::setu(0x7feb352du));
        x = Vec::mul(Vec::bxor3(x, Vec::shr<15>(x), high), Vec::setu(0x846ca68bu));
        return Vec::bxor(x, Vec::shr<16>(x));
    }
};

// segment(from, to, random, first_place) for every block of random numbers that [begin, end) touches;
// first_place + i is element i's place in the block. The range's element 0 has the global index `offset`.
template <typename Segment>
inline void for_segments(std::uint64_t seed, std::uint64_t step, std::uint64_t offset, std::size_t begin,
                         std::size_t end, const Segment& segment) {
    while (begin != end) {
        const std::uint64_t index = offset + begin;
        const std::uint64_t place = index % Random::kBlock;
        const std::uint64_t rest = Random::kBlock - place;
        const std::size_t stop = end - begin < rest ? end : begin + static_cast<std::size_t>(rest);
        segment(begin, stop, Random(seed, step, index / Random::kBlock), place - begin);
        begin = stop;
    }
}
