// Chooses the instruction-set path: the widest that the processor and the operating system support, or the
// one that the environment variable OFFLOAD_CPU_ADAM_ISA or force_isa() names.
#pragma once

#include <string>
#include <vector>

#include "kernels.h"

namespace offload::cpu_adam {

struct Path {
    const char* name;
    const Kernels* kernels;
};

std::vector<std::string> available_isas();  // widest first; "scalar" is always there
// Reads the environment variable at the first call of the process. Throws std::invalid_argument naming the
// choices.
const Path& active_path();
// An empty name goes back to the automatic choice. Throws std::invalid_argument naming the choices.
void force_isa(const std::string& name);

}  // namespace offload::cpu_adam
