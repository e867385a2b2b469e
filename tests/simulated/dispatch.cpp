#include "dispatch.h"

#include <Python.h>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <torch/library.h>

#include <cstdlib>
#include <mutex>
#include <random>
#include <unordered_map>

#include "cost.h"
#include "device.h"
#include "tensors.h"

namespace simulated {
namespace {

using c10::IValue;
using Stack = torch::jit::Stack;

bool writes(const c10::Argument& argument) {
    return argument.alias_info() && argument.alias_info()->isWrite();
}

// The interpreter's lock, held. Who waits for the machine gives it away, so none waits for the other.
class Gil {
  public:
    Gil() : held_(Py_IsInitialized()) {
        if (held_) state_ = PyGILState_Ensure();
    }
    ~Gil() {
        if (held_) PyGILState_Release(state_);
    }
    Gil(const Gil&) = delete;
    Gil& operator=(const Gil&) = delete;

  private:
    bool held_;
    PyGILState_STATE state_{};
};

// One call of an operator, on its way to a stream.
class Call {
  public:
    Call(const c10::OperatorHandle& op, Stack* stack)
        : op_(op), schema_(op.schema()), arguments_(torch::jit::pop(*stack, schema_.arguments().size())) {
        int found = -1;
        for (const IValue& argument : arguments_) {
            map_tensors(
                argument,
                [&](const at::Tensor& t) {
                    if (on_sim(t) && found < 0) found = t.device().index();
                    return t;
                },
                SIM);
            if (found < 0 && argument.isDevice() && argument.toDevice().type() == SIM)
                found = std::max<int>(argument.toDevice().index(), 0);
        }
        device_ = found < 0 ? current_device() : found;
        for (const c10::Argument& result : schema_.returns())
            TORCH_CHECK(!result.alias_info() || writes(result), "sim: no kernel for the view ",
                        schema_.name());
    }

    void run(Stack* stack) {
        int before = exchange_device(device_);
        struct Back {
            int device;
            ~Back() { exchange_device(device); }
        } back{before};
        stream_ = current_stream(device_);
        the_clock().spend(the_clock().costs().operator_s);
        if (infer_shapes()) {
            resize_outputs();
            if (!the_clock().dry()) take_arguments();
            queue(stack);
        } else {
            TORCH_CHECK(!the_clock().dry(), "sim: ", schema_.name(),
                        " depends on values, and there are none");
            take_arguments();
            run_now(stack);
        }
    }

  private:
    // Finds the results' geometry on the meta device; false where it depends on values, or no function tells
    // it.
    bool infer_shapes() {
        for (const c10::Argument& result : schema_.returns()) {
            bool tensor = result.type()->isSubtypeOf(*c10::TensorType::get());
            if (!tensor && result.type()->str() != "Tensor[]") return false;
        }
        // Shape functions written in Python take up to milliseconds, so what they said is remembered.
        struct Shapes {
            Stack arguments, results;
        };
        static std::mutex mutex;
        static auto* known = new std::unordered_map<std::string, Shapes>;
        std::string key;
        bool keyed = add_key(op_, arguments_, key);
        if (keyed) {
            std::lock_guard<std::mutex> lock(mutex);
            if (auto found = known->find(key); found != known->end()) {
                shapes_ = found->second.arguments;
                results_ = found->second.results;
                return true;
            }
        }
        try {
            for (const IValue& argument : arguments_)
                shapes_.push_back(map_tensors(argument, shape_of, at::kMeta));
            results_ = shapes_;
            op_.callBoxed(results_);
        } catch (const std::exception& error) {
            if (std::getenv("SIMULATED_DEBUG"))
                fprintf(stderr, "sim: %s: %.300s\n", schema_.name().c_str(), error.what());
            PyGILState_STATE state = PyGILState_Ensure();
            PyErr_Clear();
            PyGILState_Release(state);
            return false;
        }
        take_dtypes_of_cpu();
        if (keyed) {
            std::lock_guard<std::mutex> lock(mutex);
            (*known)[key] = {shapes_, results_};
        }
        return true;
    }

    // Shape functions tell what CUDA's kernels return. The CPU's return statistics of 16-bit inputs in 16
    // bits, and want them so in backward: what they return is found by a trial on zeros.
    void take_dtypes_of_cpu() {
        bool narrow = false, sized = false;  // sized: an argument beside the tensors may tell their sizes
        for (const IValue& argument : arguments_) {
            narrow |= argument.isTensor() && argument.toTensor().defined() &&
                      c10::isReducedFloatingType(argument.toTensor().scalar_type());
            sized |= !argument.isTensor() && !argument.isBool() && !argument.isDouble() && !argument.isNone();
        }
        if (results_.size() < 2 || !narrow || op_.hasTag(at::Tag::nondeterministic_seeded)) return;
        Stack trial;
        if (sized || !try_on_zeros(trial, true)) {
            trial.clear();
            if (!try_on_zeros(trial, false)) return;  // the kernel itself will tell
        }
        for (size_t i = 0; i < results_.size(); ++i) {
            bool both = results_[i].isTensor() && trial[i].isTensor();
            if (!both || !results_[i].toTensor().defined() || !trial[i].toTensor().defined()) continue;
            at::ScalarType dtype = trial[i].toTensor().scalar_type();
            if (dtype != results_[i].toTensor().scalar_type()) results_[i] = results_[i].toTensor().to(dtype);
        }
    }

