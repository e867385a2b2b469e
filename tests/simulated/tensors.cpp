#include "tensors.h"

#include <ATen/ops/empty_strided.h>

namespace simulated {
namespace {

at::Tensor over(const at::Tensor& t, void* bytes) {
    c10::Storage storage(c10::Storage::use_byte_size_t(), t.storage().nbytes(),
                         at::DataPtr(bytes, c10::Device(c10::DeviceType::CPU)));
    auto result = at::detail::make_tensor<c10::TensorImpl>(
        std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU), t.dtype());
    result.unsafeGetTensorImpl()->set_sizes_and_strides(t.sizes(), t.strides(), t.storage_offset());
    result._set_conj(t.is_conj());
    result._set_neg(t.is_neg());
    return result;
}

at::Tensor number_like(at::Tensor result, const at::Tensor& t) {
    if (t.unsafeGetTensorImpl()->is_wrapped_number()) result.unsafeGetTensorImpl()->set_wrapped_number(true);
    return result;
}

}  // namespace

at::Tensor inside(const at::Tensor& t) {
    const void* bytes = t.storage().data();
    return over(t, bytes ? memory().shadow(bytes) : nullptr);
}

at::Tensor borrowed(const at::Tensor& t) { return over(t, t.storage().mutable_data()); }

at::Tensor value_now(const at::Tensor& t) { return number_like(t.detach().clone(), t); }

at::Tensor shape_of(const at::Tensor& t) {
    if (t.device().is_cpu() && t.dim() == 0) return t;  // a number: it has no device
    return number_like(
        at::empty_strided(t.sizes(), t.strides(), t.options().device(at::kMeta).requires_grad(false)), t);
}

at::Tensor new_like(const at::Tensor& t, int device) {
    return at::empty_strided(t.sizes(), t.strides(),
                             t.options().device(c10::Device(SIM, c10::DeviceIndex(device))));
}

void add_span(const at::Tensor& t, bool write, std::vector<Span>& spans) {
    if (!t.numel()) return;
    int64_t last = 0;
    for (int64_t i = 0; i < t.dim(); ++i) last += (t.size(i) - 1) * t.stride(i);
    char* begin =
        on_sim(t) ? memory().shadow(t.storage().data()) : static_cast<char*>(t.storage().mutable_data());
    spans.push_back(
        {begin + t.storage_offset() * t.element_size(), size_t(last + 1) * t.element_size(), write});
}

bool add_key(const c10::OperatorHandle& op, const std::vector<c10::IValue>& arguments, std::string& key) {
    auto put = [&](int64_t v) { key.append(reinterpret_cast<const char*>(&v), sizeof v); };
    auto put_all = [&](const auto& values) {
        put(int64_t(values.size()));
        for (auto v : values) put(v);
    };
    auto tensor = [&](const at::Tensor& t) {
        if (!t.defined()) return put(-1);
        put(int64_t(t.scalar_type()));
        put(int64_t(t.device().type()));
        put(t.unsafeGetTensorImpl()->is_wrapped_number());
        put_all(t.sizes());
        put_all(t.strides());
    };
    put(reinterpret_cast<int64_t>(&op.schema()));
    for (const c10::IValue& a : arguments) {
        put(int64_t(a.tagKind().size()));  // kinds, so that 1 and 1.0 differ
        key += a.tagKind();
        if (a.isNone() || a.isDevice() || a.isGenerator()) continue;
        if (a.isTensor()) {
            tensor(a.toTensor());
        } else if (a.isInt()) {
            put(a.toInt());
        } else if (a.isBool()) {
            put(a.toBool());
        } else if (a.isDouble()) {
            double d = a.toDouble();
            key.append(reinterpret_cast<const char*>(&d), sizeof d);
        } else if (a.isIntList()) {
            put_all(a.toIntVector());
        } else if (a.isBoolList()) {
            put_all(a.toBoolList().vec());
        } else if (a.isTensorList()) {
            put(int64_t(a.toTensorVector().size()));
            for (const at::Tensor& t : a.toTensorVector()) tensor(t);
        } else if (a.isString()) {
            put(int64_t(a.toStringRef().size()));
            key += a.toStringRef();
        } else {
            return false;
        }
    }
    return true;
}

}  // namespace simulated
