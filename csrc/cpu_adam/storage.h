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

// x holds no NaN but the canonical one: the carry of the rounding can then never leave the NaNs.
template <Rounding R>
inline Vec::U to_bf16(Vec::F x) {
    const Vec::U u = Vec::bits(x);
    if constexpr (R == Rounding::kHalfUp) {
        return Vec::shr<16>(Vec::add(u, Vec::setu(0x8000u)));
    } else {
        const Vec::U odd = Vec::band(Vec::shr<16>(u), Vec::setu(1u));
        return Vec::shr<16>(Vec::add(u, Vec::add(Vec::setu(0x7fffu), odd)));
    }
}

// kStream: past the caches where the format is a 16-bit one; p is then aligned to a whole vector.
template <Dtype D, Rounding R, bool kStream = false>
inline void store_as(Storage<D>* p, Vec::F x) {
    if constexpr (D == Dtype::kFloat32) {
        Vec::store(p, x);
    } else if constexpr (D == Dtype::kBfloat16) {
        if constexpr (kStream) {
            Vec::stream_u16(p, to_bf16<R>(x));
        } else {
            Vec::store_u16(p, to_bf16<R>(x));
        }
    } else {
        if constexpr (kStream) {
            Vec::stream_f16(p, x);
        } else {
            Vec::store_f16(p, x);
        }
    }
}

// The split master: float32 bits = (param bits << 16) + sign-extended remainder.
inline Vec::F load_split(const std::uint16_t* param, const std::int16_t* remainder) {
    return Vec::real(Vec::add(Vec::shl<16>(Vec::load_u16(param)), Vec::load_s16(remainder)));
}

inline void store_split(std::uint16_t* param, std::int16_t* remainder, Vec::F x) {
    Vec::store_u16(param, to_bf16<Rounding::kHalfUp>(x));
    Vec::store_u16(reinterpret_cast<std::uint16_t*>(remainder), Vec::bits(x));
}
