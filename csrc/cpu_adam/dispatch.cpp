#include "dispatch.h"

#include <atomic>
#include <cstdlib>
#include <stdexcept>

#if defined(OFFLOAD_HAVE_AVX2) || defined(OFFLOAD_HAVE_AVX512)
#include <cpuid.h>
#endif

namespace offload::cpu_adam {
namespace {

constexpr const char* kVariable = "OFFLOAD_CPU_ADAM_ISA";

#if defined(OFFLOAD_HAVE_AVX2) || defined(OFFLOAD_HAVE_AVX512)
bool has_avx2() {  // __builtin_cpu_supports also asks whether the operating system saves the wide registers
    unsigned a = 0, b = 0, c = 0, d = 0;
    const bool f16c = __get_cpuid(1, &a, &b, &c, &d) != 0 && (c >> 29 & 1u) != 0;
    return f16c && __builtin_cpu_supports("avx2") != 0 && __builtin_cpu_supports("fma") != 0;
}
#endif
#if defined(OFFLOAD_HAVE_AVX512)
bool has_avx512() {
    return has_avx2() && __builtin_cpu_supports("avx512f") != 0 && __builtin_cpu_supports("avx512bw") != 0 &&
           __builtin_cpu_supports("avx512dq") != 0 && __builtin_cpu_supports("avx512vl") != 0;
}
#endif

const std::vector<Path>& paths() {
    static const std::vector<Path> kPaths = [] {
        std::vector<Path> found;
#if defined(OFFLOAD_HAVE_AVX512)
        if (has_avx512()) {
            found.push_back({"avx512", &avx512_kernels()});
        }
#endif
#if defined(OFFLOAD_HAVE_AVX2)
        if (has_avx2()) {
            found.push_back({"avx2", &avx2_kernels()});
        }
#endif
#if defined(OFFLOAD_HAVE_NEON)
        found.push_back({"neon", &neon_kernels()});  // every AArch64 processor has it
#endif
        found.push_back({"scalar", &scalar_kernels()});
        return found;
    }();
    return kPaths;
}

const Path& find(const std::string& name, const char* subject) {
    std::string choices;
    for (const Path& path : paths()) {
        if (name == path.name) {
            return path;
        }
        choices += choices.empty() ? "" : ", ";
        choices += path.name;
    }
    throw std::invalid_argument(std::string(subject) + ": expected one of " + choices +
                                " on this machine but got '" + name +
                                "'; choose one of these or leave it unset");
}

const Path& automatic() {
    const char* wanted = std::getenv(kVariable);
    return wanted == nullptr || *wanted == '\0' ? paths().front() : find(wanted, kVariable);
}

std::atomic<const Path*> g_active{nullptr};

}  // namespace

std::vector<std::string> available_isas() {
    std::vector<std::string> names;
    for (const Path& path : paths()) {
        names.emplace_back(path.name);
    }
    return names;
}

const Path& active_path() {
    const Path* path = g_active.load(std::memory_order_acquire);
    if (path == nullptr) {
        path = &automatic();
        g_active.store(path, std::memory_order_release);
    }
    return *path;
}

void force_isa(const std::string& name) {
    g_active.store(name.empty() ? &automatic() : &find(name, "isa"), std::memory_order_release);
}

}  // namespace offload::cpu_adam
