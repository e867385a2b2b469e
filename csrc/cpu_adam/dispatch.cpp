#include "dispatch.h"

#include <atomic>
#include <cstdlib>
#include <stdexcept>

#include "../x86_features.h"

namespace offload::cpu_adam {
namespace {

constexpr const char* kVariable = "OFFLOAD_CPU_ADAM_ISA";

const std::vector<Path>& paths() {
    static const std::vector<Path> kPaths = [] {
        std::vector<Path> found;
#if defined(OFFLOAD_HAVE_AVX512)
        if (x86_features().avx512) {
            found.push_back({"avx512", &avx512_kernels()});
        }
#endif
#if defined(OFFLOAD_HAVE_AVX2)
        if (x86_features().avx2) {
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
