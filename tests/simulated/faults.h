// Errors of a device on demand: one call that fails, or a device that is lost from some call on.
#pragma once
#include <cstdint>

namespace simulated {

// What the host asks of a device. Freeing memory is not among it: that cannot fail.
enum Ask { WORK = 1, EVENTS = 2, WAITS = 4 };  // kernels and copies; record and wait for; the host waits

// Fails the `nth` call from now on (from 1; 0 for none) that is among `asks`, and with `lost` all that
// follow. Returns how many such calls there were since it was last set.
uint64_t fail_at(uint64_t nth, int asks, bool lost);

void may_fail(Ask ask, const char* what);  // raises c10::AcceleratorError where it is its turn

}  // namespace simulated
