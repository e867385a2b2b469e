// How optimizer states are stored. Included after storage.h and random.h.
//
// A format without blocks is read and written two vectors at a time. `store` may use 32 random bits per
// element: the first state the lower ones, the second the upper ones.

struct Float32States {
    static constexpr StateKind kKind = StateKind::kFloat32;
    using Storage = float;
    static void load(const float* p, Vec::F (&x)[2]) { load_as<Dtype::kFloat32>(p, x); }
    template <int kState>
    static void store(float* p, const Vec::F (&x)[2], const Vec::U (&)[2]) {
        store_as<Dtype::kFloat32, Rounding::kHalfUp>(p, x);
    }
};

// bfloat16, rounded up in magnitude with the probability that makes the expected value exact. Rounding to
// nearest would lose every update smaller than half a unit: with beta2 = 0.999 the second moment could not
// fall.
struct Bfloat16States {
    static constexpr StateKind kKind = StateKind::kBfloat16;
    using Storage = std::uint16_t;
    static void load(const std::uint16_t* p, Vec::F (&x)[2]) { load_as<Dtype::kBfloat16>(p, x); }
    template <int kState>
    static Vec::U rounded(Vec::F x, Vec::U random) {
        const Vec::U r = kState == 0 ? Vec::band(random, Vec::setu(0xffffu)) : Vec::shr<16>(random);
        return Vec::add(Vec::bits(x), r);
    }
    template <int kState>
    static void store(std::uint16_t* p, const Vec::F (&x)[2], const Vec::U (&random)[2]) {
        Vec::store_upper(p, {rounded<kState>(x[0], random[0]), rounded<kState>(x[1], random[1])});
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
template <int kExponentBits, bool kSigned>
struct Minifloat {
    static constexpr int kMantissaBits = 3;
    static constexpr int kDropped = 23 - kMantissaBits;
    // Exponents above that of the smallest normal number.
    static constexpr std::uint32_t kSpan = (1u << kExponentBits) - 2;
    static constexpr std::uint8_t kNotFinite = 255;
    // An eighth of the smallest normal number is a normal number of float32, too.
    static constexpr std::uint8_t kLowest = 4;
    static constexpr std::uint32_t kNan = 0x7fc00000u;
    static_assert((kSigned ? 1 : 0) + kExponentBits + kMantissaBits == 8);

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
    // Bits of the smallest normal number.
    static std::uint32_t normal_bits(std::uint8_t unit) {  // memory of zeros means zeros
        return std::uint32_t{unit < kLowest ? kLowest : unit} << 23;
    }
};
using FirstMoment = Minifloat<4, true>;
using SecondMoment = Minifloat<5, false>;

// Reads first moments of a block. A code is a float16 on another scale, with gradual underflow; float16 are
// read whether subnormal or not, in any floating-point environment.
struct FirstReader {
    alignas(64) std::uint16_t half[kStateBlock];
    Vec::F scale;
    FirstReader(std::uint8_t unit, const std::uint8_t* codes)
        : scale(Vec::real(Vec::setu(unit == FirstMoment::kNotFinite
                                        ? FirstMoment::kNan
                                        : FirstMoment::normal_bits(unit) + (14u << 23)))) {
        for (std::size_t k = 0; k < kStateBlock; k += kPair) {
            Vec::e4m3_to_f16(codes + k, half + k);
        }
    }
    Vec::F load(std::size_t k) const { return Vec::mulf(Vec::load_f16(half + k), scale); }
};

// Reads second moments of a block. With c = the smallest normal number of the block and cb its bits, a code
// in the upper bits of a float32 is the smaller one of code + cb, less c as a number, and code + cb - 2^23:
// the first is the smaller one below c, where numbers are equidistant. No comparison.
struct SecondReader {
    Vec::U normal, below;
    explicit SecondReader(std::uint8_t unit) {
        const std::uint32_t bits = SecondMoment::normal_bits(unit);
        const bool finite = unit != SecondMoment::kNotFinite;
        normal = Vec::setu(finite ? bits : SecondMoment::kNan);
        below = Vec::setu(finite ? bits - (1u << 23) : SecondMoment::kNan);
    }
    Vec::F load(const std::uint8_t* p) const {
        const Vec::U code = Vec::shl<SecondMoment::kDropped>(Vec::load_u8(p));
        const Vec::F gradual = Vec::subf(Vec::real(Vec::add(code, normal)), Vec::real(normal));
        return Vec::real(Vec::min(Vec::bits(gradual), Vec::add(code, below)));
    }
};

// Rounds moments of a block. With c and cb as above, the code of x >= 0 before rounding is
//     max(bits(x + c), bits(x) + 2^23) - cb, shifted right by 20.
struct MomentWriter {
    Vec::F smallest;
    Vec::U negative_normal;  // the lower 23 bits are zero
    explicit MomentWriter(std::uint32_t normal_bits)
        : smallest(Vec::real(Vec::setu(normal_bits))), negative_normal(Vec::setu(0u - normal_bits)) {}
    // random: 20 bits per element, plus negative_normal. The unit is that of a block with x in it: no code is
    // too large.
    Vec::U code(Vec::F magnitude, Vec::U random) const {
        const Vec::U gradual = Vec::bits(Vec::addf(magnitude, smallest));
        const Vec::U scaled = Vec::max(gradual, Vec::add(Vec::bits(magnitude), Vec::setu(1u << 23)));
        return Vec::shr<20>(Vec::add(scaled, random));
    }
};

struct Int8States {
    static constexpr StateKind kKind = StateKind::kInt8;
    using Storage = std::uint8_t;

    // Bits whose largest ones decide the unit: those of every NaN are above those of infinity.
    static Vec::U magnitude(Vec::F x) { return Vec::band(Vec::bits(x), Vec::setu(0x7fffffffu)); }

    // What waits for the units of a block. All v are NaN or have no sign.
    struct Block {
        alignas(64) float m[kStateBlock];
        alignas(64) float magnitude[kStateBlock];  // of m
        alignas(64) float v[kStateBlock];
        alignas(64) float random[kStateBlock];  // bits
    };

    static void write(const Block& block, Vec::U largest_m, Vec::U largest_v, std::uint8_t* first,
                      std::uint8_t* second, BlockUnits* units) {
        const std::uint8_t first_unit = FirstMoment::unit_for(Vec::largest(largest_m));
        const std::uint8_t second_unit = SecondMoment::unit_for(Vec::largest(largest_v));
        *units = {first_unit, second_unit};
        const MomentWriter to_m(FirstMoment::normal_bits(first_unit));
        const MomentWriter to_v(SecondMoment::normal_bits(second_unit));
        for (std::size_t k = 0; k < kStateBlock; k += kQuad) {
            Vec::F m[4], v[4];
            Vec::U m_codes[4], v_codes[4];
            for (std::size_t j = 0; j < 4; ++j) {
                const std::size_t at = k + j * Vec::kWidth;
                m[j] = Vec::load(block.m + at);
                v[j] = Vec::load(block.v + at);
                // Of 32 bits, 20 for each; those that they share count for little in both.
                const Vec::U bits = Vec::bits(Vec::load(block.random + at));
                m_codes[j] = to_m.code(Vec::load(block.magnitude + at),
                                       Vec::band_or(bits, Vec::setu(0xfffffu), to_m.negative_normal));
                v_codes[j] = to_v.code(v[j], Vec::bor(Vec::shr<12>(bits), to_v.negative_normal));
            }
            Vec::store_signed(first + k, m_codes, m);
            Vec::store_positive(second + k, v_codes, v);
        }
        // Code 0 of such a block is NaN.
        if (first_unit == FirstMoment::kNotFinite) {
            __builtin_memset(first, 0, kStateBlock);
        }
        if (second_unit == SecondMoment::kNotFinite) {
            __builtin_memset(second, 0, kStateBlock);
        }
    }
};
