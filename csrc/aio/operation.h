// One read or write of one contiguous range, from submission to result.
//
// Owns: the request as the caller made it, its progress, its result, and the way to wait for it.
// Must not know: rings, threads, Python.
// Next: requests.h cuts operations into requests; engine.h moves them.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace swap_aio {

enum class Kind : std::uint8_t { kRead, kWrite };

/// Who goes first; see RequestQueue.
enum class Priority : std::uint8_t { kBackground, kNormal, kUrgent };

/// Seconds of a monotonic clock.
double monotonic_s();

/// Checksums (CRC-32C) of an operation's bytes, one per granule; the last granule may be shorter.
struct Checksums {
    std::size_t granule_bytes = 0;
    std::vector<std::uint32_t> values;    // of a read what is expected, of a write the result
    std::uint32_t expected = 0;           // of the first granule that was wrong
    std::uint32_t actual = 0;             // likewise
    std::atomic<unsigned> parts_left{2};  // of a write: the I/O and the sum
};

/// What a caller asks for.
struct Job {
    Kind kind = Kind::kRead;
    int fd = -1;
    std::int64_t offset = 0;
    char* address = nullptr;
    std::size_t length = 0;
    Priority priority = Priority::kNormal;
    std::unique_ptr<Checksums> checksums;  // null: none
};

/// The device of a file as stat() names it; 0 for a descriptor that is not open: the transfer will say so.
std::uint64_t device_of(int fd);

struct Operation {
    Operation(Job job, std::uint64_t device);

    /// True once the result below is final.
    bool done() const { return state_.load(std::memory_order_acquire) == kDone; }

    /// Block until done or until `timeout_s` passed; returns done().  Never touches a lock, so that a forked
    /// child that inherited the object cannot hang in its destructor.
    bool wait(double timeout_s) const;

    /// Publish the result and wake the waiters (called once, by Engine::finish).
    void publish();

    /// Record the first error of any of the operation's requests (called by the engine, before publish).
    void fail(int errno_value, std::int64_t at_offset, std::size_t at_length);

    const Kind kind;
    const Priority priority;
    const int fd;
    const std::int64_t offset;
    char* const address;
    const std::size_t length;
    const std::uint64_t device;  // of the file, as stat() names it
    const double submitted_s;
    const std::unique_ptr<Checksums> checksums;  // null: none asked for.  Read after done().
    std::uint64_t id = 0;

    // Progress: written by the engine only (its I/O thread, or under its mutex).
    std::size_t chunks_issued = 0;
    std::size_t piece_begin = 0;  // bytes of the chunk after those that were issued on their own
    unsigned requests_in_flight = 0;
    bool queued = false;

    // Result: written before publish(), read after done().  error is 0 or a positive errno.
    double ended_s = 0;
    int error = 0;
    std::int64_t error_offset = 0;
    std::size_t error_length = 0;

  private:
    enum State : std::uint32_t { kFlying, kWaitedFor, kDone };

    // kWaitedFor: somebody sleeps (or is about to) and has to be woken, which costs a system call.
    mutable std::atomic<std::uint32_t> state_{kFlying};
};

using OperationPtr = std::shared_ptr<Operation>;

}  // namespace swap_aio
