// A device that pretends to be a GPU: its memory is the host's, so that operations compute on the CPU, but tensors on it
// cannot be mixed with the host's, and reading one is an operation of its own. Torch's PrivateUse1 backend.
#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/alloc_cpu.h>
#include <torch/library.h>

using at::Tensor;

struct HostMemory final : at::Allocator {
  at::DataPtr allocate(size_t size) override {
    void* data = size ? c10::alloc_cpu(size) : nullptr;
    return {data, data, &c10::free_cpu, at::Device(at::DeviceType::PrivateUse1, 0)};
  }
  at::DeleterFnPtr raw_deleter() const override { return &c10::free_cpu; }
  void copy_data(void* to, const void* from, std::size_t size) const override { default_copy_data(to, from, size); }
};
static HostMemory memory;
REGISTER_ALLOCATOR(at::DeviceType::PrivateUse1, &memory);
C10_REGISTER_GUARD_IMPL(PrivateUse1, c10::impl::NoOpDeviceGuardImpl<at::DeviceType::PrivateUse1>);

static Tensor on_host(const Tensor& x) {
  if (x.device().type() != at::DeviceType::PrivateUse1) return x;
  return at::from_blob(x.data_ptr(), x.sizes(), x.strides(), at::TensorOptions().dtype(x.scalar_type()));
}
static Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                    std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  auto keys = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_generic(size, &memory, keys, c10::dtype_or_default(dtype), format);
}
static Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                            std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  auto keys = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_strided_generic(size, stride, &memory, keys, c10::dtype_or_default(dtype));
}
static Tensor copy_from(const Tensor& from, const Tensor& to, bool) {
  auto there = on_host(to);
  if (there.numel()) there.copy_(on_host(from));
  return to;
}
static Tensor copy_from_and_resize(const Tensor& from, const Tensor& to) {
  to.resize_(from.sizes());
  return copy_from(from, to, false);
}
static Tensor as_strided(const Tensor& x, c10::SymIntArrayRef size, c10::SymIntArrayRef stride,
                         std::optional<c10::SymInt> offset) {
  std::optional<int64_t> first;
  if (offset) first = offset->expect_int();
  return at::native::as_strided_tensorimpl(x, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), first);
}
static void fall_back(const c10::OperatorHandle& op, torch::jit::Stack* stack) { at::native::cpu_fallback(op, stack); }

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fall_back>()); }
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", [](const Tensor& x) { return on_host(x).item(); });
  m.impl("as_strided", as_strided);
  m.impl("unfold", [](const Tensor& x, int64_t d, int64_t size, int64_t step) {
    return at::native::unfold(x, d, size, step);
  });
  m.impl("view", [](const Tensor& x, c10::SymIntArrayRef size) {
    return at::native::view(x, C10_AS_INTARRAYREF_SLOW(size));
  });
  m.impl("_reshape_alias", [](const Tensor& x, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
    return at::native::_reshape_alias(x, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
  });
  m.impl("set_.source_Storage", [](Tensor& x, at::Storage s) -> Tensor& { return at::native::set_(x, s); });
  m.impl("set_.source_Storage_storage_offset",
         [](Tensor& x, at::Storage s, c10::SymInt offset, c10::SymIntArrayRef size, c10::SymIntArrayRef stride)
             -> Tensor& {
           return at::native::set_storage_cpu_(x, s, offset.expect_int(), C10_AS_INTARRAYREF_SLOW(size),
                                               C10_AS_INTARRAYREF_SLOW(stride));
         });
  m.impl("resize_", [](const Tensor& x, c10::SymIntArrayRef size, std::optional<at::MemoryFormat> format)
             -> const Tensor& { return at::native::resize_(x, C10_AS_INTARRAYREF_SLOW(size), format); });
}
