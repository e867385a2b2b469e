// Loads, stores and roundings of the storage formats. Included after groups.h.
//
// A NaN result is always 0x7fc00000 (0x7fc0, 0x7e00 in 16 bits): which operand's payload an instruction keeps
// differs between machines.

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

// In the upper half. x holds no NaN but the canonical one: the carry of the rounding can then never leave the
// NaNs.
template <Rounding R>
inline Vec::U to_bf16(Vec::F x) {
    const Vec::U u = Vec::bits(x);
    if constexpr (R == Rounding::kHalfUp) {
        return Vec::add(u, Vec::setu(0x8000u));
    } else {
        const Vec::U odd = Vec::band(Vec::shr<16>(u), Vec::setu(1u));
        return Vec::add(u, Vec::add(Vec::setu(0x7fffu), odd));
    }
}

// Steps work on two vectors at a time: so many numbers of 16 bits fill a register.
constexpr std::size_t kPair = 2 * Vec::kWidth;
constexpr std::size_t kQuad = 4 * Vec::kWidth;

template <Dtype D>
inline void load_as(const Storage<D>* p, Vec::F (&x)[2]) {
    if constexpr (D == Dtype::kBfloat16) {
        Vec::U upper[2];
        Vec::load_upper(p, upper);
        x[0] = Vec::real(upper[0]);
        x[1] = Vec::real(upper[1]);
    } else {
        x[0] = load_as<D>(p);
        x[1] = load_as<D>(p + Vec::kWidth);
    }
}

// kStream: past the caches where the format is a 16-bit one; p is then aligned to a pair of vectors.
template <Dtype D, Rounding R, bool kStream = false>
inline void store_as(Storage<D>* p, const Vec::F (&x)[2]) {
    if constexpr (D == Dtype::kFloat32) {
        Vec::store(p, x[0]);
        Vec::store(p + Vec::kWidth, x[1]);
    } else if constexpr (D == Dtype::kBfloat16) {
        if constexpr (kStream) {
            Vec::stream_upper(p, {to_bf16<R>(x[0]), to_bf16<R>(x[1])});
        } else {
            Vec::store_upper(p, {to_bf16<R>(x[0]), to_bf16<R>(x[1])});
        }
    } else {
        if constexpr (kStream) {
            Vec::stream_f16(p, x[0]);
            Vec::stream_f16(p + Vec::kWidth, x[1]);
        } else {
            Vec::store_f16(p, x[0]);
            Vec::store_f16(p + Vec::kWidth, x[1]);
        }
    }
}

// The split master: float32 bits = (param bits << 16) + sign-extended remainder.
inline void load_split(const std::uint16_t* param, const std::int16_t* remainder, Vec::F (&x)[2]) {
    Vec::U upper[2];
    Vec::load_upper(param, upper);
    x[0] = Vec::real(Vec::add(upper[0], Vec::load_s16(remainder)));
    x[1] = Vec::real(Vec::add(upper[1], Vec::load_s16(remainder + Vec::kWidth)));
}

inline void store_split(std::uint16_t* param, std::int16_t* remainder, const Vec::F (&x)[2]) {
    store_as<Dtype::kBfloat16, Rounding::kHalfUp>(param, x);
    Vec::store_lower(reinterpret_cast<std::uint16_t*>(remainder), {Vec::bits(x[0]), Vec::bits(x[1])});
}
