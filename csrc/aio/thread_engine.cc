// The thread engine: pread and pwrite in a pool of workers.  For builds without liburing and kernels that
// forbid it.
//
// Owns: the workers and the queue between them.
// Must not know: rings, Python.
#include <sys/types.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "engine.h"

namespace swap_aio {

namespace {

class ThreadEngine final : public Engine {
  public:
    explicit ThreadEngine(const Settings& settings)
        : Engine(settings),
          queue_(settings.block_bytes, depth_, [this](const OperationPtr& o) { finish(o); }) {
        for (unsigned i = 0; i < settings.threads; ++i) {
            try {
                workers_.emplace_back([this] { run(); });
            } catch (const std::system_error&) {
                if (workers_.empty()) throw;
                break;  // thread limit reached: fewer workers still work
            }
        }
        std::lock_guard<std::mutex> guard(mutex_);
        running_ = workers_.size();
        started_ = true;
        wake_.notify_all();
    }

    const char* name() const override { return "threads"; }
    void abandon_in_child() override {}

  protected:
    void enqueue(const std::vector<OperationPtr>& operations) override {
        const bool one = operations.size() == 1 && operations.front()->length <= settings_.block_bytes;
        bool stopped;
        {
            std::lock_guard<std::mutex> guard(mutex_);
            stopped = stop_;
            if (!stopped)
                for (const OperationPtr& operation : operations) queue_.push(operation);
        }
        if (stopped) {
            cancel(operations);
        } else if (one) {
            wake_.notify_one();
        } else {
            wake_.notify_all();
        }
    }

    void stop() override {
        {
            std::lock_guard<std::mutex> guard(mutex_);
            stop_ = true;
            queue_.cancel(ECANCELED);
        }
        wake_.notify_all();
        stopping_.notify_all();
    }

    bool join(double timeout_s) override {
        {
            std::unique_lock<std::mutex> guard(mutex_);
            if (!ended_.wait_for(guard, std::chrono::duration<double>(timeout_s),
                                 [this] { return running_ == 0; }))
                return false;
        }
        for (auto& worker : workers_) worker.join();
        workers_.clear();
        return true;
    }

  private:
    void run() {
        std::unique_lock<std::mutex> guard(mutex_);
        wake_.wait(guard, [this] { return started_; });
        while (!stop_) {
            Request request;
            if (!queue_.pop(request)) {
                if (queue_.held_back()) {
                    wake_.wait_for(guard, std::chrono::duration<double>(RequestQueue::kCourtesyS));
                } else {
                    wake_.wait(guard);
                }
                continue;
            }
            guard.unlock();
            transfer(request, guard);
            guard.lock();
            queue_.retire(request);
            if (!queue_.empty()) wake_.notify_one();  // one that was held back may go now
        }
        if (--running_ == 0) ended_.notify_all();
    }

    // Carry one request out, unlocked.  Only the operation's error is shared; it is recorded under the lock.
    void transfer(Request& request, std::unique_lock<std::mutex>& guard) {
        TransferCounters counters;
        Next next = Next::kReissue;
        while (next == Next::kReissue) {
            const std::int64_t result = attempt(request, guard);
            guard.lock();
            next = take_result(request, result, counters);
            guard.unlock();
        }
        count(counters);
    }

    std::int64_t attempt(const Request& request, std::unique_lock<std::mutex>& guard) {
        const Fault fault = faults.judge(request.operation->kind);
        switch (fault.action) {
            case FaultAction::kFail:
                return -fault.errno_value;
            case FaultAction::kHang: {
                guard.lock();
                stopping_.wait(guard, [this] { return stop_; });
                guard.unlock();
                return -ECANCELED;
            }
            case FaultAction::kDelay: {
                guard.lock();
                const bool stopped = stopping_.wait_for(guard, std::chrono::duration<double>(fault.delay_s),
                                                        [this] { return stop_; });
                guard.unlock();
                if (stopped) return -ECANCELED;
                return system_call(request);
            }
            case FaultAction::kShort:
                return std::min<std::int64_t>(system_call(request),
                                              static_cast<std::int64_t>(fault.short_bytes));
            case FaultAction::kLie: {
                if (request.operation->kind == Kind::kWrite) return static_cast<std::int64_t>(request.length);
                const std::int64_t result = system_call(request);
                if (result > 0) request.address[0] = static_cast<char>(~request.address[0]);
                return result;
            }
            case FaultAction::kNone:
                break;
        }
        return system_call(request);
    }

    static std::int64_t system_call(const Request& request) {
        const Operation& operation = *request.operation;
        const ssize_t result = operation.kind == Kind::kRead
                                   ? ::pread(operation.fd, request.address, request.length, request.offset)
                                   : ::pwrite(operation.fd, request.address, request.length, request.offset);
        return result < 0 ? -errno : result;
    }

    std::mutex mutex_;
    std::condition_variable wake_;
    std::condition_variable stopping_;
    std::condition_variable ended_;
    RequestQueue queue_;
    std::vector<std::thread> workers_;
    std::size_t running_ = 0;
    bool started_ = false;
    bool stop_ = false;
};

}  // namespace

std::unique_ptr<Engine> make_thread_engine(const Settings& settings) {
    return std::make_unique<ThreadEngine>(settings);
}

}  // namespace swap_aio
