// What Python sees: one thin layer.  Checks arguments, releases the GIL, refuses to touch an engine after a
// fork.
//
// Owns: the life of an engine under Python's rules (destructors that must neither hang nor throw).
// Must not know: anything about stores, keys, alignment rules; swap/io/aio.py gives types and error texts.
#include <pybind11/pybind11.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#include "crc32c.h"
#include "engine.h"
#include "files.h"

namespace py = pybind11;

namespace {

using swap_aio::Counters;
using swap_aio::Engine;
using swap_aio::Fault;
using swap_aio::FaultAction;
using swap_aio::Job;
using swap_aio::Kind;
using swap_aio::OperationPtr;
using swap_aio::Settings;

constexpr double kSignalCheckS = 0.1;     // Ctrl-C is noticed this often during a wait
constexpr double kStoppedS = 0.5;         // a part of a wait took so much longer than asked: we were stopped
constexpr double kGraceS = 1.0;           // after that no deadline is over, for the I/O threads to catch up
constexpr double kDestructorWaitS = 5.0;  // an engine that was not closed gets this long

[[noreturn]] void raise_os_error(int errno_value, const std::string& text) {
    py::object error = py::reinterpret_borrow<py::object>(PyExc_OSError)(errno_value, text);
    // OSError(errno, ...) makes the subclass that fits the errno.
    PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error.ptr())), error.ptr());
    throw py::error_already_set();
}

[[noreturn]] void raise_forked() {
    raise_os_error(ECHILD,
                   "asynchronous I/O engine: it belongs to the parent process; open a new one after fork()");
}

// When a wait last found that the process had been stopped (SIGSTOP, a freezer) and went on.
std::atomic<double> resumed_s{-kGraceS};

// An operation and the process it belongs to.
class PyOperation {
  public:
    explicit PyOperation(OperationPtr operation) : operation_(std::move(operation)), pid_(::getpid()) {}

    bool done() const { return operation_->done(); }

    // Time during which the process was stopped does not count.  A caller who waits for several operations
    // until one end cannot know of it: for those that come next there is the grace.
    bool wait(double timeout_s) const {
        if (operation_->done()) return true;
        if (::getpid() != pid_) raise_forked();
        double now_s = swap_aio::monotonic_s();
        double deadline_s = std::max(now_s + timeout_s, resumed_s.load() + kGraceS);
        bool graced = false;  // once: a machine that is only slow must see its deadlines, too
        for (;;) {
            const double slice_s = std::clamp(deadline_s - now_s, 0.0, kSignalCheckS);
            const double expected_s = now_s + slice_s;
            bool done;
            {
                py::gil_scoped_release release;
                done = operation_->wait(slice_s);
            }
            now_s = swap_aio::monotonic_s();
            if (const double lost_s = now_s - expected_s; lost_s > kStoppedS) {
                resumed_s.store(now_s);
                deadline_s += lost_s;
                if (!graced) deadline_s = std::max(deadline_s, now_s + kGraceS);
                graced = true;
            }
            if (done) return true;
            if (now_s >= deadline_s) return false;
            if (PyErr_CheckSignals() != 0) throw py::error_already_set();
        }
    }

    int error() const { return operation_->done() ? operation_->error : 0; }
    std::int64_t error_offset() const { return operation_->done() ? operation_->error_offset : 0; }
    std::size_t error_length() const { return operation_->done() ? operation_->error_length : 0; }

    // (begin, end) by the monotonic clock: when it was submitted, and when it was over, else 0.
    py::tuple times() const {
        return py::make_tuple(operation_->submitted_s, operation_->done() ? operation_->ended_s : 0.0);
    }

    // (expected, actual) of a read whose bytes were wrong.
    py::tuple error_checksums() const {
        const swap_aio::Checksums* sums = operation_->done() ? operation_->checksums.get() : nullptr;
        return py::make_tuple(sums != nullptr ? sums->expected : 0U, sums != nullptr ? sums->actual : 0U);
    }

    // Of a finished write, one word of 4 bytes per granule, in the order of bytes of this machine.
    py::bytes checksums() const {
        const swap_aio::Checksums* sums = operation_->done() ? operation_->checksums.get() : nullptr;
        if (sums == nullptr) return py::bytes();
        return py::bytes(reinterpret_cast<const char*>(sums->values.data()),
                         sums->values.size() * sizeof(std::uint32_t));
    }

  private:
    OperationPtr operation_;
    pid_t pid_;
};

