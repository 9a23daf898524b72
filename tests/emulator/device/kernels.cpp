// Kernels: those of the CPU, on the device's memory.
//
// One boxed fallback stands for all operators that tensors.cpp and copies.cpp do not have. It checks what a device
// would have refused, notes which memory the operator reads and writes, runs the CPU's kernel on aliases of the
// arguments, and brings results back.
#include "generators.h"
#include "tensors.h"
#include "workspaces.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <cstring>
#include <functional>

namespace emulated {
namespace {

using Names = std::set<std::string>;

// The host waits in these, for a size or for a verdict.
const Names kWaiting = {"aten::nonzero",        "aten::masked_select", "aten::_unique2",
                        "aten::unique_dim",     "aten::unique_consecutive",
                        "aten::repeat_interleave", "aten::bincount"};

// These take tensors of the host, of any size, beside those of the device.
const Names kMixing = {"aten::index",
                       "aten::index_put_",
                       "aten::_index_put_impl_",
                       "aten::_unsafe_index",
                       "aten::_unsafe_index_put",
                       "aten::_pack_padded_sequence",
                       "aten::_pack_padded_sequence_backward",
                       "aten::_ctc_loss",
                       "aten::_ctc_loss_backward",
                       "aten::resize_as_",
                       "aten::set_"};

// The second result of this is on the host.
const std::string kPacking = "aten::_pack_padded_sequence";

// While this lives, the default generator of the host draws what the device's would.
class DrawsAsDevice {
 public:
  explicit DrawsAsDevice(c10::DeviceIndex device) : host_(at::detail::getDefaultCPUGenerator()) {
    auto once = drawing(default_generator(device));
    before_ = host_.get_state();
    host_.set_state(once.get_state());
  }
  ~DrawsAsDevice() { host_.set_state(before_); }

 private:
  at::Generator host_;
  at::Tensor before_;
};

class Call {
 public:
  Call(const c10::OperatorHandle& op, torch::jit::Stack& stack) : op_(op), name_(op.operator_name().name), full_name_(name_of(op)) {
    auto count = op.schema().arguments().size();
    given_.assign(stack.end() - int64_t(count), stack.end());
    stack.erase(stack.end() - int64_t(count), stack.end());
    for (const auto& value : given_) args_.push_back(to_host(value));
    if (device_.index() < 0) device_.set_index(current_device());
  }

  c10::Device device() const { return device_; }

  void run(torch::jit::Stack& stack) {
    pass_generator();
    launch_on_device();
    std::optional<DrawsAsDevice> draws;
    if (op_.hasTag(at::Tag::nondeterministic_seeded) && !has_generator_) draws.emplace(device_.index());
    op_.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &args_);
    draws.reset();
    bool tells_host = false;
    for (size_t i = 0; i < args_.size(); ++i) {
      bool stays = name_ == kPacking && i == 1;
      tells_host |= stays || !(args_[i].isTensor() || args_[i].isTensorList());
      stack.push_back(stays ? args_[i] : to_device(args_[i]));
    }
    for (const auto& [device, host] : pairs_) bring_back(device, host);  // arguments that are written, not returned
    if (tells_host) wait();
  }

 private:
  static std::string name_of(const c10::OperatorHandle& op) {
    const auto& [name, overload] = op.operator_name();
    return overload.empty() ? name : name + "." + overload;
  }

  // -- from the device to the host

  at::Tensor to_host(const at::Tensor& tensor) {
    if (!is_on_device(tensor)) {
      check_host_tensor(tensor);
      return tensor;
    }
    if (device_.index() < 0) device_ = tensor.device();
    TORCH_CHECK(device_ == tensor.device() || kMixing.count(name_),
                "Expected all tensors to be on the same device, but found at least two devices, ", device_, " and ",
                tensor.device(), "! (", full_name_, ")");
    for (const auto& [device, host] : pairs_)
      if (device.is_same(tensor)) return host;
    pairs_.emplace_back(tensor, on_host(tensor));
    return pairs_.back().second;
  }

  void check_host_tensor(const at::Tensor& tensor) {
    if (tensor.defined() && tensor.dim() > 0 && tensor.device().is_cpu()) has_host_tensor_ = true;
  }

  c10::IValue to_host(const c10::IValue& value) {
    if (value.isTensor()) return to_host(value.toTensor());
    if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> tensors;
      for (const auto& tensor : value.toOptionalTensorVector())
        tensors.push_back(tensor ? std::make_optional(to_host(*tensor)) : std::nullopt);
      return tensors;
    }
    if (value.isTensorList() || is_list_of_tensors(value)) {
      auto tensors = value.toTensorVector();
      for (auto& tensor : tensors) tensor = to_host(tensor);
      return c10::List<at::Tensor>(tensors);
    }
    if (value.isDevice() && value.toDevice().is_cuda()) {
      if (device_.index() < 0) device_ = value.toDevice();
      return c10::Device(c10::kCPU);
    }
    return value;
  }

  static bool is_list_of_tensors(const c10::IValue& value) {
    return value.isList() && value.toListRef().size() && value.toListRef()[0].isTensor();
  }

  // -- on the device

