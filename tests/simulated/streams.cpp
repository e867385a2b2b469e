#include "streams.h"

#include <Python.h>

#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>
#include <atomic>
#include <thread>

#include "faults.h"

namespace simulated {
namespace {
constexpr double POLL_S = 1e-6;         // of the host, by the clock, to ask whether something is done
std::atomic<std::thread::id> beginner;  // the thread that has begun the schedule, a test's own
std::atomic<int> compute_threads{0};    // that this one wants of an operator, whichever thread has it run

bool is_beginner() { return std::this_thread::get_id() == beginner.load(); }
}  // namespace

Lock::Lock(std::recursive_mutex& mutex) : mutex_(mutex) {
    if (mutex_.try_lock()) return;
    PyThreadState* state = Py_IsInitialized() && PyGILState_Check() ? PyEval_SaveThread() : nullptr;
    mutex_.lock();
    if (state) PyEval_RestoreThread(state);
}

Machine& machine() {
    static auto* one = new Machine;  // never destroyed: tensors of the interpreter outlive static objects
    return *one;
}

std::string stream_name(int stream) {
    return "sim:" + std::to_string(device_of(stream)) + "/" + std::to_string(number_of(stream));
}

void Machine::begin(const Schedule& schedule) {
    Lock lock(mutex);
    for (int device = 0; device < DEVICES; ++device) synchronize_device(device);
    schedule_ = schedule;
    beginner = std::this_thread::get_id();
    compute_threads = at::get_num_threads();
    random_.seed(schedule.seed);
    std::fill(made_, made_ + DEVICES,
              0);  // streams are named by the order in which a schedule's program makes them
    for (Queue& queue : queues_) queue.end = queue.since = queue.blocked = queue.blocked_since = 0;
    idle_.clear();
}

int Machine::make_stream(int device) {
    Lock lock(mutex);
    return default_stream(device) + 1 + made_[device]++ % (STREAMS - 1);
}

void Machine::tick(int stream) {
    Before& before = queues_[stream].before;
    if (before.size() <= size_t(stream)) before.resize(stream + 1);
    before[stream]++;
    join(before, host_);
}

void Machine::push(int stream, const std::string& name, std::function<void()> run,
                   const std::vector<Span>& spans, const Work& work) {
    if (name != "free") may_fail(WORK, name.c_str());
    if (is_beginner()) compute_threads = at::get_num_threads();
    Lock lock(mutex);
    Queue& queue = queues_[stream];
    if (the_clock().on() && work.lane != Lane::none) spend_on(stream, name, work);
    if (the_clock().dry()) return;
    tick(stream);
    checker.access(stream, name, queue.before, spans);
    queue.operations.push_back({name, std::move(run), nullptr, nullptr});
    queue.tail++;
    choose(stream);
}

void Machine::record(Event& event, int stream) {
    Lock lock(mutex);
    Queue& queue = queues_[stream];
    tick(stream);
    event.mark = std::make_shared<Mark>();
    *event.mark = {stream, ++queue.tail, false, queue.before, end_of(stream), queue.since, queue.lane};
    queue.operations.push_back({"record", nullptr, nullptr, event.mark});
    queue.counts["records"]++;
    choose(stream);
}

void Machine::wait(Event& event, int stream) {
    Lock lock(mutex);
    if (!event.mark) return;
    Queue& queue = queues_[stream];
    join(queue.before, event.mark->before);
    if (event.mark->time > std::max(queue.end, queue.blocked)) {
        queue.blocked = event.mark->time;
        queue.blocked_since = event.mark->since;
        queue.blocked_by = event.mark->lane;
    }
    queue.operations.push_back({"wait", nullptr, event.mark, nullptr});
    queue.tail++;
    queue.counts["waits"]++;
    choose(stream);
}

void Machine::follow(int stream, int other) {
    if (stream == other) return;
    Lock lock(mutex);
    Event event;
    record(event, other);
    wait(event, stream);
}

void Machine::choose(int stream) {
    if (schedule_.random) {
        while (random_() % 3 == 0) {
            int any = int(random_() % (DEVICES * STREAMS));
            if (queues_[any].head < queues_[any].tail) run_until(any, queues_[any].head + 1);
        }
        return;
    }
    const auto& first = schedule_.first;
    if (schedule_.eager || std::find(first.begin(), first.end(), number_of(stream)) != first.end())
        run_until(stream, queues_[stream].tail);
}

void Machine::run_until(int stream, uint64_t position) {
    Queue& queue = queues_[stream];
    while (queue.head < position) {
        if (queue.running) return;  // an operation that frees memory, which gives this stream more work
        if (auto awaited = queue.operations.front().wait; awaited && !awaited->done)
            run_until(awaited->stream, awaited->position);
        Operation operation = std::move(queue.operations.front());
        queue.operations.pop_front();
        queue.head++;
        if (operation.mark) operation.mark->done = true;
        if (!operation.run) continue;
        if (tracing_) ran_.push_back(stream_name(stream) + " " + operation.name);
        struct Running {
            bool& flag;
            explicit Running(bool& flag) : flag(flag) { flag = true; }
            ~Running() { flag = false; }
        } running(queue.running);
        execute(operation.run);
    }
}

double Machine::end_of(int stream) {
    Lock lock(mutex);
    const Queue& queue = queues_[stream];
    return std::max({queue.end, queue.blocked, the_clock().now()});
}

void Machine::spend_on(int stream, const std::string& name, const Work& work) {
    Clock& clock = the_clock();
    Queue& queue = queues_[stream];
    std::string lane = lane_name(work.lane);
    double now = clock.now(), given = now + clock.costs().launch_s;
    double ready = std::max({queue.end, queue.blocked, given});
    double begin = clock.lanes[int(work.lane)].place(ready, work.seconds, now);
    Seconds& why = idle_[lane];
    double late =
        given;  // until here it waits for the caller, who could have given it, or its cause, earlier
    if (queue.blocked > given && queue.blocked > queue.end) {
        late = std::min(queue.blocked_since, queue.blocked);
        why[queue.blocked_by] += queue.blocked - std::max(queue.end, late);
    }
    if (late > queue.end) clock.explain(queue.end, late, why);
    if (begin > ready) why["the lane's other work"] += begin - ready;
    if (begin > queue.end) queue.since = begin;
    queue.end = begin + work.seconds;
    queue.lane = lane;
    clock.note(lane, name, work.bytes, begin, queue.end);
}

std::map<std::string, Seconds> Machine::idle(bool reset) {
    Lock lock(mutex);
    return reset ? std::exchange(idle_, {}) : idle_;
}

void Machine::execute(const std::function<void()>& run) {
    // Not at::ThreadLocalStateGuard: it copies saved-tensor hooks, and for that it wants Python's lock.
    at::AutoDispatchBelowADInplaceOrView below;
    c10::impl::ExcludeDispatchKeyGuard plain(c10::python_ks | c10::autocast_dispatch_keyset);
    // Autograd's threads keep what they began with. The beginner's own number is the test's to change.
    if (int threads = compute_threads; !is_beginner() && threads && threads != at::get_num_threads())
        at::set_num_threads(threads);
    run();
}

void Machine::synchronize(int stream) {
    {
        Lock lock(mutex);
        queues_[stream].counts["synchronizations"]++;
        run_until(stream, queues_[stream].tail);
        join(host_, queues_[stream].before);
    }
    the_clock().wait_until(end_of(stream), "end of " + queues_[stream].lane);
}

void Machine::synchronize(Event& event) {
    if (!event.mark) return;
    {
        Lock lock(mutex);
        queues_[event.mark->stream].counts["event_synchronizations"]++;
        run_until(event.mark->stream, event.mark->position);
        join(host_, event.mark->before);
    }
    the_clock().wait_until(event.mark->time, "end of " + event.mark->lane);
}

void Machine::synchronize_device(int device) {
    double last = 0;
    {
        Lock lock(mutex);
        queues_[default_stream(device)].counts["device_synchronizations"]++;
        for (int stream = default_stream(device); stream < default_stream(device + 1); ++stream) {
            run_until(stream, queues_[stream].tail);
            join(host_, queues_[stream].before);
            last = std::max(last, end_of(stream));
        }
    }
    the_clock().wait_until(last, "end of the device");
}

bool Machine::query(Event& event) {
    the_clock().spend(POLL_S);
    Lock lock(mutex);
    if (!event.mark) return true;
    queues_[event.mark->stream].counts["queries"]++;
    if (the_clock().on() && event.mark->time > the_clock().now()) return false;
    if (event.mark->done) {
        join(host_, event.mark->before);
        return true;
    }
    if (++polls_ % 64 == 0) {  // a host that spins gets on, slowly
        int stream = event.mark->stream;
        run_until(stream, queues_[stream].head + 1);
    }
    return false;
}

bool Machine::idle(int stream) {
    the_clock().spend(POLL_S);
    Lock lock(mutex);
    if (the_clock().on()) return end_of(stream) <= the_clock().now();
    return queues_[stream].head == queues_[stream].tail;
}

void Machine::lose() {
    Lock lock(mutex);
    for (Queue& queue : queues_)
        while (queue.head < queue.tail) {
            if (auto mark = queue.operations.front().mark) mark->done = true;
            queue.operations.pop_front();
            queue.head++;
        }
}

void Machine::leave(char* begin, size_t size, const std::string& verb) {
    Lock lock(mutex);
    checker.leave(begin, size, host_, verb);
}

void Machine::count(int stream, const std::string& what, uint64_t many) {
    Lock lock(mutex);
    queues_[stream].counts[what] += many;
}

std::vector<Counts> Machine::counts(bool reset) {
    Lock lock(mutex);
    std::vector<Counts> all;
    for (Queue& queue : queues_) {
        all.push_back(queue.counts);
        if (reset) queue.counts.clear();
    }
    return all;
}

std::vector<uint64_t> Machine::pending() {
    Lock lock(mutex);
    std::vector<uint64_t> all;
    for (Queue& queue : queues_) all.push_back(queue.tail - queue.head);
    return all;
}

std::vector<std::string> Machine::trace(bool on) {
    Lock lock(mutex);
    tracing_ = on;
    return std::exchange(ran_, {});
}

}  // namespace simulated
