// A device that is not the CPU's, for want of a GPU: privateuseone, which PyTorch leaves to others.
//
// Its memory is the CPU's and the CPU's kernels do its work, but as with a GPU its tensors cannot be mixed with the
// CPU's, NumPy cannot read them, and its random numbers come from generators of its own.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/convolution_backward.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

namespace {

using at::IntArrayRef;
using at::Tensor;
using c10::IValue;

constexpr auto kOther = at::kPrivateUse1;
const at::Device device(kOther, 0);

struct Memory final : at::Allocator {
  at::DataPtr allocate(size_t bytes) override {
    auto data = at::getCPUAllocator()->allocate(bytes);
    data.unsafe_set_device(device);
    return data;
  }
  at::DeleterFnPtr raw_deleter() const override { return at::getCPUAllocator()->raw_deleter(); }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
} memory;
REGISTER_ALLOCATOR(kOther, &memory)

// There is one device and one stream.
struct Guard final : c10::impl::NoOpDeviceGuardImpl<kOther> {
  at::Device exchangeDevice(at::Device) const override { return device; }
  at::Device getDevice() const override { return device; }
  c10::Stream getStream(at::Device) const noexcept override { return c10::Stream(c10::Stream::DEFAULT, device); }
  c10::Stream exchangeStream(c10::Stream) const noexcept override { return c10::Stream(c10::Stream::DEFAULT, device); }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

// Draws as the CPU's does; the CPU's kernels do not take it.
struct OtherGenerator final : at::CPUGeneratorImpl {
  OtherGenerator() {
    device_ = ::device;
    key_set_ = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
  }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(at::DeviceIndex) const override { return true; }
  at::Generator getNewGenerator(at::DeviceIndex) const override { return at::make_generator<OtherGenerator>(); }
} hooks;
[[maybe_unused]] const bool registered = (at::RegisterPrivateUse1HooksInterface(&hooks), true);

// What a tensor or a generator must pass where the CPU's may not stand.
template <typename T>
const T& checked(const T& x) {
  TORCH_CHECK(x.device() == device, "Expected everything to be on the same device, ", device, ", but found ", x.device());
  return x;
}

// The same memory as a tensor of the CPU's.
Tensor on_cpu(const Tensor& tensor) {
  return at::for_blob(checked(tensor).mutable_data_ptr(), tensor.sizes())
      .strides(tensor.strides())
      .options(tensor.options().device(at::kCPU))
      .allocator(at::getCPUAllocator())
      .resizeable_storage()
      .make_tensor();
}

// The arguments of an operator, lent to the CPU for its kernel to work on.
struct Loan {
  std::vector<std::pair<Tensor, Tensor>> written;  // the device's, the CPU's
  std::vector<std::pair<at::Generator, at::Generator>> generators;

  Tensor lend(const Tensor& tensor, bool is_written) {
    if (!tensor.defined()) return tensor;
    auto lent = on_cpu(tensor);
    if (is_written) written.emplace_back(tensor, lent);
    return lent;
  }

  // As CUDA it takes the CPU's numbers, and the CPU's indices of a tensor.
  IValue lend(const IValue& value, bool is_written) {
    if (value.isTensor()) {
      const auto& tensor = value.toTensor();
      const bool is_number = tensor.defined() && tensor.is_cpu() && tensor.dim() == 0;
      return is_number && !is_written ? tensor : lend(tensor, is_written);
    }
    if (value.isTensorList()) {
      c10::List<Tensor> list;
      for (const auto& tensor : value.toTensorVector()) list.push_back(lend(tensor, is_written));
      return list;
    }
    if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> indices;
      for (const auto& index : value.toOptionalTensorVector())
        indices.push_back(index && !index->is_cpu() ? lend(*index, is_written) : index);
      return indices;
    }
    if (value.isGenerator()) {
      auto lent = at::detail::createCPUGenerator();
      lent.set_state(checked(value.toGenerator()).get_state());
      generators.emplace_back(value.toGenerator(), lent);
      return lent;
    }
    return value;
  }

  void take_back() {
    for (auto& [tensor, lent] : written)
      if (lent.sizes() != tensor.sizes() || lent.const_data_ptr() != tensor.const_data_ptr())  // it was resized
        tensor.resize_(lent.sizes()).copy_(lent);
    for (auto& [generator, lent] : generators) generator.set_state(lent.get_state());
  }

