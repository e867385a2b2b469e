#include "operation.h"

#include <linux/futex.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <climits>
#include <utility>

namespace swap_aio {

double monotonic_s() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

std::uint64_t device_of(int fd) {
    struct stat facts{};
    return ::fstat(fd, &facts) == 0 ? facts.st_dev : 0;
}

Operation::Operation(Job job, std::uint64_t device)
    : kind(job.kind),
      priority(job.priority),
      fd(job.fd),
      offset(job.offset),
      address(job.address),
      length(job.length),
      device(device),
      submitted_s(monotonic_s()),
      checksums(std::move(job.checksums)) {}

bool Operation::wait(double timeout_s) const {
    const double deadline_s = monotonic_s() + timeout_s;
    for (;;) {
        std::uint32_t seen = kFlying;
        if (!state_.compare_exchange_strong(seen, kWaitedFor, std::memory_order_acquire) && seen == kDone)
            return true;
        const double left_s = std::min(deadline_s - monotonic_s(), 1e6);
        if (left_s <= 0) return done();
        timespec ts{};
        ts.tv_sec = static_cast<time_t>(left_s);
        ts.tv_nsec = static_cast<long>((left_s - static_cast<double>(ts.tv_sec)) * 1e9);
        // EAGAIN (already done), EINTR and ETIMEDOUT are all answered by the loop condition.
        syscall(SYS_futex, reinterpret_cast<const std::uint32_t*>(&state_), FUTEX_WAIT_PRIVATE, kWaitedFor,
                &ts, nullptr, 0);
    }
}

void Operation::publish() {
    if (state_.exchange(kDone, std::memory_order_release) != kWaitedFor) return;
    syscall(SYS_futex, reinterpret_cast<std::uint32_t*>(&state_), FUTEX_WAKE_PRIVATE, INT_MAX, nullptr,
            nullptr, 0);
}

void Operation::fail(int errno_value, std::int64_t at_offset, std::size_t at_length) {
    if (error != 0) return;
    error = errno_value;
    error_offset = at_offset;
    error_length = at_length;
}

}  // namespace swap_aio
