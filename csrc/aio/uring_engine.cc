// The io_uring engine: one I/O thread owns the ring; callers hand it operations through an inbox and an
// eventfd.
//
// Owns: the ring, its slots and its registered buffers and files; all of them belong to the I/O thread alone,
// which is what lets the kernel skip locking (SINGLE_ISSUER) and run completions when we ask for them
// (DEFER_TASKRUN). Must not know: Python.
#include <liburing.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <deque>
#include <functional>
#include <future>
#include <optional>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "engine.h"
#include "files.h"

#ifndef IORING_SETUP_CLAMP
#define IORING_SETUP_CLAMP (1U << 4)
#endif
#ifndef IORING_SETUP_SUBMIT_ALL
#define IORING_SETUP_SUBMIT_ALL (1U << 7)
#endif
#ifndef IORING_SETUP_COOP_TASKRUN
#define IORING_SETUP_COOP_TASKRUN (1U << 8)
#endif
#ifndef IORING_SETUP_SINGLE_ISSUER
#define IORING_SETUP_SINGLE_ISSUER (1U << 12)
#endif
#ifndef IORING_SETUP_DEFER_TASKRUN
#define IORING_SETUP_DEFER_TASKRUN (1U << 13)
#endif

namespace swap_aio {

namespace {

constexpr std::uint64_t kSilentTag =
    ~std::uint64_t{0};  // carries no news; liburing's own timeouts use it too
constexpr std::uint64_t kWakeTag = kSilentTag - 1;
constexpr std::uint64_t kDelayBit = std::uint64_t{1} << 62;  // a timeout, not a transfer, of the slot
constexpr int kBrokenPauseMs = 10;                           // between looks at a ring that failed
constexpr unsigned kBufferSlots = 1024;                      // ranges of at most kLargestBuffer
constexpr unsigned kFileSlots = 64;
constexpr std::size_t kLargestBuffer = std::size_t{1} << 30;  // the kernel's limit for one registered range

// Owns one ring.
class Ring {
  public:
    explicit Ring(unsigned entries) {
        // Best first; older kernels answer EINVAL to flags they do not know.
        static constexpr unsigned kFlagSets[] = {
            IORING_SETUP_CLAMP | IORING_SETUP_SUBMIT_ALL | IORING_SETUP_SINGLE_ISSUER |
                IORING_SETUP_DEFER_TASKRUN,
            IORING_SETUP_CLAMP | IORING_SETUP_SUBMIT_ALL | IORING_SETUP_COOP_TASKRUN,
            IORING_SETUP_CLAMP,
            0,
        };
        int result = -EINVAL;
        for (const unsigned flags : kFlagSets) {
            io_uring_params params{};
            params.flags = flags;
            result = io_uring_queue_init_params(entries, &ring_, &params);
            if (result != -EINVAL) break;
        }
        if (result < 0) throw std::system_error(-result, std::generic_category(), "io_uring_queue_init");
        // A forked child would keep the ring, and with it files without a name and pinned memory.
        (void)io_uring_ring_dontfork(&ring_);
    }
    Ring(const Ring&) = delete;
    Ring& operator=(const Ring&) = delete;
    ~Ring() { io_uring_queue_exit(&ring_); }

    io_uring* get() { return &ring_; }

    /// Read and write (not only readv and writev) exist from Linux 5.6.  A container may allow to set a ring
    /// up, and refuse to enter it: so a request that does nothing goes through.
    void require_operations() {
        io_uring_probe* probe = io_uring_get_probe_ring(&ring_);
        const bool good = probe != nullptr && io_uring_opcode_supported(probe, IORING_OP_READ) &&
                          io_uring_opcode_supported(probe, IORING_OP_WRITE) &&
                          io_uring_opcode_supported(probe, IORING_OP_TIMEOUT);
        if (probe != nullptr) io_uring_free_probe(probe);
        if (!good) throw std::system_error(EOPNOTSUPP, std::generic_category(), "io_uring read and write");
        io_uring_prep_nop(io_uring_get_sqe(&ring_));
        int result;
        do result = io_uring_submit_and_wait(&ring_, 1);
        while (result == -EINTR);
        io_uring_cqe* cqe = nullptr;
        if (result >= 0) result = io_uring_wait_cqe(&ring_, &cqe);
        if (result < 0) throw std::system_error(-result, std::generic_category(), "io_uring_enter");
        io_uring_cqe_seen(&ring_, cqe);
    }

