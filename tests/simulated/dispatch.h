// Operators on tensors of the simulated device: their shapes are found at once, their kernels are queued.
#pragma once

namespace simulated {

// Lets the device use the CPU's kernel where torch has a composite one beside it, so that both compute the
// same bits.
void take_cpu_kernels();

}  // namespace simulated
