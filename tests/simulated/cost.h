// What an operator takes of the device: operations or bytes, whichever takes longer.
#pragma once
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include "clock.h"

namespace simulated {

// `results` may be on the meta device.
Work work_of(const c10::FunctionSchema& schema, const torch::jit::Stack& arguments,
             const torch::jit::Stack& results);
Work copy_on_device(uint64_t bytes);  // read and written together
Work copy_with_host(Lane lane, uint64_t bytes);

}  // namespace simulated
