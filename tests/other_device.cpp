// A device that is not the CPU, where there is no GPU: PrivateUse1, the one that PyTorch leaves to others.
//
// Its memory is the CPU's, and so are the kernels that work on it. But as with a GPU, its tensors cannot be
// mixed with the CPU's, NumPy cannot read them, and its random numbers come from generators of its own.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

namespace {

using at::IntArrayRef, at::Tensor, c10::IValue, c10::OperatorHandle, torch::jit::Stack, std::optional;

const at::Device device(at::kPrivateUse1, 0);
const c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);

struct Memory final : at::Allocator {
  at::DataPtr allocate(size_t bytes) override {
    auto data = at::getCPUAllocator()->allocate(bytes);
    data.unsafe_set_device(device);
    return data;
  }
  void copy_data(void* to, const void* from, size_t n) const override { default_copy_data(to, from, n); }
} memory;
REGISTER_ALLOCATOR(at::kPrivateUse1, &memory)

// It has one stream: work is done when the call returns.
struct Guard final : c10::impl::NoOpDeviceGuardImpl<at::kPrivateUse1> {
  c10::Stream getStream(at::Device) const noexcept override { return stream; }
  c10::Stream exchangeStream(c10::Stream) const noexcept override { return stream; }
  const c10::Stream stream{c10::Stream::DEFAULT, device};
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

// It draws as the CPU's generators do, but the CPU's kernels do not take it.
struct Generator final : at::CPUGeneratorImpl {
  Generator() { device_ = ::device, key_set_ = keys; }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool hasPrimaryContext(at::DeviceIndex) const override { return true; }
  at::Generator getNewGenerator(at::DeviceIndex) const override { return at::make_generator<Generator>(); }
} hooks;
[[maybe_unused]] const bool registered = (at::RegisterPrivateUse1HooksInterface(&hooks), true);

template <typename T>
const T& checked(const T& x) {
  TORCH_CHECK(x.device() == device, "Expected all on the same device, ", device, ", but found ", x.device());
  return x;
}

// The same memory as a tensor of the CPU's.
Tensor on_cpu(const Tensor& tensor) {
  auto cpu = at::for_blob(checked(tensor).mutable_data_ptr(), tensor.sizes());
  cpu.strides(tensor.strides()).options(tensor.options().device(at::kCPU));
  return cpu.allocator(at::getCPUAllocator()).resizeable_storage().make_tensor();
}

// The arguments of an operator, lent to the CPU's kernel.
struct Loan {
  std::vector<std::pair<Tensor, Tensor>> written;  // ours, and as the CPU's
  std::vector<std::pair<at::Generator, at::Generator>> generators;

  Tensor lend(const Tensor& tensor, bool is_written) {
    const auto lent = on_cpu(tensor);
    if (is_written) written.emplace_back(tensor, lent);
    return lent;
  }

  // The CPU's numbers and the CPU's indices may stand beside ours, as beside a GPU's.
  IValue lend(const IValue& value, bool is_written) {
    if (value.isTensor()) {
      const Tensor& tensor = value.toTensor();
      const bool is_number = tensor.defined() && tensor.is_cpu() && tensor.dim() == 0 && !is_written;
      return is_number || !tensor.defined() ? tensor : lend(tensor, is_written);
    } else if (value.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor& tensor : value.toTensorVector()) list.push_back(lend(tensor, is_written));
      return list;
    } else if (value.isOptionalTensorList()) {
      c10::List<optional<Tensor>> indices;
      for (const optional<Tensor>& index : value.toOptionalTensorVector())
        indices.push_back(index && !index->is_cpu() ? lend(*index, false) : index);
      return indices;
    } else if (value.isGenerator()) {
      auto lent = at::detail::createCPUGenerator();
      lent.set_state(checked(value.toGenerator()).get_state());
      generators.emplace_back(value.toGenerator(), lent);
      return lent;
    }
    return value;
  }

  void take_back() {
    for (auto& [tensor, lent] : written) {
      if (lent.sizes() == tensor.sizes() && lent.const_data_ptr() == tensor.const_data_ptr()) continue;
      at::native::resize_impl_cpu_(tensor.unsafeGetTensorImpl(), lent.sizes(), std::nullopt);
      tensor.copy_(lent);
    }
    for (auto& [generator, lent] : generators) generator.set_state(lent.get_state());
  }

  IValue result(const IValue& value) {
    if (!value.isTensor() || !value.toTensor().defined()) return value;
    for (auto& [tensor, lent] : written)
      if (value.toTensor().is_same(lent)) return tensor;
    return value.toTensor().to(device);
  }
};

void run_on_cpu(const OperatorHandle& op, Stack* stack) {
  const auto& schema = op.schema();
  for (const auto& output : schema.returns())
    TORCH_CHECK(!output.alias_info() || output.alias_info()->isWrite(), schema.name(), " makes a view");
  Loan loan;
  const Stack ours(stack->end() - schema.arguments().size(), stack->end());  // keeps the memory that is lent
  for (size_t i = 0, first = stack->size() - ours.size(); i < ours.size(); ++i) {
    const auto* alias = schema.arguments()[i].alias_info();
    (*stack)[first + i] = loan.lend(ours[i], alias && alias->isWrite());
  }
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  loan.take_back();
  for (size_t i = stack->size() - schema.returns().size(); i < stack->size(); ++i)
    (*stack)[i] = loan.result((*stack)[i]);
}

OperatorHandle find(const char* name) { return c10::Dispatcher::singleton().findSchemaOrThrow(name, ""); }

void convolution(const OperatorHandle&, Stack* stack) { run_on_cpu(find("aten::convolution"), stack); }

// Gradient, input and weight are the first of ten arguments; after them the CPU's takes the bias's size.
void convolution_backward(const OperatorHandle&, Stack* stack) {
  const auto rest = stack->end() - 7;
  stack->insert(rest, IValue(std::vector<int64_t>{(rest - 1)->toTensor().size(0)}));
  run_on_cpu(find("aten::convolution_backward"), stack);
}

Tensor empty(IntArrayRef size, optional<at::ScalarType> dtype, optional<at::Layout>, optional<at::Device>,
             optional<bool>, optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(size, &memory, keys, c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(IntArrayRef size, IntArrayRef stride, optional<at::ScalarType> dtype,
                     optional<at::Layout>, optional<at::Device>, optional<bool>) {
  return at::detail::empty_strided_generic(size, stride, &memory, keys, c10::dtype_or_default(dtype));
}

Tensor copy_from(const Tensor& from, const Tensor& to, bool) {
  (to.is_cpu() ? to : on_cpu(to)).copy_(from.is_cpu() ? from : on_cpu(from));
  return to;
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  library.impl("_copy_from", &copy_from);
  library.impl("as_strided", &at::native::as_strided_tensorimpl);
  library.impl("view", &at::native::view);
  library.impl("set_.source_Storage", static_cast<Tensor& (*)(Tensor&, at::Storage)>(&at::native::set_));
  library.impl("set_.source_Storage_storage_offset", &at::native::set_storage_cpu_);
  // What other devices are asked for by other names than the CPU.
  library.impl("convolution_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution>());
  const auto backward = "convolution_backward_overrideable";
  library.impl(backward, torch::CppFunction::makeFromBoxedFunction<&convolution_backward>());
  // PyTorch has one for any device, before a fallback, which needs memory in one order.
  library.impl("native_group_norm", torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
}

}  // namespace