  private:
    io_uring ring_{};
};

class UringEngine final : public Engine {
  public:
    explicit UringEngine(const Settings& settings)
        : Engine(settings),
          wake_(::eventfd(0, EFD_CLOEXEC)),
          queue_(settings.block_bytes, depth_, [this](const OperationPtr& o) { finish(o); }),
          slots_(settings.queue_depth) {
        if (wake_.get() < 0) throw std::system_error(errno, std::generic_category(), "eventfd");
        for (unsigned i = settings.queue_depth; i-- > 0;) free_slots_.push_back(i);
        std::promise<void> ready;
        auto is_ready = ready.get_future();
        thread_ = std::thread([this, &ready] { run(ready); });
        try {
            is_ready.get();
        } catch (...) {
            thread_.join();
            throw;
        }
    }

    const char* name() const override { return "io_uring"; }

    bool register_buffer(char* address, std::size_t length) override {
        return command([this, address, length] { return add_buffer(address, length); });
    }
    void unregister_buffer(char* address) override {
        command([this, address] { return remove_buffer(address); });
    }
    bool register_file(int fd) override {
        return command([this, fd] { return add_file(fd); });
    }
    void unregister_file(int fd) override {
        command([this, fd] { return remove_file(fd); });
    }

    void abandon_in_child() override {
        const int ring_fd = ring_fd_.exchange(-1);
        if (ring_fd >= 0) ::close(ring_fd);
        wake_.reset(-1);
    }

  protected:
    void enqueue(const std::vector<OperationPtr>& operations) override {
        {
            std::lock_guard<std::mutex> guard(mutex_);
            if (!stop_) {
                const bool first = inbox_.empty() && commands_.empty();
                inbox_.insert(inbox_.end(), operations.begin(), operations.end());
                if (first) wake();
                return;
            }
        }
        cancel(operations);
    }

    void stop() override {
        std::lock_guard<std::mutex> guard(mutex_);
        stop_ = true;
        wake();
    }

    bool join(double timeout_s) override {
        {
            std::unique_lock<std::mutex> guard(mutex_);
            if (!ended_.wait_for(guard, std::chrono::duration<double>(timeout_s), [this] { return exited_; }))
                return false;
        }
        if (thread_.joinable()) thread_.join();
        wake_.reset(-1);  // nobody writes to it once stop_ is set
        return true;
    }

  private:
    enum class SlotState : std::uint8_t { kFree, kInKernel, kHeld, kDelayed };

    struct Slot {
        Request request;
        SlotState state = SlotState::kFree;
        std::size_t report_at_most = SIZE_MAX;  // injected short transfer
        bool lie = false;                       // injected wrong byte
        __kernel_timespec delay{};
    };
    struct Buffer {
        char* begin;
        char* end;
        unsigned index;
        char* registered_as;  // the address the caller gave: long ranges take several entries
    };
    struct File {
        int fd;
        unsigned index;
    };
    struct Command {
        std::function<bool()> run;
        std::promise<bool> result;
    };

    void wake() {
        const std::uint64_t one = 1;
        // Cannot block: the counter would have to reach 2^64 - 1.
        while (::write(wake_.get(), &one, sizeof one) < 0 && errno == EINTR) {
        }
    }

