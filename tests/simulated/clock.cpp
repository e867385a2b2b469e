#include "clock.h"

#include <Python.h>

#include <algorithm>
#include <stdexcept>
#include <utility>

namespace simulated {
namespace {

thread_local int acting = 0;       // autograd's threads act for the host, which waits for them
constexpr size_t SEGMENTS = 4096;  // that are remembered of an actor

// Gives Python's lock away for a while, where the caller has it.
class Unlocked {
  public:
    Unlocked() : state_(Py_IsInitialized() && PyGILState_Check() ? PyEval_SaveThread() : nullptr) {}
    ~Unlocked() {
        if (state_) PyEval_RestoreThread(state_);
    }

  private:
    PyThreadState* state_;
};

}  // namespace

Clock& the_clock() {
    static auto* one = new Clock;
    return *one;
}

const char* lane_name(Lane lane) {
    static const char* names[] = {"", "compute", "h2d", "d2h"};
    return names[int(lane)];
}

double Timeline::place(double ready, double seconds, double past) {
    while (!busy_.empty() && busy_.begin()->second <= past - KEPT_S) busy_.erase(busy_.begin());
    double begin = ready;
    for (auto next = since(ready); next != busy_.end() && begin + seconds > next->first; ++next)
        begin = std::max(begin, next->second);
    if (seconds > 0) {
        auto after = busy_.lower_bound(begin);
        double end = begin + seconds;
        if (after != busy_.end() && after->first == end) {
            end = after->second;
            busy_.erase(after);
        }
        after = busy_.lower_bound(begin);
        if (after != busy_.begin() && std::prev(after)->second == begin)
            std::prev(after)->second = end;
        else
            busy_[begin] = end;
    }
    return begin;
}

std::map<double, double>::const_iterator Timeline::since(double at) const {
    auto next = busy_.upper_bound(at);
    return next == busy_.begin() ? next : std::prev(next);
}

std::vector<std::pair<double, double>> Timeline::within(double from, double to) const {
    std::vector<std::pair<double, double>> found;
    for (auto next = since(from); next != busy_.end() && next->first < to; ++next) {
        double begin = std::max(next->first, from), end = std::min(next->second, to);
        if (begin < end) found.emplace_back(begin, end);
    }
    return found;
}

std::array<double, 3> busy_alone_and_both(const Timeline& one, const Timeline& other, double from,
                                          double to) {
    double alone = 0, others = 0, both = 0;
    for (const auto& [begin, end] : other.within(from, to)) others += end - begin;
    for (const auto& [begin, end] : one.within(from, to)) {
        alone += end - begin;
        for (const auto& [left, right] : other.within(begin, end)) both += right - left;
    }
    return {alone - both, others - both, both};
}

void Clock::start(const Costs& costs, bool dry) {
    std::lock_guard lock(mutex_);
    costs_ = costs;
    dry_ = dry;
    on_ = true;
    static auto* former = new std::vector<std::unique_ptr<Actor>>;  // a thread may still wait in one
    for (auto& [number, actor] : actors_) former->push_back(std::move(actor));
    actors_.clear();
    actors_[0] = std::make_unique<Actor>();
    actors_[0]->name = "host";
    actors_[0]->wakes = 0;
    running_ = 0;
    records_.clear();
    waits_.clear();
    for (Timeline& lane : lanes) lane = Timeline();
}

void Clock::stop() {
    std::lock_guard lock(mutex_);
    on_ = dry_ = keep_ = false;
}

Clock::Actor& Clock::self() { return *actors_.at(simulated::acting); }

int Clock::earliest() const {
    int found = simulated::acting;
    for (auto& [number, actor] : actors_)
        if (actor->wakes < actors_.at(found)->wakes) found = number;
    return found;
}

void Clock::hand_on(std::unique_lock<std::mutex>& lock) {
    int me = simulated::acting, next = earliest();
    if (next == me && actors_[me]->wakes < NEVER) return;
    if (actors_[next]->wakes == NEVER) {
        std::string text = "clock: everybody waits:";
        for (auto& [number, actor] : actors_)
            if (!actor->ended && !actor->segments.empty())
                text += " " + actor->name + " for " + actor->segments.back().what + ";";
        throw std::runtime_error(text);
    }
    running_ = next;
    actors_[next]->turn.notify_all();
    if (actors_[me]->ended) return;
    actors_[me]->turn.wait(lock, [&] { return running_ == me; });
}

void Clock::remember(Actor& actor, double begin, const std::string& what) {
    if (actor.now <= begin) return;
    waits_[actor.name + ": " + what] += actor.now - begin;
    if (actor.segments.size() >= SEGMENTS)
        actor.segments.erase(actor.segments.begin(), actor.segments.begin() + SEGMENTS / 2);
    actor.segments.push_back({begin, actor.now, what});
}

void Clock::spend(double seconds, const char* what) {
    if (!on_) return;
    Unlocked unlocked;
    std::unique_lock lock(mutex_);
    Actor& actor = self();
    double begin = actor.now;
    actor.now = actor.wakes = begin + seconds;
    if (what) remember(actor, begin, what);
    hand_on(lock);
}

void Clock::wait_until(double time, const std::string& what) {
    if (!on_) return;
    Unlocked unlocked;
    std::unique_lock lock(mutex_);
    Actor& actor = self();
    double begin = actor.now;
    actor.now = actor.wakes = std::max(begin, time);
    remember(actor, begin, what);
    hand_on(lock);
}

double Clock::sleep(double until, const std::string& what) {
    if (!on_) throw std::runtime_error("clock: who waits for " + what + " waits behind its end");
    Unlocked unlocked;
    std::unique_lock lock(mutex_);
    Actor& actor = self();
    double begin = actor.now;
    actor.wakes = std::max(begin, until);
    actor.segments.push_back({begin, begin, what});  // told where everybody waits
    hand_on(lock);
    actor.segments.pop_back();
    actor.now = actor.wakes;
    remember(actor, begin, what);
    return actor.now;
}

void Clock::wake(int number) {
    std::lock_guard lock(mutex_);
    Actor& actor = *actors_.at(number);
    actor.wakes = std::max(actor.now, std::min(actor.wakes, self().now));
}

int Clock::add_actor(const std::string& name) {
    std::lock_guard lock(mutex_);
    auto& added = actors_[++last_number_] = std::make_unique<Actor>();
    added->name = name;
    added->now = self().now;
    return last_number_;
}

bool Clock::enter(int number) {
    Unlocked unlocked;
    std::unique_lock lock(mutex_);
    auto found = actors_.find(number);
    if (found == actors_.end()) return false;
    simulated::acting = number;
    found->second->turn.wait(lock, [&] { return running_ == number; });
    self().now = self().wakes;
    return true;
}

void Clock::leave() {
    std::unique_lock lock(mutex_);
    self().ended = true;
    self().wakes = NEVER;
    hand_on(lock);
    simulated::acting = 0;
}

double Clock::now() {
    std::lock_guard lock(mutex_);
    return on_ ? self().now : 0;
}

int Clock::acting() const { return simulated::acting; }

void Clock::explain(double begin, double end, Seconds& found) {
    std::lock_guard lock(mutex_);
    const Actor& actor = self();
    double left = end - begin;
    for (auto segment = actor.segments.rbegin(); segment != actor.segments.rend(); ++segment) {
        if (segment->end <= begin) break;
        double shared = std::min(segment->end, end) - std::max(segment->begin, begin);
        if (shared <= 0) continue;
        found[actor.name + ": " + segment->what] += shared;
        left -= shared;
    }
    if (left > 0) found[actor.name + ": calls"] += left;
}

void Clock::note(const std::string& lane, const std::string& name, uint64_t bytes, double begin, double end) {
    std::lock_guard lock(mutex_);
    if (keep_) records_.push_back({lane, name, bytes, begin, end});
}

std::vector<Record> Clock::records(bool keep) {
    std::lock_guard lock(mutex_);
    keep_ = keep;
    return std::exchange(records_, {});
}

Seconds Clock::waits(bool reset) {
    std::lock_guard lock(mutex_);
    return reset ? std::exchange(waits_, {}) : waits_;
}

}  // namespace simulated
