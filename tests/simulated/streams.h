// Streams, events, and the schedule that decides how late queued work runs.
//
// There are no threads here. Work that is given to a stream is queued; it runs inside the host call that
// forces it: a synchronisation, or the schedule's own choice behind a call. So a run depends on the host's
// calls alone.
#pragma once
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <vector>

#include "checker.h"
#include "clock.h"

namespace simulated {

constexpr int DEVICES = 2;
constexpr int STREAMS = 33;  // of a device: the default one, and a pool that is handed out in turn, as CUDA's

inline int device_of(int stream) { return stream / STREAMS; }
inline int number_of(int stream) { return stream % STREAMS; }  // 0 is the default stream
inline int default_stream(int device) { return device * STREAMS; }

using Counts = std::map<std::string, uint64_t>;

// A place in a stream's queue, which an event has recorded.
struct Mark {
    int stream;
    uint64_t position;
    bool done = false;
    Before before;
    double time = 0,
           since = 0;  // by the clock: when it is reached, and since when the stream works without a gap
    std::string lane;  // of what was done last
};

struct Event {
    std::shared_ptr<Mark> mark;
};

struct Operation {
    std::string name;
    std::function<void()> run;   // of work
    std::shared_ptr<Mark> wait;  // of a wait: for what
    std::shared_ptr<Mark> mark;  // of a record: what is done now
};

struct Queue {
    std::deque<Operation> operations;
    uint64_t head = 0, tail = 0;  // how many have run, how many were given
    bool running = false;
    Before before;
    Counts counts;
    // By the clock: when all that was given is done, and since when it works without a gap; until when it
    // waits for whom, and since when that one works; what it did last.
    double end = 0, since = 0, blocked = 0, blocked_since = 0;
    std::string blocked_by, lane;
};

// Which streams run their work at once; the others run it when something waits for it.
struct Schedule {
    bool eager = false;      // all of them
    std::vector<int> first;  // numbers of streams, on every device
    bool random = false;     // each call runs a few operations of some streams
    uint64_t seed = 0;
};

class Machine {
  public:
    // Held by whoever looks at queues or memory, by way of a Lock.
    std::recursive_mutex mutex;
    Checker checker;

    void begin(const Schedule& schedule);  // waits for everything that is queued
    int make_stream(int device);

    void push(int stream, const std::string& name, std::function<void()> run, const std::vector<Span>& spans,
              const Work& work = {});
    void record(Event& event, int stream);
    void wait(Event& event, int stream);
    void follow(int stream, int other);  // `stream` waits for what `other` has been given

    void synchronize(int stream);
    void synchronize(Event& event);
    void synchronize_device(int device);
    bool query(Event& event);
    bool idle(int stream);
    void lose();  // what is queued never runs, and counts as done

    // The host leaves memory to somebody else; see Checker::leave.
    void leave(char* begin, size_t size, const std::string& verb);
    void count(int stream, const std::string& what, uint64_t many = 1);
    std::vector<Counts> counts(bool reset);
    std::vector<uint64_t> pending();
    std::vector<std::string> trace(bool on);  // names of what ran since the last call

    // By the clock: when all that a stream was given is done, and what kept it from beginning earlier.
    double end_of(int stream);
    std::map<std::string, Seconds> idle(bool reset);

    static void execute(const std::function<void()>& run);

  private:
    void tick(int stream);
    void spend_on(int stream, const std::string& name, const Work& work);
    void choose(int stream);
    void run_until(int stream, uint64_t position);

    Queue queues_[DEVICES * STREAMS];
    int made_[DEVICES] = {};
    Schedule schedule_;
    std::mt19937_64 random_;
    Before host_;  // what the host has waited for; one for all threads, since they hand work to each other
    uint64_t polls_ = 0;
    bool tracing_ = false;
    std::vector<std::string> ran_;
    std::map<std::string, Seconds> idle_;  // by lane
};

// Holds the machine's mutex. Who waits for it does so without Python's lock: its holder may run a kernel that
// wants that one.
class Lock {
  public:
    explicit Lock(std::recursive_mutex& mutex);
    ~Lock() { mutex_.unlock(); }
    Lock(const Lock&) = delete;

  private:
    std::recursive_mutex& mutex_;
};

Machine& machine();

}  // namespace simulated