    // Run a function on the I/O thread and wait for its answer.
    bool command(std::function<bool()> function) {
        auto item = std::make_shared<Command>();
        item->run = std::move(function);
        auto result = item->result.get_future();
        {
            std::lock_guard<std::mutex> guard(mutex_);
            if (stop_) return false;
            const bool first = inbox_.empty() && commands_.empty();
            commands_.push_back(std::move(item));
            if (first) wake();
        }
        return result.get();
    }

    // ---- everything below runs on the I/O thread ----

    void run(std::promise<void>& ready) {
        std::optional<Ring> ring;
        try {
            ring.emplace(settings_.queue_depth + 8);
            ring->require_operations();
        } catch (...) {
            ready.set_exception(std::current_exception());
            return;
        }
        ring_ = ring->get();
        ring_fd_.store(ring_->ring_fd);
#ifdef OFFLOAD_LIBURING_HAS_SPARSE
        io_uring_register_ring_fd(ring_);
        have_buffers_ = io_uring_register_buffers_sparse(ring_, kBufferSlots) == 0;
        have_files_ = io_uring_register_files_sparse(ring_, kFileSlots) == 0;
#endif
        ready.set_value();  // the constructor returns; `ready` is gone from here on
        loop();
        ring_fd_.store(-1);
        ring_ = nullptr;
        ring.reset();
        std::lock_guard<std::mutex> guard(mutex_);
        exited_ = true;
        ended_.notify_all();
    }

    void loop() {
        for (;;) {
            const bool stopping = take_inbox();
            if (stopping) cancel_all();
            if (stopping && in_flight_ == 0 && !wake_armed_) return;
            if (!stopping && !wake_armed_ && broken_ == 0) arm_wake();
            issue_waiting();
            if (take_synthetic()) continue;
            if (broken_ != 0) {
                wait_broken();
                continue;
            }
            const int result = submit_and_wait();
            if (result < 0 && result != -EINTR && result != -EAGAIN && result != -EBUSY && result != -ETIME) {
                break_down(-result);
                continue;
            }
            reap();
        }
    }

    // Move what callers left into the queue; returns whether the engine is to stop.
    bool take_inbox() {
        std::vector<OperationPtr> operations;
        std::vector<std::shared_ptr<Command>> commands;
        bool stopping;
        {
            std::lock_guard<std::mutex> guard(mutex_);
            operations.swap(inbox_);
            commands.swap(commands_);
            stopping = stop_;
        }
        for (auto& item : commands) item->result.set_value(item->run());
        for (auto& operation : operations) {
            if (broken_ != 0) {
                operation->fail(broken_, operation->offset, operation->length);
                finish(operation);
            } else {
                queue_.push(std::move(operation));
            }
        }
        return stopping;
    }

    void arm_wake() {
        io_uring_sqe* sqe = next_sqe();
        if (sqe == nullptr) return;
        io_uring_prep_read(sqe, wake_.get(), &wake_value_, sizeof wake_value_, 0);
        sqe->user_data = kWakeTag;
        wake_armed_ = true;
    }

    int submit_and_wait() {
        if (!queue_.held_back()) return io_uring_submit_and_wait(ring_, 1);
        io_uring_cqe* cqe = nullptr;
        __kernel_timespec limit{};
        limit.tv_nsec = static_cast<long long>(RequestQueue::kCourtesyS * 1e9);
#ifdef OFFLOAD_LIBURING_HAS_SPARSE
        return io_uring_submit_and_wait_timeout(ring_, &cqe, 1, &limit, nullptr);
#else
        const int result = io_uring_submit(ring_);
        return result < 0 ? result : io_uring_wait_cqe_timeout(ring_, &cqe, &limit);
#endif
    }

    void issue_waiting() {
        Request request;
        while (broken_ == 0 && !free_slots_.empty() && queue_.pop(request)) {
            const unsigned index = free_slots_.back();
            free_slots_.pop_back();
            slots_[index].request = std::move(request);
            ++in_flight_;
            issue(index);
        }
    }

