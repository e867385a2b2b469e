#include "faults.h"

#include <c10/util/Exception.h>

#include <string>

#include "streams.h"

namespace simulated {
namespace {

constexpr int ERROR_CODE = 719;  // of CUDA's "unspecified launch failure", after which a device is lost

struct Fault {
    uint64_t nth = 0, seen = 0;
    int asks = 0;
    bool lost = false;
};
Fault fault;

}  // namespace

uint64_t fail_at(uint64_t nth, int asks, bool lost) {
    Lock lock(machine().mutex);
    uint64_t seen = fault.seen;
    fault = {nth, 0, asks, lost};
    return seen;
}

void may_fail(Ask ask, const char* what) {
    Lock lock(machine().mutex);
    if (!(fault.asks & ask)) return;
    ++fault.seen;
    if (!fault.nth || (fault.lost ? fault.seen < fault.nth : fault.seen != fault.nth)) return;
    if (fault.lost) machine().lose();
    throw c10::AcceleratorError(
        {__func__, __FILE__, uint32_t(__LINE__)}, ERROR_CODE,
        std::string("sim: ") + (fault.lost ? "the device is lost (" : "injected error (") + what + ")");
}

}  // namespace simulated
