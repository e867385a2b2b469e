// Operators that are not kernels: memory, views, copies, numbers read by the host.
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/native/TensorShape.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/_local_scalar_dense.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include "cost.h"
#include "tensors.h"

namespace simulated {
namespace {

using Sizes = c10::IntArrayRef;
using Dtype = std::optional<at::ScalarType>;
using Layout = std::optional<at::Layout>;
using Format = std::optional<at::MemoryFormat>;

at::Tensor empty_bytes(size_t size, Dtype dtype, std::optional<c10::Device> device) {
    c10::OptionalDeviceGuard guard(device);
    auto storage =
        c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), size,
                                              device_allocator().allocate(size), &device_allocator(), true);
    return at::detail::make_tensor<c10::TensorImpl>(std::move(storage),
                                                    c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                                    c10::scalarTypeToTypeMeta(*dtype));
}

at::Tensor empty(Sizes sizes, Dtype dtype, Layout, std::optional<c10::Device> device, std::optional<bool>,
                 Format format) {
    if (!dtype) dtype = at::typeMetaToScalarType(at::get_default_dtype());
    size_t size = at::detail::computeStorageNbytesContiguous(sizes, c10::elementSize(*dtype));
    at::Tensor t = empty_bytes(size, dtype, device);
    t.unsafeGetTensorImpl()->generic_set_sizes_contiguous(sizes);
    if (format && *format != at::MemoryFormat::Preserve)
        t.unsafeGetTensorImpl()->empty_tensor_restride(*format);
    return t;
}

at::Tensor empty_strided(Sizes sizes, Sizes strides, Dtype dtype, Layout, std::optional<c10::Device> device,
                         std::optional<bool>) {
    if (!dtype) dtype = at::typeMetaToScalarType(at::get_default_dtype());
    size_t size = at::detail::computeStorageNbytes(sizes, strides, c10::elementSize(*dtype));
    at::Tensor t = empty_bytes(size, dtype, device);
    t.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides);
    return t;
}

const at::Tensor& resize(const at::Tensor& self, Sizes sizes, Format format) {
    auto* impl = self.unsafeGetTensorImpl();
    if (self.sizes() != sizes) {
        size_t size =
            at::detail::computeStorageNbytesContiguous(sizes, self.element_size(), self.storage_offset());
        if (size > self.storage().nbytes())
            at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(self.storage(), size);
        impl->generic_set_sizes_contiguous(sizes);
    }
    if (format && *format != at::MemoryFormat::Preserve) impl->empty_tensor_restride(*format);
    return self;
}

