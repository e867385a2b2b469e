#include "thread_pool.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>

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

class Pool {
  public:
    // False when another loop has the pool.
    bool try_run(std::size_t count, Task task, void* context, std::size_t helpers) {
        std::unique_lock<std::mutex> running(running_, std::try_to_lock);
        if (!running.owns_lock()) {
            return false;
        }
        start_workers(helpers);
        {
            const std::lock_guard<std::mutex> lock(mutex_);
            task_ = task;
            context_ = context;
            count_ = count;
            places_ = helpers;
            next_.store(0, std::memory_order_relaxed);
            ++generation_;
        }
        wake_.notify_all();
        work(count, task, context);
        // All chunks are handed out: close the loop for threads that have not woken yet, wait for those at
        // work.
        std::unique_lock<std::mutex> lock(mutex_);
        places_ = 0;
        idle_.wait(lock, [this] { return busy_ == 0; });
        return true;
    }

  private:
    void work(std::size_t count, Task task, void* context) {
        for (std::size_t i = next_.fetch_add(1, std::memory_order_relaxed); i < count;
             i = next_.fetch_add(1, std::memory_order_relaxed)) {
            task(context, i);
        }
    }

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
        std::size_t seen = 0;
        std::unique_lock<std::mutex> lock(mutex_);
        for (;;) {
            wake_.wait(lock, [&] { return generation_ != seen; });
            seen = generation_;
            if (places_ == 0) {
                continue;
            }
            --places_;
            ++busy_;
            const std::size_t count = count_;
            const Task task = task_;
            void* const context = context_;
            lock.unlock();
            work(count, task, context);
            lock.lock();
            if (--busy_ == 0) {
                idle_.notify_one();
            }
        }
    }

    std::mutex running_;       // held by the loop that has the pool
    std::size_t started_ = 0;  // under running_

    std::mutex mutex_;  // everything below
    std::condition_variable wake_;
    std::condition_variable idle_;
    std::size_t generation_ = 0;
    std::size_t places_ = 0;  // workers that may still join the loop
    std::size_t busy_ = 0;    // workers inside it
    std::size_t count_ = 0;
    Task task_ = nullptr;
    void* context_ = nullptr;
    std::atomic<std::size_t> next_{0};
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
    if (wanted > 1 && pool().try_run(count, task, context, wanted - 1)) {
        return;
    }
    for (std::size_t i = 0; i < count; ++i) {
        task(context, i);
    }
}

}  // namespace offload::cpu_adam
