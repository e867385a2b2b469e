#include "crc32c.h"

#include <array>
#include <bit>
#include <cstring>

#include "../x86_features.h"

#if defined(__x86_64__)
#include <nmmintrin.h>
#define SWAP_AIO_HAVE_SSE42 1
#if defined(__clang__)  // GCC before 11 has no such feature
#define SWAP_AIO_SSE42 target("sse4.2,crc32")
#else
#define SWAP_AIO_SSE42 target("sse4.2")
#endif
#endif

namespace swap_aio {

namespace {

constexpr std::uint32_t kPolynomial = 0x82f63b78U;  // bit-reversed 0x1EDC6F41

// tables[k][b]: what byte b becomes when k more bytes follow it.
using SlicingTables = std::array<std::array<std::uint32_t, 256>, 8>;

constexpr SlicingTables make_slicing_tables() {
    SlicingTables tables{};
    for (std::uint32_t b = 0; b < 256; ++b) {
        std::uint32_t crc = b;
        for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1U) != 0 ? kPolynomial : 0U);
        tables[0][b] = crc;
    }
    for (std::size_t k = 1; k < 8; ++k)
        for (std::size_t b = 0; b < 256; ++b)
            tables[k][b] = (tables[k - 1][b] >> 8) ^ tables[0][tables[k - 1][b] & 0xffU];
    return tables;
}

constexpr SlicingTables kSlicing = make_slicing_tables();

std::uint32_t update_bytes(std::uint32_t crc, const unsigned char* at, std::size_t length) {
    for (; length != 0; --length) crc = (crc >> 8) ^ kSlicing[0][(crc ^ *at++) & 0xffU];
    return crc;
}

#ifdef SWAP_AIO_HAVE_SSE42

// The instruction takes three cycles but one can start in each: three independent lanes of these lengths.
constexpr std::size_t kLongLane = 8192;
constexpr std::size_t kShortLane = 256;

// Appending zeros to a message is linear in its checksum: one table per byte of the checksum.
// Source: M. Adler, crc32c.c (the three-lane scheme and its zero operators).
struct ZerosTable {
    std::array<std::array<std::uint32_t, 256>, 4> table{};

    explicit ZerosTable(std::size_t zeros) {
        std::array<std::uint32_t, 32> column{};  // the checksum of bit i followed by the zeros
        for (unsigned i = 0; i < 32; ++i) {
            std::uint32_t crc = std::uint32_t{1} << i;
            for (std::size_t n = 0; n < zeros; ++n) crc = (crc >> 8) ^ kSlicing[0][crc & 0xffU];
            column[i] = crc;
        }
        for (std::size_t byte = 0; byte < 4; ++byte)
            for (unsigned value = 0; value < 256; ++value)
                for (unsigned bit = 0; bit < 8; ++bit)
                    if ((value >> bit & 1U) != 0) table[byte][value] ^= column[8 * byte + bit];
    }

    std::uint32_t append(std::uint32_t crc) const {
        return table[0][crc & 0xffU] ^ table[1][crc >> 8 & 0xffU] ^ table[2][crc >> 16 & 0xffU] ^
               table[3][crc >> 24];
    }
};

std::uint64_t load64(const unsigned char* at) {
    std::uint64_t value;
    std::memcpy(&value, at, sizeof value);
    return value;
}

template <std::size_t kLane>
__attribute__((SWAP_AIO_SSE42)) void three_lanes(std::uint32_t& crc, const unsigned char*& at,
                                                 std::size_t& length, const ZerosTable& zeros) {
    while (length >= 3 * kLane) {
        std::uint64_t a = crc;
        std::uint64_t b = 0;
        std::uint64_t c = 0;
        for (const unsigned char* end = at + kLane; at != end; at += 8) {
            a = _mm_crc32_u64(a, load64(at));
            b = _mm_crc32_u64(b, load64(at + kLane));
            c = _mm_crc32_u64(c, load64(at + 2 * kLane));
        }
        crc = zeros.append(static_cast<std::uint32_t>(a)) ^ static_cast<std::uint32_t>(b);
        crc = zeros.append(crc) ^ static_cast<std::uint32_t>(c);
        at += 2 * kLane;
        length -= 3 * kLane;
    }
}

__attribute__((SWAP_AIO_SSE42)) std::uint32_t update_sse42(std::uint32_t crc, const unsigned char* at,
                                                           std::size_t length) {
    static const ZerosTable kLongZeros(kLongLane);
    static const ZerosTable kShortZeros(kShortLane);
    for (; length != 0 && (reinterpret_cast<std::uintptr_t>(at) & 7U) != 0; --length)
        crc = _mm_crc32_u8(crc, *at++);
    three_lanes<kLongLane>(crc, at, length, kLongZeros);
    three_lanes<kShortLane>(crc, at, length, kShortZeros);
    std::uint64_t wide = crc;
    for (; length >= 8; length -= 8, at += 8) wide = _mm_crc32_u64(wide, load64(at));
    crc = static_cast<std::uint32_t>(wide);
    for (; length != 0; --length) crc = _mm_crc32_u8(crc, *at++);
    return crc;
}

#endif

std::uint32_t update_portable(std::uint32_t crc, const unsigned char* at, std::size_t length) {
    if constexpr (std::endian::native == std::endian::little) {
        for (; length >= 8; length -= 8, at += 8) {
            std::uint32_t low;
            std::uint32_t high;
            std::memcpy(&low, at, 4);
            std::memcpy(&high, at + 4, 4);
            low ^= crc;
            crc = kSlicing[7][low & 0xffU] ^ kSlicing[6][low >> 8 & 0xffU] ^ kSlicing[5][low >> 16 & 0xffU] ^
                  kSlicing[4][low >> 24] ^ kSlicing[3][high & 0xffU] ^ kSlicing[2][high >> 8 & 0xffU] ^
                  kSlicing[1][high >> 16 & 0xffU] ^ kSlicing[0][high >> 24];
        }
    }
    return update_bytes(crc, at, length);
}

}  // namespace

std::uint32_t crc32c_portable(const void* data, std::size_t length, std::uint32_t crc) {
    return ~update_portable(~crc, static_cast<const unsigned char*>(data), length);
}

std::uint32_t crc32c(const void* data, std::size_t length, std::uint32_t crc) {
#ifdef SWAP_AIO_HAVE_SSE42
    if (offload::x86_features().sse42)
        return ~update_sse42(~crc, static_cast<const unsigned char*>(data), length);
#endif
    return crc32c_portable(data, length, crc);
}

const char* crc32c_kernel() {
#ifdef SWAP_AIO_HAVE_SSE42
    if (offload::x86_features().sse42) return "sse4.2";
#endif
    return "portable";
}

}  // namespace swap_aio