at::Tensor& set_storage_at(at::Tensor& t, at::Storage storage, int64_t offset, Sizes sizes, Sizes strides) {
    return at::native::set_storage_cpu_(t, std::move(storage), offset, sizes, strides);
}
at::Tensor& set_storage(at::Tensor& t, at::Storage storage) {
    int64_t numel = int64_t(storage.nbytes()) / t.element_size();
    return set_storage_at(t, std::move(storage), 0, {numel}, {1});
}
at::Tensor& set_tensor(at::Tensor& t, const at::Tensor& source) {
    return set_storage_at(t, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

// `param.data = tensor` wants to know.
bool compatible(const at::Tensor& a, const at::Tensor& b) {
    return a.layout() == at::kStrided && b.layout() == at::kStrided;
}

int64_t attention_backend(const at::Tensor&, const at::Tensor&, const at::Tensor&,
                          const std::optional<at::Tensor>&, double, bool, std::optional<double>, bool) {
    return the_clock().on() ? 1 : 0;  // one kernel, where kernels cost; else what is made of plain operators
}

void copy_between_devices(const at::Tensor& from, const at::Tensor& to) {
    int source = current_stream(from.device().index()), target = current_stream(to.device().index());
    machine().follow(source, target);  // as CUDA's: on the source's stream, and both wait for each other
    std::vector<Span> spans;
    add_span(from, false, spans);
    add_span(to, true, spans);
    machine().count(source, "d2d_bytes", to.nbytes());
    machine().push(
        source, "d2d", [from = inside(from), to = inside(to)] { to.copy_(from); }, spans,
        copy_on_device(from.nbytes() + to.nbytes()));
    machine().follow(target, source);
}

void copy_with_host(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
    bool up = on_sim(to);
    const at::Tensor &device = up ? to : from, &host = up ? from : to;
    int stream = current_stream(device.device().index());
    bool whole = !host.is_contiguous() || memory().of_a_piece(host.const_data_ptr(), host.nbytes());
    TORCH_CHECK(whole,
                "sim: invalid argument: host memory of a copy that was locked in part, or by two calls");
    bool pinned = memory().pinned(host.storage().data());
    // What comes from pageable memory is read within the call, as by CUDA's driver; the copy itself is
    // queued.
    bool staged = up && !pinned;
    std::vector<Span> spans;
    add_span(device, up, spans);
    if (!staged) add_span(host, !up, spans);
    char* held = pinned ? memory().hold(host.storage().data()) : nullptr;
    bool clones = staged && !the_clock().dry();
    at::Tensor host_side = clones ? host.clone() : borrowed(host), device_side = inside(device);
    machine().count(stream, up ? "h2d_copies" : "d2h_copies");
    machine().count(stream, up ? "h2d_bytes" : "d2h_bytes", host.nbytes());
    machine().push(
        stream, up ? "h2d" : "d2h",
        [=] {
            (up ? device_side : host_side).copy_(up ? host_side : device_side);
            memory().release(held);
        },
        spans, copy_with_host(up ? Lane::h2d : Lane::d2h, host.nbytes()));
    if (the_clock().dry()) memory().release(held);
    if (!non_blocking || (!up && !pinned)) {
        machine().count(stream, "blocking_copies");
        machine().synchronize(stream);
    }
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
    at::AutoDispatchBelowADInplaceOrView below;
    the_clock().spend(the_clock().costs().operator_s);
    if (on_sim(from) && on_sim(to))
        copy_between_devices(from, to);
    else
        copy_with_host(from, to, non_blocking);
    return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
    to.resize_(from.sizes());
    return copy_from(from, to, false);
}

at::Scalar number(const at::Tensor& t) {
    int stream = current_stream(t.device().index());
    machine().count(stream, "numbers_read");
    machine().synchronize(stream);
    at::AutoDispatchBelowADInplaceOrView below;
    if (the_clock().dry()) return t.is_floating_point() ? at::Scalar(1.0) : at::Scalar(1);
    return at::_local_scalar_dense(inside(t));
}

void record_stream(at::Tensor& t, c10::Stream stream) {
    memory().used_by(t.storage().data(), int(stream.id()));
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
    m.impl("record_stream", record_stream);
    m.impl("empty.memory_format", empty);
    m.impl("empty_strided", empty_strided);
    m.impl("resize_", resize);
    m.impl("set_.source_Storage", set_storage);
    m.impl("set_.source_Storage_storage_offset", set_storage_at);
    m.impl("set_.source_Tensor", set_tensor);
    m.impl("_has_compatible_shallow_copy_type", compatible);
    m.impl("_fused_sdp_choice", attention_backend);
    m.impl("_copy_from", copy_from);
    m.impl("_copy_from_and_resize", copy_from_and_resize);
    m.impl("_local_scalar_dense", number);
    m.impl("alias", at::native::alias);
    m.impl("as_strided", at::native::as_strided_tensorimpl);
    m.impl("view", at::native::view);
    m.impl("view_as_real", at::native::view_as_real);
    m.impl("view_as_complex", at::native::view_as_complex);
    m.impl("unfold", at::native::unfold);
    m.impl("_reshape_alias", at::native::_reshape_alias);
}

}  // namespace
}  // namespace simulated

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &simulated::attention_backend)
}
