#include "memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>

namespace simulated {
namespace {

constexpr int POISON = 0xFF;  // NaN in every floating dtype, -1 in every integer one
constexpr size_t BLOCK = 512;
constexpr size_t PAGE = 4096;

thread_local int device_now = 0;
thread_local std::map<int, int> streams_now;

size_t round_up(size_t size, size_t to) { return (size + to - 1) / to * to; }

void* map_addresses(int access) {
    void* at = mmap(nullptr, RANGE * DEVICES, access, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    TORCH_CHECK(at != MAP_FAILED, "sim: no address space for ", RANGE * DEVICES, " bytes");
    return at;
}

}  // namespace

int current_device() { return device_now; }
int exchange_device(int device) { return std::exchange(device_now, device); }
int current_stream(int device) {
    auto found = streams_now.find(device);
    return found == streams_now.end() ? default_stream(device) : found->second;
}
int exchange_stream(int stream) {
    int device = simulated::device_of(stream), before = current_stream(device);
    streams_now[device] = stream;
    return before;
}

char* reserve(size_t size) {
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    void* at = mmap(nullptr, size, PROT_NONE, flags, -1, 0);
    TORCH_CHECK(at != MAP_FAILED, "sim: no address space for ", size, " bytes");
    return static_cast<char*>(at);
}

void give_back(char* address, size_t size) { munmap(address, size); }

Memory& memory() {
    static auto* one = new Memory;
    return *one;
}

Memory::Memory()
    : open_(static_cast<char*>(map_addresses(PROT_NONE))),
      shadow_(static_cast<char*>(map_addresses(PROT_READ | PROT_WRITE))) {}

bool Memory::on_device(const void* address) const {
    auto* at = static_cast<const char*>(address);
    return at >= open_ && at < open_ + RANGE * DEVICES;
}

int Memory::device_of(const void* address) const {
    return int((static_cast<const char*>(address) - open_) / RANGE);
}

char* Memory::shadow(const void* address) const {
    TORCH_CHECK(on_device(address), "sim: ", address, " is no address of a device");
    return shadow_ + (static_cast<const char*>(address) - open_);
}

char* Memory::take(int device, int stream, size_t size) {
    Lock lock(machine().mutex);
    Device& own = devices_[device];
    size = round_up(size, BLOCK);
    if (own.usage.used + size > own.usage.limit)
        TORCH_CHECK_WITH(OutOfMemoryError, false, "sim:", device, " is out of memory: ", size,
                         " bytes were wanted, ", own.usage.used, " of ", own.usage.limit, " are in use");
    char* at;
    bool dry = the_clock().dry();
    auto& free = own.free[{stream, dry}];
    if (auto fitting = free.lower_bound(size); fitting != free.end() && fitting->first <= size + size / 4) {
        size = fitting->first;
        at = fitting->second.back();
        fitting->second.pop_back();
        if (fitting->second.empty()) free.erase(fitting);
    } else {
        TORCH_CHECK(own.end + size <= RANGE, "sim:", device, ": no addresses are left");
        at = open_ + RANGE * device + own.end;
        own.end += size;
        char* inside = shadow(at);
        machine().push(stream, "new", [=] { memset(inside, POISON, size); }, {{inside, size, true}});
    }
    own.usage.used += size;
    own.usage.peak = std::max(own.usage.peak, own.usage.used);
    blocks_[at] = {size, device, stream, {}, dry};
    return at;
}

void Memory::free(char* address) {
    Lock lock(machine().mutex);
    Block block = std::move(blocks_.at(address));
    blocks_.erase(address);
    devices_[block.device].usage.used -= block.size;
    devices_[block.device].free[{block.stream, block.dry}][block.size].push_back(address);
    for (int other : block.others) machine().follow(block.stream, other);
    if (block.dry) return;
    // An operation of the stream that had it: who still reads it there is in time, other streams are not.
    char* inside = shadow(address);
    size_t size = block.size;
    machine().push(block.stream, "free", [=] { memset(inside, POISON, size); }, {{inside, size, true}});
}

void Memory::used_by(const void* address, int stream) {
    Lock lock(machine().mutex);
    auto found = blocks_.find(static_cast<char*>(const_cast<void*>(address)));
    if (found != blocks_.end() && found->second.stream != stream) found->second.others.push_back(stream);
}

void Memory::empty_cache(int device) {
    machine().synchronize_device(device);
    Lock lock(machine().mutex);
    for (auto& [of, blocks] : devices_[device].free)
        for (auto& [size, addresses] : blocks)
            for (char* at : addresses) {
                char* begin = shadow(at);
                char* first = begin + (PAGE - reinterpret_cast<uintptr_t>(begin) % PAGE) % PAGE;
                char* last = begin + size - reinterpret_cast<uintptr_t>(begin + size) % PAGE;
                if (first >= last) continue;
                TORCH_CHECK(!mprotect(first, last - first, PROT_NONE), "sim: memory is not given back");
                madvise(first, last - first, MADV_DONTNEED);
            }
    devices_[device].free.clear();
}

// ---- page-locked memory
// ------------------------------------------------------------------------------------

char* Memory::take_pinned(size_t size) {
    Lock lock(machine().mutex);
    size = std::max<size_t>(size, 1);
    auto* at = static_cast<char*>(std::aligned_alloc(PAGE, round_up(size, PAGE)));
    TORCH_CHECK(at, "sim: no host memory for ", size, " bytes");
    pinned_[at] = {size, true};
    return at;
}

void Memory::free_pinned(char* address) {
    Lock lock(machine().mutex);
    Pinned& block = pinned_.at(address);
    block.dropped = true;
    if (!block.copies) give_back(address);
}

void Memory::give_back(char* address) {
    machine().checker.leave(address, pinned_.at(address).size, Before(DEVICES * STREAMS, UINT64_MAX),
                            "frees");
    pinned_.erase(address);
    std::free(address);
}

void Memory::lock(char* address, size_t size) {
    Lock lock(machine().mutex);
    auto next = pinned_.upper_bound(address + size - 1);
    bool free = next == pinned_.begin() || std::prev(next)->first + std::prev(next)->second.size <= address;
    TORCH_CHECK(free, "sim: part of ", size, " bytes of host memory is page-locked already");
    pinned_[address] = {size, false};
}

void Memory::unlock(char* address) {
    Lock lock(machine().mutex);
    auto found = pinned_.find(address);
    TORCH_CHECK(found != pinned_.end() && !found->second.owned, "sim: this host memory is not page-locked");
    machine().leave(address, found->second.size, "unlocks");
    pinned_.erase(found);
}

std::map<char*, Memory::Pinned>::const_iterator Memory::find_pinned(const void* address) const {
    auto* at = static_cast<char*>(const_cast<void*>(address));
    auto found = pinned_.upper_bound(at);
    if (found == pinned_.begin() || (--found, at >= found->first + found->second.size)) return pinned_.end();
    return found;
}

bool Memory::pinned(const void* address) const {
    Lock lock(machine().mutex);
    return find_pinned(address) != pinned_.end();
}

bool Memory::of_a_piece(const void* address, size_t size) const {
    Lock lock(machine().mutex);
    auto* begin = static_cast<char*>(const_cast<void*>(address));
    auto last = pinned_.upper_bound(begin + size - 1);  // behind the last one that begins inside, or before
    if (size == 0 || last == pinned_.begin()) return true;
    const auto& [at, block] = *--last;
    return at + block.size <= begin || (at <= begin && begin + size <= at + block.size);
}

char* Memory::hold(const void* address) {
    Lock lock(machine().mutex);
    auto found = find_pinned(address);
    if (found == pinned_.end() || !found->second.owned) return nullptr;
    pinned_.at(found->first).copies++;
    return found->first;
}

void Memory::release(char* held) {
    if (!held) return;
    Lock lock(machine().mutex);
    Pinned& block = pinned_.at(held);
    if (!--block.copies && block.dropped) give_back(held);
}

// ---- torch's allocators
// ------------------------------------------------------------------------------------

namespace {

void drop_device(void* address) {
    if (address) memory().free(static_cast<char*>(address));
}
void drop_pinned(void* address) { memory().free_pinned(static_cast<char*>(address)); }

struct DeviceAllocator final : c10::Allocator {
    c10::DataPtr allocate(size_t size) override {
        int device = current_device();
        void* at = size ? memory().take(device, current_stream(device), size) : nullptr;
        return {at, at, &drop_device, c10::Device(SIM, c10::DeviceIndex(device))};
    }
    c10::DeleterFnPtr raw_deleter() const override { return &drop_device; }
    void copy_data(void*, const void*, size_t) const override {
        TORCH_CHECK(false, "sim: a copy without a stream was asked for");
    }
};

struct PinnedAllocator final : c10::Allocator {
    c10::DataPtr allocate(size_t size) override {
        void* at = memory().take_pinned(size);
        return {at, at, &drop_pinned, c10::Device(c10::DeviceType::CPU)};
    }
    c10::DeleterFnPtr raw_deleter() const override { return &drop_pinned; }
    void copy_data(void* to, const void* from, size_t size) const override { memcpy(to, from, size); }
};

DeviceAllocator the_device_allocator;
PinnedAllocator the_pinned_allocator;
REGISTER_ALLOCATOR(SIM, &the_device_allocator);

}  // namespace

c10::Allocator& device_allocator() { return the_device_allocator; }
c10::Allocator& pinned_allocator() { return the_pinned_allocator; }

}  // namespace simulated
