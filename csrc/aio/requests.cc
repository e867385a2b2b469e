#include "requests.h"

#include <cerrno>

#include <algorithm>
#include <utility>

namespace swap_aio {

namespace {

// A device that answers EAGAIN this often in a row is an error to report, not a loop to stay in.
constexpr unsigned kMaxRetries = 1000;

// k-th chunk to go out of n: 0 2 4 ... 1 3 5 ...
std::size_t chunk_at(std::size_t k, std::size_t n) {
    const std::size_t evens = (n + 1) / 2;
    return k < evens ? 2 * k : 2 * (k - evens) + 1;
}

}  // namespace

Next take_result(Request& request, std::int64_t result, TransferCounters& counters) {
    Operation& operation = *request.operation;
    if (result == -EINTR || result == -EAGAIN) {
        if (++request.retries <= kMaxRetries) {
            ++counters.retries;
            return Next::kReissue;
        }
    }
    if (result < 0) {
        operation.fail(static_cast<int>(-result), request.offset, request.length);
        return Next::kRetire;
    }
    if (result == 0) {
        operation.fail(ENODATA, request.offset, request.length);
        return Next::kRetire;
    }
    const auto moved = std::min(static_cast<std::size_t>(result), request.length);
    request.address += moved;
    request.offset += static_cast<std::int64_t>(moved);
    request.length -= moved;
    request.retries = 0;
    if (request.length == 0) return Next::kRetire;
    ++counters.short_transfers;
    return Next::kReissue;
}

void RequestQueue::push(OperationPtr operation) {
    operation->queued = true;
    if (operation->urgent) courtesy_until_s_ = monotonic_s() + kCourtesyS;
    Line& line = lines_[operation->urgent ? 1 : 0][static_cast<int>(operation->kind)];
    line.push_back(std::move(operation));
}

RequestQueue::Line* RequestQueue::next_line() {
    const int other = last_kind_ == Kind::kRead ? 1 : 0;
    for (int urgent = 1; urgent >= 0; --urgent) {
        if (!lines_[urgent][other].empty()) return &lines_[urgent][other];
        if (!lines_[urgent][1 - other].empty()) return &lines_[urgent][1 - other];
    }
    return nullptr;
}

void RequestQueue::leave(Line& line, const OperationPtr& operation) {
    operation->queued = false;
    line.pop_front();
}

bool RequestQueue::hold_back(const Operation& operation) {
    if (operation.urgent || courtesy_until_s_ == 0 || normal_bytes_ < kCourtesyBlocks * block_bytes_)
        return false;
    if (monotonic_s() < courtesy_until_s_) return true;
    courtesy_until_s_ = 0;
    return false;
}

bool RequestQueue::pop(Request& request) {
    held_back_ = false;
    while (Line* line = next_line()) {
        const OperationPtr operation = line->front();
        if (operation->error != 0) {  // a request of it failed: do not issue the rest
            leave(*line, operation);
            if (operation->requests_in_flight == 0) finish_(operation);
            continue;
        }
        if (hold_back(*operation)) {
            held_back_ = true;
            return false;
        }
        const std::size_t chunks = chunks_of(*operation);
        const std::size_t start = chunk_at(operation->chunks_issued, chunks) * block_bytes_;
        request.operation = operation;
        request.address = operation->address + start;
        request.offset = operation->offset + static_cast<std::int64_t>(start);
        request.length = std::min(block_bytes_, operation->length - start);
        request.issued_bytes = request.length;
        request.retries = 0;
        if (!operation->urgent) normal_bytes_ += request.length;
        last_kind_ = operation->kind;
        depth_.add();
        ++operation->requests_in_flight;
        if (++operation->chunks_issued == chunks) leave(*line, operation);
        return true;
    }
    return false;
}

void RequestQueue::retire(const Request& request) {
    Operation& operation = *request.operation;
    if (!operation.urgent) normal_bytes_ -= request.issued_bytes;
    depth_.remove();
    if (--operation.requests_in_flight == 0 && !operation.queued) finish_(request.operation);
}

void RequestQueue::cancel(int errno_value) {
    while (Line* line = next_line()) {
        const OperationPtr operation = line->front();
        operation->fail(errno_value, operation->offset, operation->length);
        leave(*line, operation);
        if (operation->requests_in_flight == 0) finish_(operation);
    }
}

bool RequestQueue::empty() const {
    for (const auto& priority : lines_)
        for (const auto& line : priority)
            if (!line.empty()) return false;
    return true;
}

}  // namespace swap_aio