    void issue(unsigned index) {
        Slot& slot = slots_[index];
        slot.report_at_most = SIZE_MAX;
        slot.lie = false;
        const Fault fault = faults.judge(slot.request.operation->kind);
        switch (fault.action) {
            case FaultAction::kNone:
                break;
            case FaultAction::kFail:
                slot.state = SlotState::kHeld;
                synthetic_.push_back({index, -fault.errno_value});
                return;
            case FaultAction::kHang:
                slot.state = SlotState::kHeld;
                return;
            case FaultAction::kShort:
                slot.report_at_most = fault.short_bytes;
                break;
            case FaultAction::kLie:
                if (slot.request.operation->kind == Kind::kWrite) {
                    slot.state = SlotState::kHeld;
                    synthetic_.push_back({index, static_cast<std::int64_t>(slot.request.length)});
                    return;
                }
                slot.lie = true;
                break;
            case FaultAction::kDelay: {
                slot.delay.tv_sec = static_cast<long long>(fault.delay_s);
                slot.delay.tv_nsec =
                    static_cast<long long>((fault.delay_s - static_cast<double>(slot.delay.tv_sec)) * 1e9);
                io_uring_sqe* sqe = next_sqe();
                if (sqe == nullptr) break;
                io_uring_prep_timeout(sqe, &slot.delay, 0, 0);
                sqe->user_data = kDelayBit | index;
                slot.state = SlotState::kDelayed;
                return;
            }
        }
        transfer(index);
    }

    void transfer(unsigned index) {
        Slot& slot = slots_[index];
        const Request& request = slot.request;
        const bool reading = request.operation->kind == Kind::kRead;
        io_uring_sqe* sqe = next_sqe();
        if (sqe == nullptr) {
            slot.state = SlotState::kHeld;
            synthetic_.push_back({index, -EAGAIN});
            return;
        }
        const int file = file_index(request.operation->fd);
        const int buffer = buffer_index(request.address, request.length);
        const int fd = file >= 0 ? file : request.operation->fd;
        const auto length = static_cast<unsigned>(request.length);
        const auto offset = static_cast<std::uint64_t>(request.offset);
        if (buffer >= 0) {
            if (reading)
                io_uring_prep_read_fixed(sqe, fd, request.address, length, offset, buffer);
            else
                io_uring_prep_write_fixed(sqe, fd, request.address, length, offset, buffer);
        } else {
            if (reading)
                io_uring_prep_read(sqe, fd, request.address, length, offset);
            else
                io_uring_prep_write(sqe, fd, request.address, length, offset);
        }
        if (file >= 0) sqe->flags |= IOSQE_FIXED_FILE;
        sqe->user_data = index;
        slot.state = SlotState::kInKernel;
    }

    // The submission queue has room for every slot, so the retry is for a kernel that took nothing last time.
    io_uring_sqe* next_sqe() {
        io_uring_sqe* sqe = io_uring_get_sqe(ring_);
        if (sqe == nullptr) {
            io_uring_submit(ring_);
            sqe = io_uring_get_sqe(ring_);
        }
        return sqe;
    }

    // Results that did not come from the ring.  True when there were any: then there may be more to issue.
    bool take_synthetic() {
        if (synthetic_.empty()) return false;
        std::deque<std::pair<unsigned, std::int64_t>> results;
        results.swap(synthetic_);
        for (const auto& [index, result] : results) complete(index, result);
        return true;
    }

