// How every kernel walks its arrays: whole groups in place, the rest in a padded copy on the stack, so that
// there is one arithmetic, not two. Included inside the anonymous namespace of a kernels_<isa>.cpp, after its
// Vec.

#if defined(OFFLOAD_ON_CUDA)
constexpr std::size_t kGroup = 2;      // elements: a thread's, so that neighbours work on neighbouring memory
constexpr std::size_t kCopyAlign = 8;  // bytes: the copies of all threads take memory of the device
#else
constexpr std::size_t kGroup = 64;  // elements: a whole number of 64-byte lines in every stream
constexpr std::size_t kCopyAlign = 64;
#endif
constexpr std::size_t kAhead = 512;  // elements between a group and what is prefetched for it

enum class Access { kRead, kUpdate, kWrite };  // what is only written is not prefetched

// One array of a kernel; kSpan consecutive elements of the range share an entry of type T.
template <typename T, Access A, std::size_t kSpan = 1>
struct Array {
    using Entry = T;
    static constexpr Access kAccess = A;
    T* base;

    T* at(std::size_t i) const { return base + i / kSpan; }
    static constexpr std::size_t entries(std::size_t elements) { return (elements + kSpan - 1) / kSpan; }
    template <std::size_t kSize>
    void prefetch(std::size_t i) const {
        if constexpr (A != Access::kWrite) {
            const char* line = reinterpret_cast<const char*>(at(i));
            for (std::size_t offset = 0; offset < entries(kSize) * sizeof(T); offset += 64) {
                __builtin_prefetch(line + offset, 0, 3);
            }
        }
    }
};
template <typename T>
using Input = Array<const T, Access::kRead>;
template <typename T>
using InOut = Array<T, Access::kUpdate>;
template <typename T>
using Output = Array<T, Access::kWrite>;

// An array that this kernel does without: its group gets a null pointer.
template <typename T>
struct Absent {
    T* at(std::size_t) const { return nullptr; }
    template <std::size_t kSize>
    void prefetch(std::size_t) const {}
};

// p + k, or null where the array is absent.
template <bool kPresent, typename T>
inline T* advance(T* p, std::size_t k) {
    return kPresent ? p + k : nullptr;
}

// n < kSize elements of an array, padded with zeros.
template <std::size_t kSize, typename A>
struct Staged {
    using Entry = std::remove_const_t<typename A::Entry>;
    alignas(kCopyAlign) Entry data[A::entries(kSize)] = {};
    typename A::Entry* home;
    std::size_t size_bytes;
    Staged(const A& array, std::size_t i, std::size_t n)
        : home(array.at(i)), size_bytes(A::entries(n) * sizeof(Entry)) {
        if constexpr (A::kAccess != Access::kWrite) {
            __builtin_memcpy(data, home, size_bytes);
        }
    }
    void write_back() const {
        if constexpr (A::kAccess != Access::kRead) {
            __builtin_memcpy(home, data, size_bytes);
        }
    }
};
template <std::size_t kSize, typename T>
struct Staged<kSize, Absent<T>> {
    static constexpr T* data = nullptr;
    Staged(const Absent<T>&, std::size_t, std::size_t) {}
    void write_back() const {}
};

template <typename Operation, typename... Stages>
inline void run_staged(std::size_t i, const Operation& operation, Stages&&... staged) {
    operation(i, staged.data...);
    (staged.write_back(), ...);
}

// operation(i, pointers...) on elements i to i + n, 0 < n < kSize, through copies.
template <std::size_t kSize, typename Operation, typename... Arrays>
inline void for_partial(std::size_t i, std::size_t n, const Operation& operation, const Arrays&... arrays) {
    run_staged(i, operation, Staged<kSize, Arrays>(arrays, i, n)...);
}

// operation(i, pointers...) for every kSize elements of [begin, end).
template <std::size_t kSize, std::size_t kDistance = kAhead, typename Operation, typename... Arrays>
inline void for_groups(std::size_t begin, std::size_t end, const Operation& operation,
                       const Arrays&... arrays) {
    std::size_t i = begin;
    for (; end - i >= kSize; i += kSize) {
        (arrays.template prefetch<kSize>(i + kDistance), ...);
        operation(i, arrays.at(i)...);
    }
    if (i != end) {
        for_partial<kSize>(i, end - i, operation, arrays...);
    }
}