  IValue result(const IValue& value) const {
    if (!value.isTensor() || !value.toTensor().defined()) return value;
    for (const auto& [tensor, lent] : written)
      if (value.toTensor().is_same(lent)) return tensor;
    return value.toTensor().to(device);
  }
};

// Every operator that is not listed below.
void run_on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& arguments = op.schema().arguments();
  const auto& returns = op.schema().returns();
  for (const auto& value : returns)
    TORCH_CHECK(!value.alias_info() || value.alias_info()->isWrite(), op.schema().name(), " has no kernel here");
  Loan loan;
  auto values = torch::jit::last(*stack, arguments.size()).vec();
  torch::jit::drop(*stack, values.size());
  for (size_t i = 0; i < values.size(); ++i) {
    const auto* alias = arguments[i].alias_info();
    stack->push_back(loan.lend(values[i], alias && alias->isWrite()));
  }
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  loan.take_back();
  for (size_t i = stack->size() - returns.size(); i < stack->size(); ++i) (*stack)[i] = loan.result((*stack)[i]);
}

Tensor empty(
    IntArrayRef size,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>,
    std::optional<at::Device>,
    std::optional<bool>,
    std::optional<at::MemoryFormat> format) {
  const c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_generic(size, &memory, keys, c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(
    IntArrayRef size,
    IntArrayRef stride,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>,
    std::optional<at::Device>,
    std::optional<bool>) {
  const c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_strided_generic(size, stride, &memory, keys, c10::dtype_or_default(dtype));
}

const Tensor& resize_(const Tensor& self, IntArrayRef size, std::optional<at::MemoryFormat>) {
  at::native::resize_impl_cpu_(self.unsafeGetTensorImpl(), size, std::nullopt);
  return self;
}

Tensor copy_from(const Tensor& from, const Tensor& to, bool) {
  (to.is_cpu() ? to : on_cpu(to)).copy_(from.is_cpu() ? from : on_cpu(from));
  return to;
}

Tensor convolution(
    const Tensor& input,
    const Tensor& weight,
    const std::optional<Tensor>& bias,
    IntArrayRef stride,
    IntArrayRef padding,
    IntArrayRef dilation,
    bool transposed,
    IntArrayRef output_padding,
    int64_t groups) {
  const auto cpu_bias = bias ? std::optional(on_cpu(*bias)) : bias;
  return at::convolution(
             on_cpu(input), on_cpu(weight), cpu_bias, stride, padding, dilation, transposed, output_padding, groups)
      .to(device);
}

std::tuple<Tensor, Tensor, Tensor> convolution_backward(
    const Tensor& grad,
    const Tensor& input,
    const Tensor& weight,
    IntArrayRef stride,
    IntArrayRef padding,
    IntArrayRef dilation,
    bool transposed,
    IntArrayRef output_padding,
    int64_t groups,
    std::array<bool, 3> mask) {
  const auto bias_size = weight.sizes().slice(0, 1);
  auto [grad_input, grad_weight, grad_bias] = at::convolution_backward(
      on_cpu(grad), on_cpu(input), on_cpu(weight), bias_size, stride, padding, dilation, transposed, output_padding,
      groups, mask);
  const auto back = [](const Tensor& x) { return x.defined() ? x.to(device) : x; };
  return {back(grad_input), back(grad_weight), back(grad_bias)};
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
}

// What the fallback cannot do: make tensors and views, copy, and what PyTorch asks other devices for by another name.
TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  library.impl("resize_", &resize_);
  library.impl("as_strided", &at::native::as_strided_tensorimpl);
  library.impl("view", &at::native::view);
  library.impl("_reshape_alias", &at::native::_reshape_alias);
  library.impl("set_.source_Storage", static_cast<Tensor& (*)(Tensor&, at::Storage)>(&at::native::set_));
  library.impl("set_.source_Storage_storage_offset", &at::native::set_storage_cpu_);
  library.impl("_copy_from", &copy_from);
  library.impl("convolution_overrideable", &convolution);
  library.impl("convolution_backward_overrideable", &convolution_backward);
}

}  // namespace
