#include "checker.h"

#include <algorithm>

namespace simulated {
namespace {
constexpr int PAGE_BITS = 16;        // accesses are kept by 64 KiB of addresses
constexpr size_t MOST_RACES = 1000;  // a missing wait is found by every step
}  // namespace

void join(Before& into, const Before& other) {
    if (into.size() < other.size()) into.resize(other.size());
    for (size_t i = 0; i < other.size(); ++i) into[i] = std::max(into[i], other[i]);
}

uint64_t at(const Before& clock, int stream) { return clock.size() > size_t(stream) ? clock[stream] : 0; }

void Checker::start(bool on) {
    on_ = on;
    pages_.clear();
    races_.clear();
}

void Checker::report(const std::string& text) {
    bool again = !races_.empty() && races_.back() == text;  // on the next page of the same bytes
    if (!again && races_.size() < MOST_RACES) races_.push_back(text);
}

void Checker::access(int stream, const std::string& name, const Before& now, const std::vector<Span>& spans) {
    if (!on_) return;
    for (const Span& span : spans) {
        if (!span.size) continue;
        size_t begin = size_t(span.begin), end = begin + span.size;
        for (size_t page = begin >> PAGE_BITS; page <= (end - 1) >> PAGE_BITS; ++page) {
            std::vector<Access> kept;
            for (Access& other : pages_[page]) {
                bool ordered = other.stream == stream || at(now, other.stream) >= other.time;
                bool overlaps = other.begin < end && begin < other.end;
                if (overlaps && !ordered && (other.write || span.write))
                    report(name + (span.write ? " writes" : " reads") + " on " + stream_name(stream) +
                           " what " + other.name + (other.write ? " writes" : " reads") + " on " +
                           stream_name(other.stream));
                // Who is ordered behind this access is ordered behind what it covers.
                bool covered = other.begin >= begin && other.end <= end && ordered;
                if (!covered || (other.write && !span.write)) kept.push_back(std::move(other));
            }
            kept.push_back({begin, end, stream, at(now, stream), span.write, name});
            pages_[page].swap(kept);
        }
    }
}

void Checker::leave(char* from, size_t size, const Before& host, const std::string& verb) {
    if (!on_ || !size) return;
    size_t begin = size_t(from), end = begin + size;
    auto last = pages_.upper_bound((end - 1) >> PAGE_BITS);
    for (auto page = pages_.lower_bound(begin >> PAGE_BITS); page != last; ++page) {
        auto& list = page->second;
        for (const Access& other : list)
            if (other.begin < end && begin < other.end && at(host, other.stream) < other.time)
                report("the host " + verb + " what " + other.name + (other.write ? " writes" : " reads") +
                       " on " + stream_name(other.stream));
        list.erase(std::remove_if(list.begin(), list.end(),
                                  [&](const Access& a) { return a.begin >= begin && a.end <= end; }),
                   list.end());
    }
}

}  // namespace simulated
