// From operations to device requests: chunking, order, priorities, partial transfers.
//
// Owns: which request is issued next and what a request's result means.  Both engines use it, so both behave
// alike. Must not know: how a request is carried out. Next: engine.h.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>

#include "operation.h"

namespace swap_aio {

/// One piece of an operation, at most block_bytes long: what the kernel is asked for at a time.
struct Request {
    OperationPtr operation;
    std::size_t issued_bytes = 0;  // its length when it was popped
    char* address = nullptr;
    std::size_t length = 0;
    std::int64_t offset = 0;
    unsigned retries = 0;
};

enum class Next : std::uint8_t { kRetire, kReissue };

struct TransferCounters {
    std::uint64_t short_transfers = 0;
    std::uint64_t retries = 0;
};

/// Take the result of one attempt (bytes, or -errno): move the request on, or record the operation's error.
///
/// A partial transfer continues with the rest; EINTR and EAGAIN are tried again, up to a limit; 0 bytes mean
/// that the file ends before the range does and are an error (ENODATA).
Next take_result(Request& request, std::int64_t result, TransferCounters& counters);

/// How many requests the device holds.  One thread at a time writes; any thread may read.
class QueueDepth {
  public:
    void add() {
        const std::uint64_t now = now_.load(std::memory_order_relaxed) + 1;
        now_.store(now, std::memory_order_relaxed);
        if (now > peak_.load(std::memory_order_relaxed)) peak_.store(now, std::memory_order_relaxed);
    }
    void remove() { now_.store(now_.load(std::memory_order_relaxed) - 1, std::memory_order_relaxed); }

    std::uint64_t now() const { return now_.load(std::memory_order_relaxed); }
    std::uint64_t peak() const { return peak_.load(std::memory_order_relaxed); }

  private:
    std::atomic<std::uint64_t> now_{0};
    std::atomic<std::uint64_t> peak_{0};
};

/// The operations that wait for the device, in the order in which their requests go out.
///
/// Urgent before normal, background last; within a priority reads and writes alternate (a mixed pattern is
/// faster than two bursts); within a kind the device that holds the fewest requests comes first, so that a
/// slow drive does not take all the places; and for one device first come, first served.  The requests of one
/// operation go out even chunks first, odd chunks after: neighbours that the block layer would merge cost
/// bandwidth.
///
/// A device serves what it holds in its own order, so an urgent request that meets a full queue waits for all
/// of it.  While urgent operations keep coming to a device (and for a moment after), pop() therefore leaves
/// only a few MiB of normal requests with it, cut smaller if need be; without urgent ones the queue is as
/// deep as the caller makes it.
///
/// Background requests are small, and few are with a device at a time: fewer while it has others, one now and
/// then while urgent ones come.  One that has waited for a while goes before normal ones, so that a device
/// that is never idle gets through with them, too.  Not thread-safe: the caller serialises.
class RequestQueue {
  public:
    using Finish = std::function<void(const OperationPtr&)>;

    RequestQueue(std::size_t block_bytes, QueueDepth& depth, Finish finish)
        : block_bytes_(block_bytes), depth_(depth), finish_(std::move(finish)) {}

    void push(OperationPtr operation);

    /// Next request to issue, or false when there is none.  The caller owes a retire() for each.
    bool pop(Request& request);

    /// A request is over (its operation may have failed).  Finishes the operation with its last request.
    void retire(const Request& request);

    /// Fail everything that was not issued yet.
    void cancel(int errno_value);

    bool empty() const;

    /// The last pop() refused although something waits: ask again after kCourtesyS, if nothing happens
    /// before.
    bool held_back() const { return held_back_; }

    static constexpr double kCourtesyS = 0.05;  // since the last urgent operation came

  private:
    using Line = std::deque<OperationPtr>;

    static constexpr std::size_t kCourtesyRequests = 2;      // normal ones with the device meanwhile,
    static constexpr std::size_t kCourtesyPiece = 1U << 20;  // of so many bytes at most
    static constexpr std::size_t kIdleLanes = 16;            // kept although nothing waits in them
    static constexpr unsigned kBackgroundRequests = 4;       // with a device that has no others,
    static constexpr unsigned kBackgroundBeside = 2;         // and with one that has
    static constexpr double kPatienceS = 0.025;  // after which a background request goes before normal ones

    /// What waits for one device.
    struct Lane {
        std::uint64_t device = 0;
        Line lines[3][2];              // [priority][kind]
        unsigned in_flight = 0;        // requests that were popped and not retired
        unsigned background = 0;       // of those
        std::size_t normal_bytes = 0;  // of normal ones among those
        double background_at_s = 0;    // when the last background request went out, or began to wait
        double courtesy_until_s = 0;   // 0: no urgent operation came lately
        std::uint64_t turn = 0;        // when its last request was popped

        bool idle() const;
    };

    struct Place {
        Lane* lane = nullptr;
        Line* line = nullptr;
    };

    Lane& lane_of(std::uint64_t device);
    Place next_place(bool all);
    Place place_in(Priority priority, bool all);
    bool overdue(const Lane& lane) const;
    bool courteous(Lane& lane) const;
    bool hold_back(Lane& lane, Priority priority) const;
    std::size_t piece_of(Lane& lane, const Operation& operation, std::size_t left) const;
    void leave(Line& line, const OperationPtr& operation);
    std::size_t courtesy_piece() const { return std::min(block_bytes_, kCourtesyPiece); }
    std::size_t chunks_of(const Operation& operation) const {
        return (operation.length + block_bytes_ - 1) / block_bytes_;
    }

    const std::size_t block_bytes_;
    QueueDepth& depth_;
    const Finish finish_;
    std::deque<Lane> lanes_;
    Kind last_kind_ = Kind::kWrite;
    std::uint64_t turns_ = 0;
    bool held_back_ = false;
};

}  // namespace swap_aio