class PyEngine {
  public:
    PyEngine(const std::string& name, unsigned queue_depth, std::size_t block_bytes, unsigned threads)
        : pid_(::getpid()) {
        if (queue_depth < 1 || queue_depth > 4096)
            throw py::value_error("queue_depth: expected 1 to 4096 but got " + std::to_string(queue_depth));
        if (threads < 1 || threads > 256)
            throw py::value_error("threads: expected 1 to 256 but got " + std::to_string(threads));
        if (block_bytes < 4096 || block_bytes % 4096 != 0 || block_bytes > (std::size_t{1} << 30))
            throw py::value_error("block_bytes: expected a multiple of 4096 up to 1 GiB but got " +
                                  std::to_string(block_bytes));
        const Settings settings{queue_depth, block_bytes, threads};
        int refused = 0;
        std::string reason;
        {
            py::gil_scoped_release release;
            try {
                if (name == "io_uring")
                    engine_ = swap_aio::make_uring_engine(settings);
                else if (name == "threads")
                    engine_ = swap_aio::make_thread_engine(settings);
                if (engine_ == nullptr) refused = EOPNOTSUPP, reason = name + ": not in this build";
            } catch (const std::system_error& error) {
                refused = error.code().value();
                reason = error.what();
            }
        }
        if (refused != 0) raise_os_error(refused, reason);
    }

    PyEngine(const PyEngine&) = delete;
    PyEngine& operator=(const PyEngine&) = delete;

    ~PyEngine() {
        if (engine_ == nullptr) return;
        // In a forked child the threads do not exist and the locks may be held for ever: leave everything as
        // it is.
        if (::getpid() != pid_) {
            (void)engine_.release();
            return;
        }
        py::gil_scoped_release release;
        if (!engine_->close(kDestructorWaitS).ended) (void)engine_.release();
        engine_.reset();
    }

    std::string name() const { return engine_->name(); }

    // jobs: a sequence of (write, fd, offset, address, length, priority, granule_bytes, expected).
    py::list submit(const py::sequence& jobs) {
        Engine& engine = own();
        std::vector<Job> wanted;
        wanted.reserve(jobs.size());
        for (const py::handle item : jobs) wanted.push_back(job_of(py::cast<py::tuple>(item)));
        const std::size_t count = wanted.size();
        std::vector<OperationPtr> operations;
        int refused = 0;
        {
            py::gil_scoped_release release;
            try {
                operations = engine.submit(std::move(wanted));
            } catch (const std::system_error& error) {
                refused = error.code().value();
            }
        }
        if (refused != 0)
            raise_os_error(refused, "asynchronous I/O engine: cannot start a thread for checksums");
        if (operations.size() != count) raise_os_error(EBADF, "asynchronous I/O engine: it is closed");
        py::list out(count);
        for (std::size_t i = 0; i < count; ++i) out[i] = PyOperation(std::move(operations[i]));
        return out;
    }

    bool register_buffer(std::uintptr_t address, std::size_t length) {
        Engine& engine = own();
        if (address == 0 || length == 0 || length > UINTPTR_MAX - address)
            throw py::value_error("register_buffer: expected memory but got an empty or impossible range");
        py::gil_scoped_release release;
        return engine.register_buffer(reinterpret_cast<char*>(address), length);
    }
    void unregister_buffer(std::uintptr_t address) {
        Engine& engine = own();
        py::gil_scoped_release release;
        engine.unregister_buffer(reinterpret_cast<char*>(address));
    }
    bool register_file(int fd) {
        Engine& engine = own();
        py::gil_scoped_release release;
        return engine.register_file(fd);
    }
    void unregister_file(int fd) {
        Engine& engine = own();
        py::gil_scoped_release release;
        engine.unregister_file(fd);
    }

