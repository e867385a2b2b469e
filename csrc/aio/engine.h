// The engine: asynchronous reads and writes behind one interface.
//
// Owns: what every engine has in common: the list of operations in flight, the statistics, closing, faults.
// Must not know: Python (module.cc), rings (uring_engine.cc), worker threads (thread_engine.cc).
// Next: uring_engine.cc, thread_engine.cc; module.cc for what Python sees.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "checksums.h"
#include "faults.h"
#include "histogram.h"
#include "operation.h"
#include "requests.h"

namespace swap_aio {

struct Settings {
    unsigned queue_depth = 32;           // requests in flight at most (io_uring)
    std::size_t block_bytes = 2U << 20;  // largest request
    unsigned threads = 4;                // workers (thread engine)
};

struct KindCounters {
    std::uint64_t operations = 0;  // finished without error
    std::uint64_t bytes = 0;       // of those
    std::uint64_t errors = 0;      // finished with an error
    double busy_s = 0;             // time with at least one in flight
    double p50_s = 0;              // of the time from submission to result, of operations without error
    double p95_s = 0;
    double p99_s = 0;
    double max_s = 0;
};

struct Counters {
    KindCounters reads;
    KindCounters writes;
    std::uint64_t in_flight = 0;
    std::uint64_t peak_in_flight = 0;
    std::uint64_t queue_depth = 0;  // requests with the device
    std::uint64_t peak_queue_depth = 0;
    std::uint64_t short_transfers = 0;
    std::uint64_t retries = 0;
};

class Engine {
  public:
    explicit Engine(const Settings& settings)
        : settings_(settings), checksum_workers_([this](const OperationPtr& o) { summed(o); }) {}
    Engine(const Engine&) = delete;
    Engine& operator=(const Engine&) = delete;

    /// Only after close() said that the I/O threads ended.
    virtual ~Engine() = default;

    virtual const char* name() const = 0;

    /// Start operations, all or none; the I/O threads are woken once.  The memory must stay valid until they
    /// are done.  Returns an empty vector after close().
    ///
    /// With `checksums` a write is done when its bytes are summed as well, and a read fails (EBADMSG) when
    /// they are not as expected.  Throws std::system_error when no thread can be started for that.
    std::vector<OperationPtr> submit(std::vector<Job> jobs);

    /// Best effort: pin memory or a file once instead of at every request.  False when refused or not
    /// supported.
    virtual bool register_buffer(char* address, std::size_t length);
    virtual void unregister_buffer(char* address);
    virtual bool register_file(int fd);
    virtual void unregister_file(int fd);

    /// How close() went.
    struct Closing {
        bool drained = true;  // everything in flight finished by itself in time
        bool ended = true;  // the I/O threads ended; if not, the kernel still holds requests: leak the engine
    };

    /// Refuse new operations, wait up to `timeout_s` for those in flight, cancel the rest (ECANCELED) and
    /// stop.
    ///
    /// Not ended: the engine must be leaked, never destroyed, and the memory of operations in flight not
    /// reused.
    Closing close(double timeout_s);

    /// Release the descriptors that a forked child inherited.  Touches no lock and no ring.
    virtual void abandon_in_child() = 0;

    Counters counters() const;

    /// Engine state and the oldest operations in flight, for error messages.
    std::string dump() const;

    FaultInjector faults;

  protected:
    virtual void enqueue(const std::vector<OperationPtr>& operations) = 0;

    /// Tell the I/O threads to cancel what they can and to end; at most once.
    virtual void stop() = 0;

    /// Wait for the I/O threads; false when they did not end in time.
    virtual bool join(double timeout_s) = 0;

    /// The I/O of an operation is over: publish it, or pass it on to be summed.
    void finish(const OperationPtr& operation);

    /// Operations that came too late: end them with ECANCELED.
    void cancel(const std::vector<OperationPtr>& operations);

    void count(const TransferCounters& counters);

    const Settings settings_;
    QueueDepth depth_;  // kept by the engine's RequestQueue

  private:
    struct Busy {
        KindCounters counters;
        LatencyHistogram latencies;
        std::uint64_t in_flight = 0;
        double since_s = 0;
        double until_s = 0;  // before which all is counted
    };

    Busy& busy(Kind kind) { return kind == Kind::kRead ? reads_ : writes_; }
    void summed(const OperationPtr& operation);

    /// An operation has its final result: count and publish it.
    void publish(const OperationPtr& operation);
    static KindCounters snapshot(const Busy& busy, double now_s);

    ChecksumWorkers checksum_workers_;
    mutable std::mutex mutex_;
    std::condition_variable idle_;
    std::map<std::uint64_t, OperationPtr> live_;
    std::uint64_t next_id_ = 1;
    std::uint64_t peak_in_flight_ = 0;
    Busy reads_;
    Busy writes_;
    bool closing_ = false;
    bool drained_ = true;
    bool ended_ = false;
    bool stopped_ = false;
    std::atomic<std::uint64_t> short_transfers_{0};
    std::atomic<std::uint64_t> retries_{0};
};

/// Throws std::system_error with the reason when the kernel or the build refuses.
std::unique_ptr<Engine> make_uring_engine(const Settings& settings);
std::unique_ptr<Engine> make_thread_engine(const Settings& settings);

/// "" when io_uring works here, else why not.
std::string uring_refusal();

}  // namespace swap_aio
