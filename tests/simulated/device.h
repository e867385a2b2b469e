// What torch asks of a device: guards, streams, events, generators.
#pragma once
#include <cstdint>

namespace simulated {

// Random operators take seed and count when they are given to a stream, as Philox offsets are: when they run
// does not matter.
struct Generator {
    uint64_t seed = 0, count = 0;
};
Generator& generator(int device);

void register_device();

}  // namespace simulated
