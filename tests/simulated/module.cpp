// What the tests see of it; tests/simulated/__init__.py is the face.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "device.h"
#include "dispatch.h"
#include "faults.h"
#include "memory.h"

namespace py = pybind11;
using namespace simulated;

namespace {

// Python's lock goes before the machine's is taken.
struct Quiet {
    py::gil_scoped_release released;
    Lock lock{machine().mutex};
};

char* address(uint64_t number) { return reinterpret_cast<char*>(number); }

}  // namespace

PYBIND11_MODULE(_simulated, m) {
    register_device();
    take_cpu_kernels();
    m.attr("DEVICES") = DEVICES;
    m.attr("STREAMS") = STREAMS;
    m.def("begin", [](bool eager, std::vector<int> first, bool random, uint64_t seed) {
        Quiet quiet;
        machine().begin({eager, std::move(first), random, seed});
    });
    m.def("check", [](bool on) {
        Quiet quiet;
        machine().checker.start(on);
    });
    m.def("races", [] {
        Quiet quiet;
        return machine().checker.races();
    });
    m.def("trace", [](bool on) {
        Quiet quiet;
        return machine().trace(on);
    });
    m.def("counts", [](bool reset) {
        Quiet quiet;
        return machine().counts(reset);
    });
    m.def("pending", [] {
        Quiet quiet;
        return machine().pending();
    });
    m.def("lock", [](uint64_t at, size_t size) {
        Quiet quiet;
        memory().lock(address(at), size);
    });
    m.def("unlock", [](uint64_t at) {
        Quiet quiet;
        memory().unlock(address(at));
    });
    m.def("usage", [](int device) {
        Quiet quiet;
        Usage usage = memory().usage(device);
        return std::make_tuple(usage.used, usage.peak, usage.limit);
    });
    m.def("set_limit", [](int device, size_t size) {
        Quiet quiet;
        memory().usage(device).limit = std::min(size, RANGE);
    });
    m.def("reset_peak", [](int device) {
        Quiet quiet;
        memory().usage(device).peak = memory().usage(device).used;
    });
    m.def("fail_at", [](uint64_t nth, int asks, bool lost) {
        py::gil_scoped_release released;
        return fail_at(nth, asks, lost);
    });
    m.def("random_state", [](int device) {
        Quiet quiet;
        return std::make_tuple(generator(device).seed, generator(device).count);
    });
    m.def("set_random_state", [](int device, uint64_t seed, uint64_t count) {
        Quiet quiet;
        generator(device) = {seed, count};
    });
    m.def("current_device", [] { return current_device(); });
    m.def("exchange_device", [](int device) { return exchange_device(device); });
}
