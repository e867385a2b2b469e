#include "checksums.h"

#include <algorithm>
#include <cerrno>
#include <system_error>
#include <utility>

#include "crc32c.h"

namespace swap_aio {

namespace {

void sum(Operation& operation) {
    Checksums& sums = *operation.checksums;
    for (std::size_t i = 0; i < sums.values.size(); ++i) {
        const std::size_t start = i * sums.granule_bytes;
        const std::size_t length = std::min(sums.granule_bytes, operation.length - start);
        const std::uint32_t value = crc32c(operation.address + start, length);
        if (operation.kind == Kind::kWrite) {
            sums.values[i] = value;
        } else if (value != sums.values[i]) {
            sums.expected = sums.values[i];
            sums.actual = value;
            operation.fail(EBADMSG, operation.offset + static_cast<std::int64_t>(start), length);
            return;
        }
    }
}

}  // namespace

void ChecksumWorkers::start() {
    std::lock_guard<std::mutex> guard(mutex_);
    if (stop_ || !workers_.empty()) return;
    for (unsigned i = 0; i < kWorkers; ++i) {
        try {
            workers_.emplace_back([this] { run(); });
        } catch (const std::system_error&) {
            if (workers_.empty()) throw;
            break;  // thread limit reached: one still works
        }
    }
}

void ChecksumWorkers::push(OperationPtr operation) {
    {
        std::lock_guard<std::mutex> guard(mutex_);
        if (!stop_) waiting_.push_back(std::move(operation));
    }
    if (operation == nullptr) {
        wake_.notify_one();
    } else {  // submitted while the engine was being closed
        sum(*operation);
        done_(operation);
    }
}

void ChecksumWorkers::stop() {
    std::vector<std::thread> workers;
    {
        std::lock_guard<std::mutex> guard(mutex_);
        stop_ = true;
        workers.swap(workers_);
    }
    wake_.notify_all();
    for (auto& worker : workers) worker.join();
}

void ChecksumWorkers::run() {
    std::unique_lock<std::mutex> guard(mutex_);
    for (;;) {
        wake_.wait(guard, [this] { return stop_ || !waiting_.empty(); });
        if (waiting_.empty()) return;
        const OperationPtr operation = std::move(waiting_.front());
        waiting_.pop_front();
        guard.unlock();
        sum(*operation);
        done_(operation);
        guard.lock();
    }
}

}  // namespace swap_aio
