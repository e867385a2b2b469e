// What the tests see of it; tests/simulated/__init__.py is the face.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "cost.h"
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

// A kernel that Python calls with addresses of the shadow; nobody knows in which thread it runs.
std::function<void()> kernel_of(py::function call) {
    auto held = std::shared_ptr<py::function>(new py::function(std::move(call)), [](py::function* own) {
        py::gil_scoped_acquire acquired;
        delete own;
    });
    return [held] {
        py::gil_scoped_acquire acquired;
        (*held)();
    };
}

using Ranges = std::vector<std::tuple<uint64_t, size_t, bool>>;

// Gives a kernel to the stream that is current on `device`.
void launch(int device, const std::string& name, py::function call, const Ranges& ranges, uint64_t bytes) {
    std::function<void()> run = kernel_of(std::move(call));
    py::gil_scoped_release released;
    the_clock().spend(the_clock().costs().operator_s);
    std::vector<Span> spans;
    for (const auto& [begin, size, write] : ranges)
        spans.push_back({memory().shadow(address(begin)), size, write});
    int stream = current_stream(device);
    machine().count(stream, "kernels");
    machine().push(stream, name, std::move(run), spans, copy_on_device(bytes));
}

void add_clock(py::module_& m) {
    py::class_<Costs>(m, "Costs")
        .def(py::init<>())
        .def_readwrite("flops_16", &Costs::flops_16)
        .def_readwrite("flops_32", &Costs::flops_32)
        .def_readwrite("device_bytes", &Costs::device_bytes)
        .def_readwrite("h2d_bytes", &Costs::h2d_bytes)
        .def_readwrite("d2h_bytes", &Costs::d2h_bytes)
        .def_readwrite("kernel_s", &Costs::kernel_s)
        .def_readwrite("copy_s", &Costs::copy_s)
        .def_readwrite("launch_s", &Costs::launch_s)
        .def_readwrite("operator_s", &Costs::operator_s);
    m.def("start_clock", [](const Costs& costs, bool dry) { the_clock().start(costs, dry); });
    m.def("stop_clock", [] { the_clock().stop(); });
    m.def("now", [] { return the_clock().now(); });
    m.def("spend", [](double seconds, const std::string& what) {
        the_clock().spend(seconds, what.empty() ? nullptr : what.c_str());
    });
    m.def("wait_until", [](double time, const std::string& what) { the_clock().wait_until(time, what); });
    m.def("sleep", [](double until, const std::string& what) { return the_clock().sleep(until, what); });
    m.def("wake", [](int actor) { the_clock().wake(actor); });
    m.def("acting", [] { return the_clock().acting(); });
    m.def("add_actor", [](const std::string& name) { return the_clock().add_actor(name); });
    m.def("enter", [](int actor) { return the_clock().enter(actor); });
    m.def("leave", [] { the_clock().leave(); });
    m.def("is_dry", [] { return the_clock().dry(); });
    m.def("note", [](const std::string& lane, const std::string& name, uint64_t bytes, double begin,
                     double end) { the_clock().note(lane, name, bytes, begin, end); });
    m.def("records", [](bool keep) {
        std::vector<std::tuple<std::string, std::string, uint64_t, double, double>> all;
        for (Record& r : the_clock().records(keep)) all.emplace_back(r.lane, r.name, r.bytes, r.begin, r.end);
        return all;
    });
    m.def("waits", [](bool reset) { return the_clock().waits(reset); });
    m.def("idle", [](bool reset) { return machine().idle(reset); });
    m.def("end_of", [](int stream) { return machine().end_of(stream); });
    m.def("copying", [](double from, double to) {
        const Timeline* lanes = the_clock().lanes;
        return busy_alone_and_both(lanes[int(Lane::h2d)], lanes[int(Lane::d2h)], from, to);
    });
    m.def("reserve", [](size_t size) { return reinterpret_cast<uint64_t>(reserve(size)); });
    m.def("give_back", [](uint64_t at, size_t size) { give_back(address(at), size); });
}

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
    m.def("empty_cache", [](int device) {
        Quiet quiet;
        memory().empty_cache(device);
    });
    m.def("set_limit", [](int device, size_t size) {
        Quiet quiet;
        memory().usage(device).limit = std::min(size, RANGE);
    });
    add_clock(m);
    m.def("launch", &launch);
    m.def("shadow", [](uint64_t at) { return reinterpret_cast<uint64_t>(memory().shadow(address(at))); });
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