    void reap() {
        unsigned head;
        unsigned seen = 0;
        io_uring_cqe* cqe;
        io_uring_for_each_cqe(ring_, head, cqe) {
            ++seen;
            const std::uint64_t tag = cqe->user_data;
            if (tag == kWakeTag) {
                wake_armed_ = false;
            } else if (tag == kSilentTag) {
                continue;
            } else if ((tag & kDelayBit) != 0) {
                const auto index = static_cast<unsigned>(tag & ~kDelayBit);
                if (broken_ != 0) continue;  // it ended then
                if (stopped_) {
                    complete(index, -ECANCELED);
                } else {
                    transfer(index);
                }
            } else {
                const auto index = static_cast<unsigned>(tag);
                std::int64_t result = cqe->res;
                if (result > 0)
                    result = static_cast<std::int64_t>(
                        std::min(static_cast<std::size_t>(result), slots_[index].report_at_most));
                complete(index, result);
            }
        }
        io_uring_cq_advance(ring_, seen);
    }

    void complete(unsigned index, std::int64_t result) {
        Slot& slot = slots_[index];
        if (slot.lie && result > 0) slot.request.address[0] = static_cast<char>(~slot.request.address[0]);
        TransferCounters counters;
        const Next next = take_result(slot.request, stopped_ && result < 0 ? -ECANCELED : result, counters);
        count(counters);
        if (next == Next::kReissue) {
            if (!stopped_ && broken_ == 0) {
                issue(index);
                return;
            }
            slot.request.operation->fail(broken_ != 0 ? broken_ : ECANCELED, slot.request.offset,
                                         slot.request.length);
        }
        const Request request = std::move(slot.request);
        slot.request = Request{};
        slot.state = SlotState::kFree;
        free_slots_.push_back(index);
        --in_flight_;
        queue_.retire(request);
    }

    // The caller gave up: end everything that the kernel does not hold.
    void cancel_all() {
        queue_.cancel(ECANCELED);
        if (std::exchange(stopped_, true)) return;
        for (unsigned index = 0; index < slots_.size(); ++index) {
            if (slots_[index].state == SlotState::kHeld) complete(index, -ECANCELED);
            if (slots_[index].state == SlotState::kDelayed) {
                if (io_uring_sqe* sqe = next_sqe()) {
                    io_uring_prep_timeout_remove(sqe, kDelayBit | index, 0);
                    sqe->user_data = kSilentTag;
                }
            }
        }
        synthetic_.clear();
    }

    // The ring itself failed: nothing is submitted any more.  What the kernel has taken is over only when it
    // says so: until then it may read or write the caller's memory.
    void break_down(int errno_value) {
        broken_ = errno_value;
        wake_armed_ = false;
        queue_.cancel(errno_value);
        synthetic_.clear();
        const auto& submissions = ring_->sq;
        for (unsigned head = *submissions.khead; head != submissions.sqe_tail; ++head) {
            const std::uint64_t tag = submissions.sqes[head & *submissions.kring_mask].user_data;
            if (tag < slots_.size()) slots_[tag].state = SlotState::kHeld;  // not taken
        }
        for (unsigned index = 0; index < slots_.size(); ++index) {
            const SlotState state = slots_[index].state;
            if (state != SlotState::kFree && state != SlotState::kInKernel) complete(index, -errno_value);
        }
    }

    // The eventfd is left alone: the kernel may still hold a read of it.
    // The kernel tells what is over only to who enters the ring, if it lets anybody.
    void wait_broken() {
        (void)::syscall(__NR_io_uring_enter, ring_->ring_fd, 0U, 0U, IORING_ENTER_GETEVENTS, nullptr,
                        std::size_t{0});
        reap();
        ::poll(nullptr, 0, kBrokenPauseMs);
    }

    bool add_buffer(char* address, std::size_t length) {
#ifdef OFFLOAD_LIBURING_HAS_SPARSE
        if (!have_buffers_) return false;
        unsigned index = 0;
        for (std::size_t start = 0; start < length; start += kLargestBuffer) {
            while (std::any_of(buffers_.begin(), buffers_.end(),
                               [&](const Buffer& b) { return b.index == index; }))
                ++index;
            iovec range{address + start, std::min(kLargestBuffer, length - start)};
            const __u64 tag = 0;
            if (index >= kBufferSlots ||
                io_uring_register_buffers_update_tag(ring_, index, &range, &tag, 1) < 0) {
                remove_buffer(address);
                return false;
            }
            buffers_.push_back({address + start, address + start + range.iov_len, index, address});
        }
        return true;
#else
        (void)address;
        (void)length;
        return false;
#endif
    }

