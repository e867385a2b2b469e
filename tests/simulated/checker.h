// Happens-before over byte ranges: finds two accesses that nothing orders, also in runs where they came out
// right.
#pragma once
#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace simulated {

// What one stream knows of the others: entry s is the number of operations of stream s that have happened
// before.
using Before = std::vector<uint64_t>;
void join(Before& into, const Before& other);
uint64_t at(const Before& clock, int stream);

// Bytes that an operation reads or writes. Device memory is named by its shadow's address.
struct Span {
    char* begin;
    size_t size;
    bool write;
};

class Checker {
  public:
    void start(bool on);
    bool on() const { return on_; }
    // Operation `name`, number `now[stream]` of its stream, accesses `spans`; `now` is what happened before
    // it.
    void access(int stream, const std::string& name, const Before& now, const std::vector<Span>& spans);
    // The host gives memory away: what is queued on it and was not waited for is a race, the rest is
    // forgotten.
    void leave(char* begin, size_t size, const Before& host, const std::string& verb);
    const std::vector<std::string>& races() const { return races_; }

  private:
    struct Access {
        size_t begin, end;
        int stream;
        uint64_t time;
        bool write;
        std::string name;
    };
    void report(const std::string& text);

    bool on_ = false;
    std::map<size_t, std::vector<Access>> pages_;
    std::vector<std::string> races_;
};

std::string stream_name(int stream);

}  // namespace simulated