    // Calls the CPU's kernel on zeros; false if it refuses them. `least`: no dimension is longer than 1.
    bool try_on_zeros(Stack& stack, bool least) {
        auto zeros = [&](const at::Tensor& t) {
            if (!least) return at::zeros_like(t, t.options().device(at::kCPU));
            std::vector<int64_t> sizes(t.sizes().vec());
            for (int64_t& size : sizes) size = std::min<int64_t>(size, 1);
            return at::zeros(sizes, t.options().device(at::kCPU));
        };
        for (const IValue& shape : shapes_) stack.push_back(map_tensors(shape, zeros, at::kCPU));
        try {
            Machine::execute(
                [&] { op_.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack); });
        } catch (const c10::Error&) {
            return false;
        }
        return true;
    }

    // Arguments that are results (`out=`) get the results' shape.
    void resize_outputs() {
        for (size_t i = 0; i < arguments_.size(); ++i) {
            if (!writes(schema_.arguments()[i]) || !arguments_[i].isTensor()) continue;
            at::Tensor t = arguments_[i].toTensor(), shape = shapes_[i].toTensor();
            if (on_sim(t) && t.sizes() != shape.sizes()) t.resize_(shape.sizes());
        }
    }

    // Turns the arguments into what the kernel gets.
    void take_arguments() {
        for (size_t i = 0; i < arguments_.size(); ++i) {
            bool write = writes(schema_.arguments()[i]);
            kernel_.push_back(map_tensors(
                arguments_[i],
                [&](const at::Tensor& t) {
                    if (!on_sim(t)) return write ? t : value_now(t);
                    add_span(t, write, spans_);
                    return inside(t);
                },
                at::kCPU));
        }
    }

    // The CPU's kernel, with random numbers that are fixed now.
    std::function<void(Stack&)> kernel() {
        auto plain = [op = op_](Stack& stack) {
            op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack);
        };
        if (!op_.hasTag(at::Tag::nondeterministic_seeded)) return plain;
        Lock lock(machine().mutex);
        Generator& own = generator(device_);
        std::seed_seq sequence{own.seed, own.count++};
        uint64_t seed = std::mt19937_64(sequence)();
        for (size_t i = 0; i < schema_.arguments().size(); ++i)
            if (schema_.arguments()[i].type()->str() == "Generator?") {
                kernel_[i] = at::make_generator<at::CPUGeneratorImpl>(seed);
                return plain;
            }
        return [plain, seed](Stack& stack) {
            Gil alone;  // whoever sets the CPU's generator, as checkpointing does meanwhile, holds it
            auto shared = at::detail::getDefaultCPUGenerator();
            at::Tensor before = shared.get_state();
            shared.set_current_seed(seed);
            plain(stack);
            shared.set_state(before);
        };
    }

    // The argument that result `i` is; None where it is a new tensor.
    IValue argument_of(size_t i) const {
        if (auto* alias = schema_.returns()[i].alias_info())
            for (size_t k = 0; k < arguments_.size(); ++k)
                if (auto* other = schema_.arguments()[k].alias_info(); other && *other == *alias)
                    return arguments_[k];
        return IValue();
    }

    void queue(Stack* stack) {
        if (the_clock().dry()) return queue_cost(stack);
        auto compute = kernel();
        std::vector<std::pair<size_t, std::vector<at::Tensor>>> targets;
        for (size_t i = 0; i < schema_.returns().size(); ++i) {
            if (IValue own = argument_of(i); !own.isNone()) {
                stack->push_back(own);
                continue;
            }
            std::vector<at::Tensor> new_ones;
            stack->push_back(map_tensors(
                results_[i],
                [&](const at::Tensor& shape) {
                    at::Tensor result = new_like(shape, device_);
                    add_span(result, true, spans_);
                    new_ones.push_back(inside(result));
                    return result;
                },
                SIM));
            targets.emplace_back(i, std::move(new_ones));
        }
        machine().count(stream_, "kernels");
        auto run = [arguments = std::move(kernel_), compute, targets]() mutable {
            compute(arguments);  // takes the arguments away, leaves the results
            for (auto& [i, new_ones] : targets) {
                size_t k = 0;
                map_tensors(
                    arguments[i],
                    [&](const at::Tensor& computed) {
                        at::Tensor& target = new_ones.at(k++);
                        if (computed.numel() || !target.numel()) target.copy_(computed);
                        return computed;
                    },
                    at::kCPU);
            }
        };
        machine().push(stream_, schema_.name().substr(6), run, spans_, work());
    }