  void pass_generator() {
    const auto& arguments = op_.schema().arguments();
    for (size_t i = 0; i < arguments.size(); ++i) {
      if (arguments[i].type()->str().find("Generator") == std::string::npos) continue;
      has_generator_ = true;
      auto generator = args_[i].isNone() ? default_generator(device_.index()) : args_[i].toGenerator();
      TORCH_CHECK(generator.device().is_cuda(), "Expected a 'cuda' device type for generator but found '",
                  generator.device().type(), "'");
      args_[i] = drawing(generator);
    }
  }

  void launch_on_device() {
    Lock lock;
    TORCH_CHECK(pairs_.empty() || !has_host_tensor_ || kMixing.count(name_),
                "Expected all tensors to be on the same device, but found at least two devices, ", device_,
                " and cpu! (", full_name_, ")");
    take_workspaces(name_, !given_.empty() && given_[0].isTensor() && given_[0].toTensor().dim() == 1);
    auto& stream = current_stream(device_.index());
    auto epoch = launch(stream);
    const auto& arguments = op_.schema().arguments();
    bool counts_bits = false;
    for (size_t i = 0; i < arguments.size(); ++i) {
      const auto* alias = arguments[i].alias_info();
      each_tensor(given_[i], [&](const at::Tensor& tensor) {
        counts_bits |= given_[i].isList() && tensor.scalar_type() == at::kBool;
        if (!is_on_device(tensor)) return;
        if (auto* block = block_of(tensor)) block->accesses.add(stream, epoch, alias && alias->isWrite(), full_name_);
      });
    }
    bool indexes = name_.rfind("aten::index", 0) == 0 || name_.rfind("aten::_index", 0) == 0;
    if (kWaiting.count(name_) || (indexes && counts_bits)) host_waits(stream.clock);
  }

  static void each_tensor(const c10::IValue& value, const std::function<void(const at::Tensor&)>& see) {
    if (value.isTensor() && value.toTensor().defined()) see(value.toTensor());
    if (value.isList())
      for (const auto& one : value.toListRef())
        if (one.isTensor()) each_tensor(one, see);
  }

  void wait() {
    Lock lock;
    host_waits(current_stream(device_.index()).clock);
  }

  // -- and back

  at::Tensor to_device(const at::Tensor& result) {
    if (!result.defined()) return result;
    for (const auto& [device, host] : pairs_)
      if (host.is_same(result)) return device;
    if (result.has_storage() && result.storage().data())
      for (const auto& [device, host] : pairs_)
        if (device.has_storage() && device.storage().data() == result.storage().data())
          return view_like(device, result);
    return new_on_device(result);
  }

  c10::IValue to_device(const c10::IValue& result) {
    if (result.isTensor()) return to_device(result.toTensor());
    if (!result.isTensorList()) return result;
    auto tensors = result.toTensorVector();
    for (auto& tensor : tensors) tensor = to_device(tensor);
    return c10::List<at::Tensor>(tensors);
  }

  at::Tensor new_on_device(const at::Tensor& result) {
    auto made = empty_strided(result.sizes(), result.strides(), result.scalar_type(), device_);
    if (auto bytes = made.storage().nbytes()) std::memcpy(made.storage().mutable_data(), result.data_ptr(), bytes);
    if (result.is_conj()) made._set_conj(true);
    if (result.is_neg()) made._set_neg(true);
    if (result.unsafeGetTensorImpl()->is_wrapped_number()) made.unsafeGetTensorImpl()->set_wrapped_number(true);
    note_write(made);
    return made;
  }

  void note_write(const at::Tensor& tensor) {
    Lock lock;
    auto& stream = current_stream(device_.index());
    auto epoch = launch(stream);
    if (auto* block = block_of(tensor)) block->accesses.add(stream, epoch, true, full_name_);
  }

  // An argument that the kernel has resized.
  void bring_back(const at::Tensor& device, const at::Tensor& host) {
    bool moved = host.has_storage() && host.storage().data() != device.storage().data();
    if (!moved && device.sizes().equals(host.sizes()) && device.strides().equals(host.strides())) return;
    if (moved) {
      resize_to(device, host);
      note_write(device);
    } else {
      device.unsafeGetTensorImpl()->set_sizes_and_strides(host.sizes(), host.strides());
    }
  }

  const c10::OperatorHandle& op_;
  const std::string name_;       // "aten::add"
  const std::string full_name_;  // "aten::add.out"
  std::vector<c10::IValue> given_;
  torch::jit::Stack args_;
  std::vector<std::pair<at::Tensor, at::Tensor>> pairs_;  // of the device, and its alias on the host
  c10::Device device_{c10::kCUDA};
  bool has_generator_ = false;
  bool has_host_tensor_ = false;
};

void fallback(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  Call call(op, *stack);
  c10::OptionalDeviceGuard guard(call.device());
  call.run(*stack);
}

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

// A device has kernels for these, where torch would else put them together from others.
TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  for (const char* name : {"native_layer_norm", "native_group_norm", "silu_backward", "mish_backward",
                           // These would be called with an output of another size, which warns.
                           "mse_loss", "smooth_l1_loss"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

}  // namespace
}  // namespace emulated
