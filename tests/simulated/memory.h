// Memory of the simulated devices, which the host cannot touch, and page-locked memory of the host.
#pragma once
#include <c10/core/Allocator.h>

#include <map>
#include <vector>

#include "streams.h"

namespace simulated {

constexpr auto SIM = c10::DeviceType::PrivateUse1;
constexpr size_t RANGE = size_t(1) << 40;  // addresses of one device; memory comes when it is touched
constexpr size_t MOST = size_t(32) << 30;  // bytes of a device of which nothing else is said

// The device and the streams that calls of this thread go to.
int current_device();
int exchange_device(int device);
int current_stream(int device);
int exchange_stream(int stream);

struct Usage {
    size_t used = 0, peak = 0, limit = MOST;
};

class Memory {
  public:
    Memory();

    bool on_device(const void* address) const;
    int device_of(const void* address) const;
    // Kernels work on a shadow of device memory, at a constant distance from the addresses that the host
    // sees.
    char* shadow(const void* address) const;

    char* take(int device, int stream, size_t size);
    void free(char* address);
    void used_by(const void* address, int stream);  // torch's record_stream
    void empty_cache(int device);                   // gives back what nobody has: who still uses it, dies
    Usage& usage(int device) { return devices_[device].usage; }

    char* take_pinned(size_t size);
    void free_pinned(char* address);
    void lock(char* address, size_t size);  // as cudaHostRegister
    void unlock(char* address);
    bool pinned(const void* address) const;
    // Whether one call has locked all of it, or none any of it: CUDA copies nothing else.
    bool of_a_piece(const void* address, size_t size) const;
    // Memory of take_pinned() that a queued copy uses is freed behind the copy; nullptr for all other memory.
    char* hold(const void* address);
    void release(char* held);

  private:
    struct Block {
        size_t size;
        int device, stream;
        std::vector<int> others;  // streams that use it as well
        bool dry = false;         // nobody touches it, then or later
    };
    struct Device {
        Usage usage;
        size_t end = 0;  // of the addresses that were ever handed out
        // By stream, dry or not, and size. What was freed last is taken first: most of what used it is still
        // queued.
        std::map<std::pair<int, bool>, std::map<size_t, std::vector<char*>>> free;
    };
    struct Pinned {
        size_t size;
        bool owned;
        int copies = 0;
        bool dropped = false;
    };
    void give_back(char* address);
    std::map<char*, Pinned>::const_iterator find_pinned(const void* address) const;

    char* open_;
    char* shadow_;
    Device devices_[DEVICES];
    std::map<char*, Block> blocks_;
    std::map<char*, Pinned> pinned_;
};

// Addresses of host memory that nobody may touch.
char* reserve(size_t size);
void give_back(char* address, size_t size);

Memory& memory();
c10::Allocator& device_allocator();
c10::Allocator& pinned_allocator();

}  // namespace simulated
