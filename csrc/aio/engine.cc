#include "engine.h"

#include <cerrno>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <utility>

namespace swap_aio {

std::vector<OperationPtr> Engine::submit(std::vector<Job> jobs) {
    const bool sums =
        std::any_of(jobs.begin(), jobs.end(), [](const Job& job) { return job.checksums != nullptr; });
    if (sums) checksum_workers_.start();
    std::vector<OperationPtr> operations;
    operations.reserve(jobs.size());
    int fd = -1;
    std::uint64_t device = 0;
    for (Job& job : jobs) {
        if (job.fd != fd) device = device_of(fd = job.fd);  // batches are usually of one file
        operations.push_back(std::make_shared<Operation>(std::move(job), device));
    }
    {
        std::lock_guard<std::mutex> guard(mutex_);
        if (closing_) return {};
        for (const OperationPtr& operation : operations) {
            operation->id = next_id_++;
            live_.emplace_hint(live_.end(), operation->id, operation);
            Busy& b = busy(operation->kind);
            // Others may have ended, or begun, since this one was made.
            const double from_s = std::max(operation->submitted_s, b.until_s);
            if (b.in_flight++ == 0 || from_s < b.since_s) b.since_s = from_s;
        }
        if (live_.size() > peak_in_flight_) peak_in_flight_ = live_.size();
    }
    for (const OperationPtr& operation : operations) {
        if (operation->checksums != nullptr && operation->kind == Kind::kWrite)
            checksum_workers_.push(operation);
        if (operation->length == 0) finish(operation);
    }
    std::vector<OperationPtr> waiting = operations;
    std::erase_if(waiting, [](const OperationPtr& operation) { return operation->length == 0; });
    if (!waiting.empty()) enqueue(waiting);
    return operations;
}

void Engine::finish(const OperationPtr& operation) {
    Checksums* const sums = operation->checksums.get();
    if (sums != nullptr && operation->kind == Kind::kWrite) {
        if (sums->parts_left.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
    } else if (sums != nullptr && operation->error == 0) {
        checksum_workers_.push(operation);
        return;
    }
    publish(operation);
}

void Engine::summed(const OperationPtr& operation) {
    if (operation->kind == Kind::kWrite &&
        operation->checksums->parts_left.fetch_sub(1, std::memory_order_acq_rel) != 1)
        return;
    publish(operation);
}

void Engine::publish(const OperationPtr& operation) {
    std::lock_guard<std::mutex> guard(mutex_);
    Busy& b = busy(operation->kind);
    const double now_s = monotonic_s();
    if (--b.in_flight == 0) {
        b.counters.busy_s += now_s - b.since_s;
        b.until_s = now_s;
    }
    if (operation->error == 0) {
        ++b.counters.operations;
        b.counters.bytes += operation->length;
        b.latencies.add(now_s - operation->submitted_s);
    } else {
        ++b.counters.errors;
    }
    live_.erase(operation->id);
    operation->ended_s = now_s;
    operation->publish();
    if (live_.empty()) idle_.notify_all();
}

void Engine::cancel(const std::vector<OperationPtr>& operations) {
    for (const OperationPtr& operation : operations) {
        operation->fail(ECANCELED, operation->offset, operation->length);
        finish(operation);
    }
}

void Engine::count(const TransferCounters& counters) {
    if (counters.short_transfers != 0)
        short_transfers_.fetch_add(counters.short_transfers, std::memory_order_relaxed);
    if (counters.retries != 0) retries_.fetch_add(counters.retries, std::memory_order_relaxed);
}

Engine::Closing Engine::close(double timeout_s) {
    bool stop_now = false;
    {
        std::unique_lock<std::mutex> guard(mutex_);
        if (ended_) return {drained_, true};
        closing_ = true;
        const std::chrono::duration<double> limit(timeout_s);
        drained_ = idle_.wait_for(guard, limit, [this] { return live_.empty(); }) && drained_;
        stop_now = !std::exchange(stopped_, true);
    }
    if (stop_now) stop();
    // Idle threads end at once; one that still waits for the kernel is given a moment, not for ever.
    const bool ended = join(1.0);
    if (ended) checksum_workers_.stop();  // nothing can be passed on to them any more
    std::lock_guard<std::mutex> guard(mutex_);
    ended_ = ended_ || ended;
    return {drained_, ended_};
}

bool Engine::register_buffer(char*, std::size_t) { return false; }
void Engine::unregister_buffer(char*) {}
bool Engine::register_file(int) { return false; }
void Engine::unregister_file(int) {}

KindCounters Engine::snapshot(const Busy& busy, double now_s) {
    KindCounters counters = busy.counters;
    if (busy.in_flight != 0) counters.busy_s += now_s - busy.since_s;
    counters.p50_s = busy.latencies.quantile_s(0.50);
    counters.p95_s = busy.latencies.quantile_s(0.95);
    counters.p99_s = busy.latencies.quantile_s(0.99);
    counters.max_s = busy.latencies.max_s();
    return counters;
}

Counters Engine::counters() const {
    std::lock_guard<std::mutex> guard(mutex_);
    Counters counters;
    const double now_s = monotonic_s();
    counters.reads = snapshot(reads_, now_s);
    counters.writes = snapshot(writes_, now_s);
    counters.in_flight = live_.size();
    counters.peak_in_flight = peak_in_flight_;
    counters.queue_depth = depth_.now();
    counters.peak_queue_depth = depth_.peak();
    counters.short_transfers = short_transfers_.load(std::memory_order_relaxed);
    counters.retries = retries_.load(std::memory_order_relaxed);
    return counters;
}

std::string Engine::dump() const {
    constexpr int kShown = 8;
    constexpr const char* kPriorities[] = {" background", "", " urgent"};
    std::lock_guard<std::mutex> guard(mutex_);
    const double now_s = monotonic_s();
    char line[200];
    std::snprintf(line, sizeof line, "engine %s%s: %zu operations in flight (%llu reads, %llu writes)",
                  name(), closing_ ? " (closing)" : "", live_.size(),
                  static_cast<unsigned long long>(reads_.in_flight),
                  static_cast<unsigned long long>(writes_.in_flight));
    std::string text = line;
    int shown = 0;
    for (const auto& [id, operation] : live_) {
        if (shown++ == kShown) {
            text += "\n  ...";
            break;
        }
        std::snprintf(line, sizeof line, "\n  #%llu %s%s fd %d offset %lld length %zu, %.3f s old",
                      static_cast<unsigned long long>(id), operation->kind == Kind::kRead ? "read" : "write",
                      kPriorities[static_cast<int>(operation->priority)], operation->fd,
                      static_cast<long long>(operation->offset), operation->length,
                      now_s - operation->submitted_s);
        text += line;
    }
    return text;
}

#ifndef OFFLOAD_HAVE_LIBURING
std::unique_ptr<Engine> make_uring_engine(const Settings&) { return nullptr; }
std::string uring_refusal() { return "built without liburing"; }
#endif

}  // namespace swap_aio
