#include "files.h"

#include <fcntl.h>
#include <linux/magic.h>
#include <linux/stat.h>
#include <sys/syscall.h>
#include <sys/vfs.h>

#include <cerrno>

namespace swap_aio {

namespace {

constexpr std::uint32_t kStatxDioAlign = 0x00002000U;  // STATX_DIOALIGN, Linux 6.1

// struct statx up to the fields we read, spelt out: headers older than Linux 6.1 lack the alignment fields.
struct StatxBuffer {
    std::uint32_t stx_mask;
    unsigned char before[0x98 - 4];
    std::uint32_t stx_dio_mem_align;
    std::uint32_t stx_dio_offset_align;
    unsigned char after[0x100 - 0xa0];
};
static_assert(sizeof(StatxBuffer) == 0x100);

}  // namespace

int file_facts(int fd, FileFacts& facts) {
    struct statfs file_system{};
    if (fstatfs(fd, &file_system) != 0) return errno;
    const auto type = static_cast<std::uint32_t>(file_system.f_type);
    facts.in_memory = type == TMPFS_MAGIC || type == RAMFS_MAGIC;

    StatxBuffer buffer{};
    if (syscall(SYS_statx, fd, "", AT_EMPTY_PATH, kStatxDioAlign, &buffer) == 0 &&
        (buffer.stx_mask & kStatxDioAlign) != 0) {
        facts.alignment_known = true;
        facts.memory_alignment = buffer.stx_dio_mem_align;
        facts.offset_alignment = buffer.stx_dio_offset_align;
    }
    return 0;
}

int preallocate(int fd, std::int64_t length, std::int64_t first) {
    while (fallocate(fd, 0, first, length - first) != 0) {
        if (errno != EINTR) return errno;
    }
    return 0;
}

}  // namespace swap_aio
