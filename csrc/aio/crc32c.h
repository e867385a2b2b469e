// CRC-32C (Castagnoli), the checksum of iSCSI, ext4 and btrfs.
//
// Owns: the kernels and the choice between them at run time.  All give the same value.
// Must not know: what is checked; checksums.h does that beside the transfers.
#pragma once

#include <cstddef>
#include <cstdint>

namespace swap_aio {

/// Checksum of `length` bytes appended to data whose checksum is `crc` (0 for none).
std::uint32_t crc32c(const void* data, std::size_t length, std::uint32_t crc = 0);

/// The same with tables alone, for processors without the instruction.
std::uint32_t crc32c_portable(const void* data, std::size_t length, std::uint32_t crc = 0);

/// What crc32c() runs here: "sse4.2" or "portable".
const char* crc32c_kernel();

}  // namespace swap_aio
