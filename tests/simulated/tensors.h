// Tensors as operators see them: on the host's side, on the kernel's side, and on the meta device for shapes.
#pragma once
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <string>
#include <vector>

#include "memory.h"

namespace simulated {

inline bool on_sim(const at::Tensor& t) { return t.defined() && t.device().type() == SIM; }

// The CPU tensor that a kernel works on: same geometry, the shadow's bytes. It owns nothing, as a kernel does
// not.
at::Tensor inside(const at::Tensor& t);
// A CPU tensor of the same geometry over the same bytes that does not own them.
at::Tensor borrowed(const at::Tensor& t);
// The value of an argument in host memory, as it is now.
at::Tensor value_now(const at::Tensor& t);
// A tensor without bytes, from which shapes follow.
at::Tensor shape_of(const at::Tensor& t);
// An uninitialized tensor of that geometry on the device.
at::Tensor new_like(const at::Tensor& t, int device);

void add_span(const at::Tensor& t, bool write, std::vector<Span>& spans);

// Appends to `key` what shapes may depend on; false where an argument is of another kind.
bool add_key(const c10::OperatorHandle& op, const std::vector<c10::IValue>& arguments, std::string& key);

// Applies `f` to each tensor in `value`, and lets devices be `device`.
template <class F>
c10::IValue map_tensors(const c10::IValue& value, const F& f, c10::DeviceType device) {
    if (value.isTensor()) return value.toTensor().defined() ? c10::IValue(f(value.toTensor())) : value;
    if (value.isTensorList()) {
        c10::List<at::Tensor> list;
        for (const at::Tensor& t : value.toTensorVector()) list.push_back(t.defined() ? f(t) : t);
        return list;
    }
    if (value.isOptionalTensorList()) {
        c10::List<std::optional<at::Tensor>> list;
        for (const std::optional<at::Tensor>& t : value.toOptionalTensorVector())
            list.push_back(t && t->defined() ? std::optional<at::Tensor>(f(*t)) : t);
        return list;
    }
    if (value.isDevice() && value.toDevice().type() == SIM) return c10::IValue(c10::Device(device));
    if (value.isGenerator()) return c10::IValue();
    return value;
}

}  // namespace simulated
