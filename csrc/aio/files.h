// What the operating system says about a file: direct I/O alignment, file system type; preallocation.
//
// Owns: the system calls that Python's os module lacks.
// Must not know: engines, Python.
#pragma once

#include <unistd.h>

#include <cstdint>
#include <utility>

namespace swap_aio {

/// Owns one file descriptor.
class FileDescriptor {
  public:
    FileDescriptor() = default;
    explicit FileDescriptor(int fd) : fd_(fd) {}
    FileDescriptor(FileDescriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
    FileDescriptor& operator=(FileDescriptor&& other) noexcept {
        if (this != &other) reset(std::exchange(other.fd_, -1));
        return *this;
    }
    FileDescriptor(const FileDescriptor&) = delete;
    FileDescriptor& operator=(const FileDescriptor&) = delete;
    ~FileDescriptor() { reset(-1); }

    int get() const { return fd_; }
    void reset(int fd) {
        if (fd_ >= 0) ::close(fd_);
        fd_ = fd;
    }

  private:
    int fd_ = -1;
};

struct FileFacts {
    std::uint32_t memory_alignment = 0;  // bytes; 0 when the kernel does not say
    std::uint32_t offset_alignment =
        0;                   // bytes; 0 when the kernel does not say or direct I/O is not possible
    bool in_memory = false;  // tmpfs or ramfs: the "disk" is RAM
    bool alignment_known = false;
};

/// Facts about an open file; returns 0 or a positive errno.
int file_facts(int fd, FileFacts& facts);

/// Reserve the bytes from offset `first` to `length` (fallocate, interrupted calls repeated); returns 0 or a
/// positive errno.
int preallocate(int fd, std::int64_t length, std::int64_t first);

}  // namespace swap_aio
