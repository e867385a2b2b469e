#include "thread_pool.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

namespace offload::cpu_adam {
namespace {

std::size_t default_threads() {
    cpu_set_t allowed;
    CPU_ZERO(&allowed);
    if (sched_getaffinity(0, sizeof(allowed), &allowed) == 0 && CPU_COUNT(&allowed) > 0) {
        return static_cast<std::size_t>(CPU_COUNT(&allowed));
    }
    const unsigned found = std::thread::hardware_concurrency();
    return found == 0 ? 1 : found;
}

// One call of parallel_for. It lies on the caller's stack, who leaves when no worker has it any more.
struct Loop {
    const std::size_t count;
    const Task task;
    void* const context;
    std::atomic<std::size_t> next{0};
    std::size_t places;    // workers that may still join
    std::size_t busy = 0;  // workers inside

    void work() {
        for (std::size_t i = next.fetch_add(1, std::memory_order_relaxed); i < count;
             i = next.fetch_add(1, std::memory_order_relaxed)) {
            task(context, i);
        }
    }
};

class Pool {
  public:
    void run(std::size_t count, Task task, void* context, std::size_t helpers) {
        Loop loop{.count = count, .task = task, .context = context, .places = helpers};
        {
            const std::lock_guard<std::mutex> lock(mutex_);
            start_workers(helpers);
            loops_.push_back(&loop);
        }
        wake_.notify_all();
        loop.work();
        // All chunks are handed out: close the loop for threads that have not woken yet, wait for those at
        // work.
        std::unique_lock<std::mutex> lock(mutex_);
        forget(&loop);
        left_.wait(lock, [&] { return loop.busy == 0; });
    }

  private:
    void start_workers(std::size_t wanted) {
        if (started_ >= wanted) {
            return;
        }
        sigset_t all, before;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);  // signals belong to the interpreter's threads
        try {
            for (; started_ < wanted; ++started_) {
                std::thread([this] { serve(); }).detach();
            }
        } catch (const std::system_error&) {  // thread limit reached: fewer helpers, the same result
        }
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
    }

    [[noreturn]] void serve() {
        std::unique_lock<std::mutex> lock(mutex_);
        for (;;) {
            wake_.wait(lock, [this] { return !loops_.empty(); });
            Loop& loop = *loops_.front();  // the oldest that wants more workers
            ++loop.busy;
            if (--loop.places == 0) {
                forget(&loop);
            }
            lock.unlock();
            loop.work();
            lock.lock();
            forget(&loop);  // all of it is handed out
            if (--loop.busy == 0) {
                left_.notify_all();
            }
        }
    }

    void forget(Loop* loop) { std::erase(loops_, loop); }

    std::mutex mutex_;  // everything below, and what workers change of loops
    std::condition_variable wake_;
    std::condition_variable left_;
    std::size_t started_ = 0;
    std::vector<Loop*> loops_;  // that more workers may join, the oldest first
};

std::atomic<std::size_t> g_threads{0};  // 0: not chosen yet
std::atomic<Pool*> g_pool{nullptr};     // never destroyed: sleeping threads outlive static destructors

// Registered when the library is loaded. The parent's pool is forgotten, not freed: its locks may be held.
[[maybe_unused]] const int kForkHandler =
    pthread_atfork(nullptr, nullptr, [] { g_pool.store(nullptr, std::memory_order_release); });

Pool& pool() {
    Pool* current = g_pool.load(std::memory_order_acquire);
    if (current == nullptr) {
        Pool* fresh = new Pool();
        if (g_pool.compare_exchange_strong(current, fresh, std::memory_order_acq_rel)) {
            current = fresh;
        } else {
            delete fresh;  // no thread has been started in it
        }
    }
    return *current;
}

}  // namespace

void set_num_threads(std::size_t count) {
    g_threads.store(count == 0 ? 1 : count, std::memory_order_relaxed);
}

std::size_t num_threads() {
    std::size_t count = g_threads.load(std::memory_order_relaxed);
    if (count == 0) {
        count = default_threads();
        g_threads.store(count, std::memory_order_relaxed);
    }
    return count;
}

void parallel_for(std::size_t count, Task task, void* context) {
    const std::size_t wanted = num_threads() < count ? num_threads() : count;
    if (wanted > 1) {
        pool().run(count, task, context, wanted - 1);
        return;
    }
    for (std::size_t i = 0; i < count; ++i) {
        task(context, i);
    }
}

}  // namespace offload::cpu_adam
