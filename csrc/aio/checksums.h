// Checksums of transfers, computed beside the I/O: never on the thread that submits, nor on the I/O thread.
//
// Owns: the workers.  A write's bytes are summed while the device writes them (both only read the memory); a
// read's bytes are compared after the last of them arrived and before anybody is told.
// Must not know: engines, files.
// Next: engine.cc says what happens when a part of an operation is over.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include "operation.h"

namespace swap_aio {

class ChecksumWorkers {
  public:
    using Done = std::function<void(const OperationPtr&)>;

    explicit ChecksumWorkers(Done done) : done_(std::move(done)) {}
    ChecksumWorkers(const ChecksumWorkers&) = delete;
    ChecksumWorkers& operator=(const ChecksumWorkers&) = delete;

    /// Only after stop().
    ~ChecksumWorkers() = default;

    /// Start the workers unless they run or were stopped.  Throws std::system_error when not even one can be
    /// started.
    void start();

    /// Sum a write's bytes or compare a read's (its I/O is over), then call `done`.  After start().
    void push(OperationPtr operation);

    /// Finish what was pushed, then end the workers.  What is pushed afterwards is summed by its caller.
    void stop();

  private:
    static constexpr unsigned kWorkers = 2;  // one keeps up with a drive of 8 GB/s, two with any

    void run();

    const Done done_;
    std::mutex mutex_;
    std::condition_variable wake_;
    std::deque<OperationPtr> waiting_;
    std::vector<std::thread> workers_;
    bool stop_ = false;
};

}  // namespace swap_aio
