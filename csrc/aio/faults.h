// Faults on demand, shared by all engines, so that tests need neither root nor a broken disk.
//
// Owns: the list of planned faults and the counting of I/Os against it.
// Must not know: how an engine carries out a verdict.
// Next: uring_engine.cc and thread_engine.cc ask judge() once per request they are about to issue.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <vector>

#include "operation.h"

namespace swap_aio {

enum class FaultAction : std::uint8_t {
    kNone,
    kFail,   // the request is not issued; its result is -errno_value
    kShort,  // the request is issued; at most short_bytes of its result are reported
    kHang,   // the request is not issued and never completes
    kDelay,  // the request is issued delay_s later
    kLie,    // the result claims success: the first byte of a read is inverted, a write is not carried out
};

struct Fault {
    FaultAction action = FaultAction::kNone;
    std::uint64_t nth = 1;  // counts requests that match, from 1, since the fault was planned
    bool forever = false;   // every request from the nth on, not only the nth
    bool reads = true;
    bool writes = true;
    int errno_value = 0;
    std::size_t short_bytes = 0;
    double delay_s = 0;
};

class FaultInjector {
  public:
    void plan(const Fault& fault);
    void clear();

    /// The fault that hits the next request of this kind; action kNone is the usual answer.
    Fault judge(Kind kind);

  private:
    struct Planned {
        Fault fault;
        std::uint64_t seen = 0;
    };

    std::atomic<bool> active_{false};
    std::mutex mutex_;
    std::vector<Planned> planned_;
};

}  // namespace swap_aio