    void queue_cost(Stack* stack) {
        for (size_t i = 0; i < schema_.returns().size(); ++i) {
            IValue own = argument_of(i);
            auto make = [&](const at::Tensor& shape) { return new_like(shape, device_); };
            stack->push_back(own.isNone() ? map_tensors(results_[i], make, SIM) : own);
        }
        machine().count(stream_, "kernels");
        machine().push(stream_, schema_.name().substr(6), nullptr, {}, work());
    }

    Work work() const { return the_clock().on() ? work_of(schema_, arguments_, results_) : Work{}; }

    void run_now(Stack* stack) {
        auto compute = kernel();
        machine().count(stream_, "sync:" + schema_.name());
        machine().push(stream_, schema_.name().substr(6), [&] { compute(kernel_); }, spans_);
        machine().synchronize(stream_);
        for (size_t i = 0; i < schema_.returns().size(); ++i) {
            if (IValue own = argument_of(i); !own.isNone()) {
                stack->push_back(own);
                continue;
            }
            stack->push_back(map_tensors(
                kernel_[i],
                [&](const at::Tensor& computed) {
                    at::Tensor result = new_like(computed, device_);
                    machine().synchronize(stream_);
                    Machine::execute([&] { inside(result).copy_(computed); });
                    return result;
                },
                SIM));
        }
    }

    c10::OperatorHandle op_;
    const c10::FunctionSchema& schema_;
    Stack arguments_, shapes_, results_, kernel_;
    std::vector<Span> spans_;
    int device_ = 0, stream_ = 0;
};

void fallback(const c10::OperatorHandle& op, Stack* stack) {
    at::AutoDispatchBelowADInplaceOrView below;
    Call(op, stack).run(stack);
}

// What torch asks of accelerators by other names, computed by the CPU's kernels.
void convolution(const c10::OperatorHandle&, Stack* stack) {
    static const auto plain = c10::Dispatcher::singleton().findSchemaOrThrow("aten::convolution", "");
    fallback(plain, stack);
}

void convolution_backward(const c10::OperatorHandle&, Stack* stack) {
    static const auto plain =
        c10::Dispatcher::singleton().findSchemaOrThrow("aten::convolution_backward", "");
    Stack arguments = torch::jit::pop(*stack, 10);
    at::Tensor weight = arguments[2].toTensor();
    bool transposed = arguments[6].toBool();
    int64_t channels = transposed ? weight.size(1) * arguments[8].toInt() : weight.size(0);
    arguments.insert(arguments.begin() + 3, IValue(std::vector<int64_t>{channels}));
    for (IValue& argument : arguments) stack->push_back(std::move(argument));
    fallback(plain, stack);
}

// CUDA's counts integers, too.
void histc(const c10::OperatorHandle& op, Stack* stack) {
    IValue& values = (*stack)[stack->size() - 4];
    at::ScalarType dtype = values.toTensor().scalar_type();
    bool whole = c10::isIntegralType(dtype, false);
    if (whole) values = values.toTensor().to(at::kFloat);
    fallback(op, stack);
    if (whole) stack->back() = stack->back().toTensor().to(dtype);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

}  // namespace

void take_cpu_kernels() {
    static torch::Library library(torch::Library::IMPL, "aten", c10::DispatchKey::PrivateUse1, __FILE__,
                                  __LINE__);
    for (const c10::OperatorName& name : c10::Dispatcher::singleton().getAllOpNames()) {
        auto op = c10::Dispatcher::singleton().findSchema(name);
        if (name.name.rfind("aten::", 0) || !op) continue;
        auto has = [&](c10::DispatchKey key) { return op->hasKernelForDispatchKey(key); };
        if (has(c10::DispatchKey::PrivateUse1) || !has(c10::DispatchKey::CPU)) continue;
        if (!has(c10::DispatchKey::CompositeExplicitAutograd)) continue;
        bool view = false;
        for (const c10::Argument& result : op->schema().returns())
            view |= result.alias_info() && !writes(result);
        if (view) continue;
        std::string own = name.name.substr(6) + (name.overload_name.empty() ? "" : "." + name.overload_name);
        library.impl(own.c_str(), torch::CppFunction::makeFromBoxedFunction<&fallback>());
    }
    library.impl("convolution_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution>());
    library.impl("convolution_backward_overrideable",
                 torch::CppFunction::makeFromBoxedFunction<&convolution_backward>());
    library.impl("histc", torch::CppFunction::makeFromBoxedFunction<&histc>());
}

}  // namespace simulated
