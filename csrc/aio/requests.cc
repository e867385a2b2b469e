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

bool RequestQueue::Lane::idle() const {
    if (in_flight != 0) return false;
    for (const auto& priority : lines)
        for (const Line& line : priority)
            if (!line.empty()) return false;
    return true;
}

RequestQueue::Lane& RequestQueue::lane_of(std::uint64_t device) {
    for (Lane& lane : lanes_)
        if (lane.device == device) return lane;
    if (lanes_.size() >= kIdleLanes) std::erase_if(lanes_, [](const Lane& lane) { return lane.idle(); });
    lanes_.emplace_back().device = device;
    return lanes_.back();
}

void RequestQueue::push(OperationPtr operation) {
    operation->queued = true;
    Lane& lane = lane_of(operation->device);
    auto& lines = lane.lines[static_cast<int>(operation->priority)];
    if (operation->priority == Priority::kUrgent) lane.courtesy_until_s = monotonic_s() + kCourtesyS;
    if (operation->priority == Priority::kBackground && lines[0].empty() && lines[1].empty())
        lane.background_at_s = monotonic_s();
    lines[static_cast<int>(operation->kind)].push_back(std::move(operation));
}

// Where the next request comes from; with `all`, what is held back is not passed over.
RequestQueue::Place RequestQueue::next_place(bool all) {
    Place place = place_in(Priority::kUrgent, all);
    const bool late =
        std::any_of(lanes_.begin(), lanes_.end(), [this](const Lane& lane) { return overdue(lane); });
    if (place.lane == nullptr && late) place = place_in(Priority::kBackground, all);
    if (place.lane == nullptr) place = place_in(Priority::kNormal, all);
    if (place.lane == nullptr && !late) place = place_in(Priority::kBackground, all);
    return place;
}

RequestQueue::Place RequestQueue::place_in(Priority priority, bool all) {
    const int other = last_kind_ == Kind::kRead ? 1 : 0;
    for (const int kind : {other, 1 - other}) {
        Lane* best = nullptr;
        for (Lane& lane : lanes_) {
            if (lane.lines[static_cast<int>(priority)][kind].empty()) continue;
            if (!all && hold_back(lane, priority)) {
                held_back_ = true;
                continue;
            }
            if (best == nullptr || lane.in_flight < best->in_flight ||
                (lane.in_flight == best->in_flight && lane.turn < best->turn))
                best = &lane;
        }
        if (best != nullptr) return {best, &best->lines[static_cast<int>(priority)][kind]};
    }
    return {};
}

// Whether background requests have waited for long.
bool RequestQueue::overdue(const Lane& lane) const {
    const auto& lines = lane.lines[static_cast<int>(Priority::kBackground)];
    return (!lines[0].empty() || !lines[1].empty()) && monotonic_s() >= lane.background_at_s + kPatienceS;
}

void RequestQueue::leave(Line& line, const OperationPtr& operation) {
    operation->queued = false;
    line.pop_front();
}

// Whether an urgent operation came to the device lately.
bool RequestQueue::courteous(Lane& lane) const {
    if (lane.courtesy_until_s == 0) return false;
    if (monotonic_s() < lane.courtesy_until_s) return true;
    lane.courtesy_until_s = 0;
    return false;
}

bool RequestQueue::hold_back(Lane& lane, Priority priority) const {
    if (priority == Priority::kUrgent) return false;
    if (priority == Priority::kNormal)
        return lane.normal_bytes >= kCourtesyRequests * courtesy_piece() && courteous(lane);
    if (courteous(lane)) return lane.background != 0 || !overdue(lane);
    return lane.background >= (lane.in_flight == lane.background ? kBackgroundRequests : kBackgroundBeside);
}

// How much of `left` bytes of a chunk is asked for at once.
std::size_t RequestQueue::piece_of(Lane& lane, const Operation& operation, std::size_t left) const {
    const bool small = operation.priority == Priority::kBackground ||
                       (operation.priority == Priority::kNormal && courteous(lane));
    return small ? std::min(left, courtesy_piece()) : left;
}

bool RequestQueue::pop(Request& request) {
    held_back_ = false;
    for (;;) {
        const auto [lane, line] = next_place(false);
        if (lane == nullptr) return false;
        const OperationPtr operation = line->front();
        if (operation->error != 0) {  // a request of it failed: do not issue the rest
            leave(*line, operation);
            if (operation->requests_in_flight == 0) finish_(operation);
            continue;
        }
        const std::size_t chunks = chunks_of(*operation);
        const std::size_t chunk = chunk_at(operation->chunks_issued, chunks) * block_bytes_;
        const std::size_t start = chunk + operation->piece_begin;
        const std::size_t left = std::min(chunk + block_bytes_, operation->length) - start;
        request.operation = operation;
        request.address = operation->address + start;
        request.offset = operation->offset + static_cast<std::int64_t>(start);
        request.length = piece_of(*lane, *operation, left);
        request.issued_bytes = request.length;
        request.retries = 0;
        if (operation->priority == Priority::kNormal) lane->normal_bytes += request.length;
        if (operation->priority == Priority::kBackground) {
            ++lane->background;
            lane->background_at_s = monotonic_s();
        }
        ++lane->in_flight;
        lane->turn = ++turns_;
        last_kind_ = operation->kind;
        depth_.add();
        ++operation->requests_in_flight;
        operation->piece_begin = request.length == left ? 0 : operation->piece_begin + request.length;
        if (request.length == left && ++operation->chunks_issued == chunks) leave(*line, operation);
        return true;
    }
}

void RequestQueue::retire(const Request& request) {
    Operation& operation = *request.operation;
    Lane& lane = lane_of(operation.device);  // it is there: it was not idle
    --lane.in_flight;
    if (operation.priority == Priority::kNormal) lane.normal_bytes -= request.issued_bytes;
    if (operation.priority == Priority::kBackground) --lane.background;
    depth_.remove();
    if (--operation.requests_in_flight == 0 && !operation.queued) finish_(request.operation);
}

void RequestQueue::cancel(int errno_value) {
    for (;;) {
        const auto [lane, line] = next_place(true);
        if (lane == nullptr) return;
        const OperationPtr operation = line->front();
        operation->fail(errno_value, operation->offset, operation->length);
        leave(*line, operation);
        if (operation->requests_in_flight == 0) finish_(operation);
    }
}

bool RequestQueue::empty() const {
    for (const Lane& lane : lanes_)
        for (const auto& priority : lane.lines)
            for (const auto& line : priority)
                if (!line.empty()) return false;
    return true;
}

}  // namespace swap_aio
