#include "operation.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <climits>

namespace swap_aio {

double monotonic_s() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

Operation::Operation(Kind kind_, int fd_, std::int64_t offset_, char* address_, std::size_t length_,
                     bool urgent_)
    : kind(kind_),
      urgent(urgent_),
      fd(fd_),
      offset(offset_),
      address(address_),
      length(length_),
      submitted_s(monotonic_s()) {}

bool Operation::wait(double timeout_s) const {
    const double deadline_s = monotonic_s() + timeout_s;
    while (!done()) {
        const double left_s = std::min(deadline_s - monotonic_s(), 1e6);
        if (left_s <= 0) return done();
        timespec ts{};
        ts.tv_sec = static_cast<time_t>(left_s);
        ts.tv_nsec = static_cast<long>((left_s - static_cast<double>(ts.tv_sec)) * 1e9);
        // EAGAIN (already done), EINTR and ETIMEDOUT are all answered by the loop condition.
        syscall(SYS_futex, reinterpret_cast<const std::uint32_t*>(&state_), FUTEX_WAIT_PRIVATE, 0, &ts,
                nullptr, 0);
    }
    return true;
}

void Operation::publish() {
    state_.store(1, std::memory_order_release);
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
