#include "cost.h"

#include <algorithm>

#include "tensors.h"

namespace simulated {
namespace {

// Bytes that lie under a tensor: an expanded one has fewer than elements.
uint64_t bytes_of(const at::Tensor& t) {
    if (!t.numel()) return 0;
    int64_t last = 0;
    for (int64_t i = 0; i < t.dim(); ++i) last += (t.size(i) - 1) * t.stride(i);
    return uint64_t(std::min(t.numel(), last + 1)) * t.element_size();
}

double matrix_product(const at::Tensor& left, const at::Tensor& result) {
    return 2.0 * double(result.numel()) * double(left.size(-1));
}

double attention(const at::Tensor& query, const at::Tensor& key, bool causal) {
    double all = 4.0 * double(query.numel()) * double(key.size(-2));
    return causal ? all / 2 : all;
}

// Multiplications and additions of what is made of products of matrices; 0 of all else.
double flops_of(const std::string& name, const torch::jit::Stack& in, const torch::jit::Stack& out) {
    auto t = [&](size_t i) { return in.at(i).toTensor(); };
    if (name == "mm" || name == "bmm") return matrix_product(t(0), out.at(0).toTensor());
    if (name == "addmm" || name == "baddbmm") return matrix_product(t(1), out.at(0).toTensor());
    if (name == "convolution_overrideable" || name == "convolution") {
        return 2.0 * double(out.at(0).toTensor().numel()) * double(t(1).numel()) / double(t(1).size(0));
    }
    if (name == "_scaled_dot_product_flash_attention_for_cpu")
        return attention(t(0), t(1), in.at(4).toBool());
    if (name ==
        "_scaled_dot_product_flash_attention_for_cpu_backward")  // five products where forward has two
        return 2.5 * attention(t(1), t(2), in.at(7).toBool());
    return 0;
}

}  // namespace

namespace {

// Whether an argument counts twice: it is read and written, and no result stands for it. Fused optimizers
// write gradients only where they unscale them.
bool is_updated(const c10::FunctionSchema& schema, const c10::Argument& argument) {
    bool fused = schema.name().rfind("aten::_fused_", 0) == 0 && argument.name() == "grads";
    return schema.returns().empty() && argument.alias_info() && argument.alias_info()->isWrite() && !fused;
}

}  // namespace

Work work_of(const c10::FunctionSchema& schema, const torch::jit::Stack& arguments,
             const torch::jit::Stack& results) {
    const Costs& costs = the_clock().costs();
    uint64_t bytes = 0;
    bool narrow = false;
    auto add = [&](const at::Tensor& t) {
        if (t.defined() && !t.device().is_cpu()) {
            bytes += bytes_of(t);
            narrow |= c10::isReducedFloatingType(t.scalar_type());
        }
        return t;
    };
    for (size_t i = 0; i < arguments.size(); ++i) {
        const c10::Argument& argument = schema.arguments()[i];
        bool target = argument.kwarg_only() && argument.alias_info() && argument.alias_info()->isWrite();
        if (!target) map_tensors(arguments[i], add, SIM);  // of `out=`, which is not read, the result counts
        if (is_updated(schema, argument)) map_tensors(arguments[i], add, SIM);
    }
    for (const c10::IValue& result : results) map_tensors(result, add, SIM);
    double compute =
        flops_of(schema.name().substr(6), arguments, results) / (narrow ? costs.flops_16 : costs.flops_32);
    double seconds = std::max({costs.kernel_s, compute, double(bytes) / costs.device_bytes});
    return {Lane::compute, seconds, bytes};
}

Work copy_on_device(uint64_t bytes) {
    const Costs& costs = the_clock().costs();
    return {Lane::compute, std::max(costs.kernel_s, double(bytes) / costs.device_bytes), bytes};
}

Work copy_with_host(Lane lane, uint64_t bytes) {
    const Costs& costs = the_clock().costs();
    double rate = lane == Lane::h2d ? costs.h2d_bytes : costs.d2h_bytes;
    return {lane, costs.copy_s + double(bytes) / rate, bytes};
}

}  // namespace simulated