    void plan_fault(const std::string& action, std::uint64_t nth, bool forever, bool reads, bool writes,
                    int errno_value, std::size_t short_bytes, double delay_s) {
        Fault fault;
        if (action == "fail")
            fault.action = FaultAction::kFail;
        else if (action == "short")
            fault.action = FaultAction::kShort;
        else if (action == "hang")
            fault.action = FaultAction::kHang;
        else if (action == "delay")
            fault.action = FaultAction::kDelay;
        else if (action == "lie")
            fault.action = FaultAction::kLie;
        else
            throw py::value_error("fault action: expected fail, short, hang, delay or lie but got " + action);
        if (nth < 1) throw py::value_error("fault nth: expected 1 or more but got 0");
        if (fault.action == FaultAction::kFail && errno_value <= 0)
            throw py::value_error("fault errno: expected a positive number but got " +
                                  std::to_string(errno_value));
        if (!(delay_s >= 0 && delay_s < 1e6))
            throw py::value_error("fault delay_s: expected 0 to 1e6 seconds");
        fault.nth = nth;
        fault.forever = forever;
        fault.reads = reads;
        fault.writes = writes;
        fault.errno_value = errno_value;
        fault.short_bytes = short_bytes;
        fault.delay_s = delay_s;
        own().faults.plan(fault);
    }
    void clear_faults() { own().faults.clear(); }

    // (drained, ended), see Engine::Closing.
    py::tuple close(double timeout_s) {
        Engine::Closing closing;
        if (::getpid() == pid_) {
            py::gil_scoped_release release;
            closing = engine_->close(std::clamp(timeout_s, 0.0, 1e6));
        }
        return py::make_tuple(closing.drained, closing.ended);
    }

    void abandon_in_child() {
        if (::getpid() != pid_) engine_->abandon_in_child();
    }

    py::dict counters() {
        const Counters counters = own().counters();
        py::dict out;
        const auto add = [&](const char* prefix, const swap_aio::KindCounters& kind) {
            const std::string p = prefix;
            out[py::str(p + "s")] = kind.operations;
            out[py::str(p + "_bytes")] = kind.bytes;
            out[py::str(p + "_errors")] = kind.errors;
            out[py::str(p + "_seconds")] = kind.busy_s;
            out[py::str(p + "_latency")] = py::make_tuple(kind.p50_s, kind.p95_s, kind.p99_s, kind.max_s);
        };
        add("read", counters.reads);
        add("write", counters.writes);
        out["in_flight"] = counters.in_flight;
        out["peak_in_flight"] = counters.peak_in_flight;
        out["queue_depth"] = counters.queue_depth;
        out["peak_queue_depth"] = counters.peak_queue_depth;
        out["short_transfers"] = counters.short_transfers;
        out["retries"] = counters.retries;
        return out;
    }

    std::string dump() {
        if (::getpid() != pid_) return "engine of the parent process";
        py::gil_scoped_release release;
        return engine_->dump();
    }

  private:
    static Job job_of(const py::tuple& item) {
        if (item.size() != 8) throw py::value_error("job: expected 8 values");
        Job job;
        job.kind = item[0].cast<bool>() ? Kind::kWrite : Kind::kRead;
        job.fd = item[1].cast<int>();
        job.offset = item[2].cast<std::int64_t>();
        const auto address = item[3].cast<std::uintptr_t>();
        job.length = item[4].cast<std::size_t>();
        const auto priority = item[5].cast<int>();
        if (priority < 0 || priority > static_cast<int>(swap_aio::Priority::kUrgent))
            throw py::value_error("priority: expected 0, 1 or 2 but got " + std::to_string(priority));
        job.priority = static_cast<swap_aio::Priority>(priority);
        if (job.fd < 0)
            throw py::value_error("fd: expected a file descriptor but got " + std::to_string(job.fd));
        if (job.offset < 0)
            throw py::value_error("offset: expected 0 or more bytes but got " + std::to_string(job.offset));
        if (address == 0 && job.length != 0)
            throw py::value_error("address: expected memory but got a null pointer");
        if (job.length > static_cast<std::size_t>(INT64_MAX - job.offset) ||
            job.length > UINTPTR_MAX - address)
            throw py::value_error("length: the range ends beyond the address space: " +
                                  std::to_string(job.length));
        job.address = reinterpret_cast<char*>(address);
        const auto granule_bytes = item[6].cast<std::size_t>();
        if (granule_bytes == 0) return job;
        auto sums = std::make_unique<swap_aio::Checksums>();
        sums->granule_bytes = granule_bytes;
        sums->values.resize(job.length / granule_bytes + (job.length % granule_bytes != 0));
        if (job.kind == Kind::kRead) {
            const std::string given = item[7].cast<py::bytes>();
            if (given.size() != sums->values.size() * sizeof(std::uint32_t))
                throw py::value_error("checksums: expected " + std::to_string(sums->values.size()) +
                                      " words of 4 bytes but got " + std::to_string(given.size()) + " bytes");
            std::memcpy(sums->values.data(), given.data(), given.size());
        }
        job.checksums = std::move(sums);
        return job;
    }