    bool remove_buffer(char* address) {
#ifdef OFFLOAD_LIBURING_HAS_SPARSE
        for (const Buffer& buffer : buffers_) {
            if (buffer.registered_as != address) continue;
            iovec none{nullptr, 0};
            const __u64 tag = 0;
            io_uring_register_buffers_update_tag(ring_, buffer.index, &none, &tag, 1);
        }
#endif
        return std::erase_if(buffers_, [&](const Buffer& b) { return b.registered_as == address; }) != 0;
    }

    bool add_file(int fd) {
#ifdef OFFLOAD_LIBURING_HAS_SPARSE
        if (!have_files_ || file_index(fd) >= 0) return have_files_;
        unsigned index = 0;
        while (std::any_of(files_.begin(), files_.end(), [&](const File& f) { return f.index == index; }))
            ++index;
        if (index >= kFileSlots || io_uring_register_files_update(ring_, index, &fd, 1) < 0) return false;
        files_.push_back({fd, index});
        return true;
#else
        (void)fd;
        return false;
#endif
    }

    bool remove_file(int fd) {
#ifdef OFFLOAD_LIBURING_HAS_SPARSE
        const int index = file_index(fd);
        int none = -1;
        if (index >= 0) io_uring_register_files_update(ring_, static_cast<unsigned>(index), &none, 1);
#endif
        return std::erase_if(files_, [&](const File& f) { return f.fd == fd; }) != 0;
    }

    int buffer_index(const char* address, std::size_t length) const {
        for (const Buffer& b : buffers_)
            if (address >= b.begin && address + length <= b.end) return static_cast<int>(b.index);
        return -1;
    }

    int file_index(int fd) const {
        for (const File& f : files_)
            if (f.fd == fd) return static_cast<int>(f.index);
        return -1;
    }

    // Shared with callers, under the mutex.
    std::mutex mutex_;
    std::condition_variable ended_;
    std::vector<OperationPtr> inbox_;
    std::vector<std::shared_ptr<Command>> commands_;
    bool stop_ = false;
    bool exited_ = false;
    FileDescriptor wake_;
    std::atomic<int> ring_fd_{-1};
    std::thread thread_;

    // The I/O thread's own.
    io_uring* ring_ = nullptr;
    RequestQueue queue_;
    std::vector<Slot> slots_;
    std::vector<unsigned> free_slots_;
    std::deque<std::pair<unsigned, std::int64_t>> synthetic_;
    std::vector<Buffer> buffers_;
    std::vector<File> files_;
    std::uint64_t wake_value_ = 0;
    unsigned in_flight_ = 0;
    int broken_ = 0;
    bool wake_armed_ = false;
    bool have_buffers_ = false;
    bool have_files_ = false;
    bool stopped_ = false;
};

}  // namespace

std::unique_ptr<Engine> make_uring_engine(const Settings& settings) {
    return std::make_unique<UringEngine>(settings);
}

std::string uring_refusal() {
    try {
        Ring ring(8);
        ring.require_operations();
        return "";
    } catch (const std::system_error& error) {
        const int code = error.code().value();
        std::string text = std::string(error.what());
        if (code == EPERM || code == EACCES)
            text += " (forbidden here: a container's seccomp profile or the sysctl kernel.io_uring_disabled)";
        else if (code == ENOSYS)
            text += " (this kernel has no io_uring)";
        else if (code == ENOMEM)
            text += " (the locked-memory limit of this kernel is too small, see ulimit -l)";
        return text;
    }
}

}  // namespace swap_aio
