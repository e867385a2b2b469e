// A clock that goes by costs alone: who works, who waits, and which of them goes on next.
//
// Whoever acts in time is an actor: the host, and each worker that a program has started. Only one of them
// runs, the one that is behind the others; it hands on when it has come ahead of another. So what one does is
// seen by the others when they have come to that time, and a run depends on the costs alone, not on the
// machine.
#pragma once
#include <array>
#include <condition_variable>
#include <cstdint>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace simulated {

constexpr double NEVER = std::numeric_limits<double>::infinity();

// What work costs: bytes and operations per second, seconds.
struct Costs {
    double flops_16 = 1, flops_32 = 1, device_bytes = 1, h2d_bytes = 1, d2h_bytes = 1;
    double kernel_s = 0;    // the shortest kernel
    double copy_s = 0;      // of a copy, beside its bytes
    double launch_s = 0;    // until a stream has what the host gives it
    double operator_s = 0;  // of the host per operator, copy and event
};

enum class Lane { none, compute, h2d, d2h };
constexpr int LANES = 4;
const char* lane_name(Lane lane);

// What one operation takes of one lane.
struct Work {
    Lane lane = Lane::none;
    double seconds = 0;
    uint64_t bytes = 0;
};

// Something that does one thing at a time. What is given first comes first, but a gap that is large enough is
// used.
class Timeline {
  public:
    static constexpr double KEPT_S = 0.1;  // so long what is over is known
    double place(double ready, double seconds,
                 double past);  // returns the begin; nobody asks for times before `past`
    std::vector<std::pair<double, double>> within(double from, double to) const;  // when it is busy

  private:
    // The last one that begins by then, and later ones.
    std::map<double, double>::const_iterator since(double at) const;

    std::map<double, double> busy_;  // begin and end
};

// Seconds in which `one` is busy alone, `other` is, and both are.
std::array<double, 3> busy_alone_and_both(const Timeline& one, const Timeline& other, double from, double to);

struct Record {
    std::string lane, name;
    uint64_t bytes;
    double begin, end;
};

using Seconds = std::map<std::string, double>;

class Clock {
  public:
    void start(const Costs& costs, bool dry);
    void stop();
    bool on() const { return on_; }
    bool dry() const { return on_ && dry_; }
    const Costs& costs() const { return costs_; }

    // No lock may be held by who calls these: others may go on meanwhile.
    void spend(double seconds, const char* what = nullptr);  // the caller works
    void wait_until(double time, const std::string& what);   // the caller waits for a time
    double sleep(double until, const std::string& what);  // or until somebody wakes it; returns its time then
    void wake(int actor);                                 // at the caller's time

    int add_actor(const std::string& name);  // asleep; 0 is the host
    // The calling thread is that one from now on; waits for its turn.  False where the clock has started anew
    // since.
    bool enter(int actor);
    void leave();  // it has ended

    double now();
    int acting() const;
    // Who kept the caller from being earlier, in [begin, end): adds to `found`.
    void explain(double begin, double end, Seconds& found);
    void note(const std::string& lane, const std::string& name, uint64_t bytes, double begin, double end);
    std::vector<Record> records(bool keep);
    Seconds waits(bool reset);  // of all actors, as "actor: what"

    Timeline lanes[LANES];

  private:
    struct Segment {
        double begin, end;
        std::string what;
    };
    struct Actor {
        std::string name;
        double now = 0, wakes = NEVER;
        bool ended = false;
        std::vector<Segment> segments;  // of waiting and of long work
        std::condition_variable turn;
    };
    Actor& self();
    int earliest() const;
    void hand_on(std::unique_lock<std::mutex>& lock);
    void remember(Actor& actor, double begin, const std::string& what);

    std::mutex mutex_;
    bool on_ = false, dry_ = false, keep_ = false;
    Costs costs_;
    std::map<int, std::unique_ptr<Actor>>
        actors_;  // by number, which none of a former clock has, but for the host
    int last_number_ = 0;
    int running_ = 0;
    std::vector<Record> records_;
    Seconds waits_;
};

Clock& the_clock();

}  // namespace simulated
