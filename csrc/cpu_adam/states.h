// How optimizer states are stored. Included after storage.h and random.h.
//
// A format is written through `store`, which may use 32 random bits per element: the first state the lower
// ones, the second the upper ones.

struct Float32States {
    static constexpr StateKind kKind = StateKind::kFloat32;
    using Storage = float;
    static Vec::F load(const float* p) { return Vec::load(p); }
    template <int kState>
    static void store(float* p, Vec::F x, Vec::U) {
        Vec::store(p, x);
    }
};

// bfloat16, rounded up in magnitude with the probability that makes the expected value exact. Rounding to
// nearest would lose every update smaller than half a unit: with beta2 = 0.999 the second moment could not
// fall.
struct Bfloat16States {
    static constexpr StateKind kKind = StateKind::kBfloat16;
    using Storage = std::uint16_t;
    static Vec::F load(const std::uint16_t* p) { return load_as<Dtype::kBfloat16>(p); }
    template <int kState>
    static void store(std::uint16_t* p, Vec::F x, Vec::U random) {
        const Vec::U r = kState == 0 ? Vec::band(random, Vec::setu(0xffffu)) : Vec::shr<16>(random);
        Vec::store_u16(p, Vec::shr<16>(Vec::add(Vec::bits(x), r)));
    }
};

// 8 bits in blocks of kStateBlock elements: a small floating-point number with 3 bits of mantissa and, like
// IEEE 754, gradual underflow; its exponent counts from one byte of the block. The first moment has a sign
// and 4 bits of exponent (0 and 2^-17 to 1.875 relative to the block), the second no sign and 5 bits (0 and
// 2^-33 to 1.875). Values are rounded stochastically, except that a second moment above zero never becomes
// zero: it divides.
//
// As the unit is a power of two, and the numbers of one unit are among those of the next smaller one, a value
// that was stored before is stored again exactly, whatever the unit: an unchanged state does not wander. A
// moment that is not finite makes its block NaN.
//
// With c = the smallest normal number of the block and cb its bits, the code of x >= 0 before rounding is
//     max(bits(x + c) - cb, bits(x) - cb + 2^23), shifted right by 20:
// the first argument is the larger one below c, where numbers are equidistant. To read it is to take the
// smaller one of the two inverses. No comparison, no division.
template <int kExponentBits, bool kSigned>
struct Minifloat {
    static constexpr int kMantissaBits = 3;
    static constexpr int kDropped = 23 - kMantissaBits;
    static constexpr std::uint32_t kLargest = (1u << (kExponentBits + kMantissaBits)) - 1;
    // Exponents above that of the smallest normal number.
    static constexpr std::uint32_t kSpan = (1u << kExponentBits) - 2;
    static constexpr std::uint8_t kNotFinite = 255;
    // An eighth of the smallest normal number is a normal number of float32, too.
    static constexpr std::uint8_t kLowest = 4;
    static constexpr std::uint32_t kNan = 0x7fc00000u;
    static_assert((kSigned ? 1 : 0) + kExponentBits + kMantissaBits == 8);

    Vec::U normal, below;  // bits of the smallest normal number, and those less 2^23
    Vec::F smallest;

    explicit Minifloat(std::uint8_t unit) {
        if (unit == kNotFinite) {
            normal = Vec::setu(0);
            below = Vec::setu(kNan);
            smallest = Vec::real(below);
        } else {  // memory of zeros means zeros
            const std::uint32_t bits = std::uint32_t{unit < kLowest ? kLowest : unit} << 23;
            normal = Vec::setu(bits);
            below = Vec::setu(bits - (1u << 23));
            smallest = Vec::real(normal);
        }
    }

    // The unit for a block whose largest magnitude has these bits: the exponent of its smallest normal
    // number. What is above 1.875 of a power of two belongs to the next one. Quarters of the smallest one are
    // normal numbers, too.
    static std::uint8_t unit_for(std::uint32_t largest) {
        if (largest > 0x7f700000u) {
            return kNotFinite;
        }
        const std::uint32_t exponent = (largest + ((1u << kDropped) - 1)) >> 23;
        return static_cast<std::uint8_t>(exponent < kLowest + kSpan ? kLowest : exponent - kSpan);
    }

    Vec::F load(const std::uint8_t* p) const {
        const Vec::U code = Vec::shl<kDropped>(Vec::load_u8(p));
        const Vec::U u = kSigned ? Vec::band(code, Vec::setu(kLargest << kDropped)) : code;
        const Vec::U gradual = Vec::bits(Vec::subf(Vec::real(Vec::add(u, normal)), smallest));
        const Vec::U magnitude = Vec::min(gradual, Vec::add(u, below));
        if constexpr (kSigned) {
            return Vec::real(Vec::bor(magnitude, Vec::band(Vec::shl<4>(code), Vec::setu(0x80000000u))));
        } else {
            return Vec::real(magnitude);
        }
    }

    // random: 20 bits per element. The unit is that of a block with x in it: no code is too large.
    void store(std::uint8_t* p, Vec::F x, Vec::U random) const {
        const Vec::U u = Vec::bits(x);
        const Vec::U magnitude = kSigned ? Vec::band(u, Vec::setu(0x7fffffffu)) : u;
        const Vec::U gradual = Vec::sub(Vec::bits(Vec::addf(Vec::real(magnitude), smallest)), normal);
        const Vec::U scaled = Vec::max(gradual, Vec::sub(magnitude, below));
        const Vec::U code = Vec::shr<kDropped>(Vec::add(scaled, random));
        if constexpr (kSigned) {
            Vec::store_u8(p, Vec::bor(code, Vec::band(Vec::shr<24>(u), Vec::setu(0x80u))));
        } else {
            Vec::store_u8(p, Vec::max(code, Vec::min(u, Vec::setu(1u))));
        }
    }
};

struct Int8States {
    static constexpr StateKind kKind = StateKind::kInt8;
    using Storage = std::uint8_t;
    using First = Minifloat<4, true>;
    using Second = Minifloat<5, false>;

    // Bits whose largest ones decide the unit. Those of every NaN are above those of infinity.
    static Vec::U magnitude(Vec::F x) { return Vec::band(Vec::bits(x), Vec::setu(0x7fffffffu)); }
    // Stores one block whose units are known.
    static void store(const Random& random, std::uint64_t place, const float* m, const float* v,
                      std::uint8_t* first, std::uint8_t* second, BlockUnits units) {
        const First to_m(units.first);
        const Second to_v(units.second);
        Vec::U places = Random::places(place);
        for (std::size_t k = 0; k < kStateBlock; k += Vec::kWidth) {
            // Of 32 bits, 20 for each; those that they share count for little in both.
            const Vec::U bits = random.bits(places);
            to_m.store(first + k, Vec::load(m + k), Vec::band(bits, Vec::setu(0xfffffu)));
            to_v.store(second + k, Vec::load(v + k), Vec::shr<12>(bits));
            places = Random::next(places);
        }
        // Code 0 of such a block is NaN.
        if (units.first == First::kNotFinite) {
            __builtin_memset(first, 0, kStateBlock);
        }
        if (units.second == Second::kNotFinite) {
            __builtin_memset(second, 0, kStateBlock);
        }
    }
};
