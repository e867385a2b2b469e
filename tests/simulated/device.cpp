#include "device.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <algorithm>
#include <cstring>

#include "faults.h"
#include "memory.h"

namespace simulated {
namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::Stream;

Event& event_of(void* event) { return *static_cast<Event*>(event); }
Stream stream_of(int id) { return Stream(Stream::UNSAFE, Device(SIM, DeviceIndex(device_of(id))), id); }
int index_of(Device device) { return device.index() < 0 ? current_device() : device.index(); }
int id_of(const Stream& stream) { return int(stream.id()); }

struct Guard final : c10::impl::DeviceGuardImplInterface {
    c10::DeviceType type() const override { return SIM; }
    Device exchangeDevice(Device device) const override {
        return Device(SIM, DeviceIndex(exchange_device(index_of(device))));
    }
    Device getDevice() const override { return Device(SIM, DeviceIndex(current_device())); }
    void setDevice(Device device) const override { exchange_device(index_of(device)); }
    void uncheckedSetDevice(Device device) const noexcept override { exchange_device(index_of(device)); }
    DeviceIndex deviceCount() const noexcept override { return DEVICES; }

    Stream getStream(Device device) const override { return stream_of(current_stream(index_of(device))); }
    Stream getDefaultStream(Device device) const override {
        return stream_of(default_stream(index_of(device)));
    }
    Stream getNewStream(Device device, int) const override {
        return stream_of(machine().make_stream(index_of(device)));
    }
    Stream getStreamFromGlobalPool(Device device, bool) const override { return getNewStream(device, 0); }
    Stream exchangeStream(Stream stream) const override { return stream_of(exchange_stream(id_of(stream))); }
    bool queryStream(const Stream& stream) const override {
        may_fail(WAITS, "query");
        return machine().idle(id_of(stream));
    }
    void synchronizeStream(const Stream& stream) const override {
        may_fail(WAITS, "synchronize");
        machine().synchronize(id_of(stream));
    }
    void synchronizeDevice(const DeviceIndex device) const override {
        may_fail(WAITS, "synchronize");
        machine().synchronize_device(device);
    }

    void record(void** event, const Stream& stream, const DeviceIndex, const c10::EventFlag) const override {
        may_fail(EVENTS, "record");
        if (!*event) *event = new Event;
        the_clock().spend(the_clock().costs().operator_s);
        machine().record(event_of(*event), id_of(stream));
    }
    void block(void* event, const Stream& stream) const override {
        may_fail(EVENTS, "wait");
        the_clock().spend(the_clock().costs().operator_s);
        if (event) machine().wait(event_of(event), id_of(stream));
    }
    bool queryEvent(void* event) const override {
        may_fail(WAITS, "query");
        return !event || machine().query(event_of(event));
    }
    void synchronizeEvent(void* event) const override {
        may_fail(WAITS, "synchronize");
        if (event) machine().synchronize(event_of(event));
    }
    void destroyEvent(void* event, const DeviceIndex) const noexcept override {
        delete static_cast<Event*>(event);
    }
    double elapsedTime(void*, void*, const DeviceIndex) const override {
        TORCH_CHECK(false, "sim: events have no time");
    }
    void recordDataPtrOnStream(const c10::DataPtr& data, const Stream& stream) const override {
        memory().used_by(data.get(), id_of(stream));
    }
};

struct Hooks final : at::PrivateUse1HooksInterface {
    bool isBuilt() const override { return true; }
    bool isAvailable() const override { return true; }
    bool hasPrimaryContext(DeviceIndex) const override { return true; }
    DeviceIndex deviceCount() const override { return DEVICES; }
    void setCurrentDevice(DeviceIndex device) const override { exchange_device(device); }
    DeviceIndex getCurrentDevice() const override { return DeviceIndex(current_device()); }
    DeviceIndex exchangeDevice(DeviceIndex device) const override {
        return DeviceIndex(exchange_device(device));
    }
    DeviceIndex maybeExchangeDevice(DeviceIndex device) const override {
        return DeviceIndex(device < 0 ? current_device() : exchange_device(device));
    }
    bool isPinnedPtr(const void* address) const override { return memory().pinned(address); }
    at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator(); }
    Device getDeviceFromPtr(void* address) const override {
        return Device(SIM, DeviceIndex(memory().device_of(address)));
    }
    const at::Generator& getDefaultGenerator(DeviceIndex) const override {
        static at::Generator unused = at::make_generator<at::CPUGeneratorImpl>();
        return unused;
    }
    void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
        c10::DataPtr bytes = device_allocator().allocate(size);
        if (size_t kept = the_clock().dry() ? 0 : std::min(size, storage.nbytes())) {
            char *to = memory().shadow(bytes.get()), *from = memory().shadow(storage.data());
            machine().push(current_stream(storage.device().index()), "resize",
                           [=] { memcpy(to, from, kept); }, {{to, kept, true}, {from, kept, false}});
        }
        storage.set_data_ptr_noswap(std::move(bytes));
        storage.unsafeGetStorageImpl()->set_nbytes(size);
    }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

}  // namespace

Generator& generator(int device) {
    static Generator generators[DEVICES];
    return generators[device];
}

void register_device() {
    static Hooks hooks;
    at::RegisterPrivateUse1HooksInterface(&hooks);
}

}  // namespace simulated