    Engine& own() {
        if (::getpid() != pid_) raise_forked();
        return *engine_;
    }

    std::unique_ptr<Engine> engine_;
    pid_t pid_;
};

py::dict file_facts(int fd) {
    swap_aio::FileFacts facts;
    if (const int error = swap_aio::file_facts(fd, facts)) raise_os_error(error, "file_facts");
    py::dict out;
    out["memory_alignment"] = facts.memory_alignment;
    out["offset_alignment"] = facts.offset_alignment;
    out["alignment_known"] = facts.alignment_known;
    out["in_memory"] = facts.in_memory;
    return out;
}

int preallocate(int fd, std::int64_t length, std::int64_t first) {
    if (first < 0 || length <= first) {
        throw py::value_error("preallocate: expected a positive length and a first byte before its end");
    }
    py::gil_scoped_release release;
    return swap_aio::preallocate(fd, length, first);
}

std::uint32_t crc32c(std::uintptr_t address, std::size_t length, std::uint32_t crc, bool portable) {
    if (address == 0 && length != 0) throw py::value_error("crc32c: expected memory but got a null pointer");
    py::gil_scoped_release release;
    const void* data = reinterpret_cast<const void*>(address);
    return portable ? swap_aio::crc32c_portable(data, length, crc) : swap_aio::crc32c(data, length, crc);
}

std::uint32_t crc32c_bytes(const py::bytes& bytes, std::uint32_t crc) {
    const std::string_view data = bytes;
    py::gil_scoped_release release;
    return swap_aio::crc32c(data.data(), data.size(), crc);
}

}  // namespace

PYBIND11_MODULE(_aio, m) {
    m.doc() = "Asynchronous file I/O (io_uring or threads); use swap.io.aio, its typed face.";
#ifdef OFFLOAD_HAVE_LIBURING
    m.attr("BUILT_WITH_IO_URING") = true;
#else
    m.attr("BUILT_WITH_IO_URING") = false;
#endif
    m.def("uring_refusal", &swap_aio::uring_refusal, py::call_guard<py::gil_scoped_release>());
    m.def("crc32c", &crc32c, py::arg("address"), py::arg("length"), py::arg("crc") = 0,
          py::arg("portable") = false);
    m.def("crc32c_bytes", &crc32c_bytes, py::arg("data"), py::arg("crc") = 0);
    m.def("crc32c_kernel", &swap_aio::crc32c_kernel);
    m.def("file_facts", &file_facts, py::arg("fd"));
    m.def("preallocate", &preallocate, py::arg("fd"), py::arg("length"), py::arg("first") = 0);

    py::class_<PyOperation>(m, "Operation")
        .def("done", &PyOperation::done)
        .def("wait", &PyOperation::wait, py::arg("timeout_s"))
        .def_property_readonly("error", &PyOperation::error)
        .def_property_readonly("error_offset", &PyOperation::error_offset)
        .def_property_readonly("error_length", &PyOperation::error_length)
        .def_property_readonly("error_checksums", &PyOperation::error_checksums)
        .def_property_readonly("checksums", &PyOperation::checksums)
        .def_property_readonly("times", &PyOperation::times);

    py::class_<PyEngine>(m, "Engine")
        .def(py::init<const std::string&, unsigned, std::size_t, unsigned>(), py::arg("name"),
             py::arg("queue_depth"), py::arg("block_bytes"), py::arg("threads"))
        .def_property_readonly("name", &PyEngine::name)
        .def("submit", &PyEngine::submit, py::arg("jobs"))
        .def("register_buffer", &PyEngine::register_buffer, py::arg("address"), py::arg("length"))
        .def("unregister_buffer", &PyEngine::unregister_buffer, py::arg("address"))
        .def("register_file", &PyEngine::register_file, py::arg("fd"))
        .def("unregister_file", &PyEngine::unregister_file, py::arg("fd"))
        .def("plan_fault", &PyEngine::plan_fault, py::arg("action"), py::arg("nth"), py::arg("forever"),
             py::arg("reads"), py::arg("writes"), py::arg("errno_value"), py::arg("short_bytes"),
             py::arg("delay_s"))
        .def("clear_faults", &PyEngine::clear_faults)
        .def("close", &PyEngine::close, py::arg("timeout_s"))
        .def("abandon_in_child", &PyEngine::abandon_in_child)
        .def("counters", &PyEngine::counters)
        .def("dump", &PyEngine::dump);
}
