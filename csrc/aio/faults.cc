#include "faults.h"

namespace swap_aio {

void FaultInjector::plan(const Fault& fault) {
    std::lock_guard<std::mutex> guard(mutex_);
    planned_.push_back({fault, 0});
    active_.store(true, std::memory_order_release);
}

void FaultInjector::clear() {
    std::lock_guard<std::mutex> guard(mutex_);
    planned_.clear();
    active_.store(false, std::memory_order_release);
}

Fault FaultInjector::judge(Kind kind) {
    if (!active_.load(std::memory_order_acquire)) return {};
    std::lock_guard<std::mutex> guard(mutex_);
    Fault verdict;
    for (auto& planned : planned_) {
        const bool matches = kind == Kind::kRead ? planned.fault.reads : planned.fault.writes;
        if (!matches) continue;
        ++planned.seen;
        const bool hit =
            planned.seen == planned.fault.nth || (planned.fault.forever && planned.seen > planned.fault.nth);
        if (hit && verdict.action == FaultAction::kNone) verdict = planned.fault;
    }
    return verdict;
}

}  // namespace swap_aio
