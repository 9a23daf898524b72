// Copies: within a device, between devices, and from and to the host, which waits unless the memory there is pinned.
#include "pinned.h"
#include "tensors.h"

#include <ATen/Context.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

namespace emulated {
namespace {

void copy_values(const at::Tensor& to, const at::Tensor& from) {
  at::NoGradGuard no_grad;
  c10::impl::ExcludeDispatchKeyGuard below_autograd(c10::autograd_dispatch_keyset);
  (is_on_device(to) ? on_host(to) : to).copy_(is_on_device(from) ? on_host(from) : from);
}

void note(const at::Tensor& tensor, const StreamState& stream, Epoch epoch, bool writes) {
  if (!is_on_device(tensor)) return;
  if (auto* block = block_of(tensor)) block->accesses.add(stream, epoch, writes, "copy_");
}

// Between devices: on the stream of the source, which waits for that of the target, and then the other way around.
void copy_on_devices(const at::Tensor& to, const at::Tensor& from) {
  c10::OptionalDeviceGuard guard(from.device());
  {
    Lock lock;
    auto& stream = current_stream(from.device().index());
    auto& target = current_stream(to.device().index());
    stream.clock.join(target.clock);
    auto epoch = launch(stream);
    note(from, stream, epoch, false);
    note(to, stream, epoch, true);
    target.clock.join(stream.clock);
  }
  copy_values(to, from);
}

// A copy of other strides or another dtype goes through memory of the device, and through pageable memory of the host.
bool goes_straight(const at::Tensor& to, const at::Tensor& from) {
  return to.is_contiguous() && from.is_contiguous() && to.scalar_type() == from.scalar_type() &&
         to.is_conj() == from.is_conj() && to.is_neg() == from.is_neg() && to.sizes().equals(from.sizes());
}

void copy_across(const at::Tensor& to, const at::Tensor& from, bool non_blocking) {
  bool out = is_on_device(from);
  const auto& far = out ? from : to;
  const auto& near = out ? to : from;
  c10::OptionalDeviceGuard guard(far.device());
  bool straight = goes_straight(to, from);
  at::Tensor between;
  if (!straight && from.numel())
    between = empty_strided(from.sizes(), from.strides(), to.scalar_type(), far.device());

  Lock lock;
  auto& stream = current_stream(far.device().index());
  auto epoch = launch(stream);
  note(far, stream, epoch, !out);
  auto* address = near.numel() ? near.data_ptr() : nullptr;
  bool pinned = straight && address && is_pinned(address);
  if (pinned) launch_copy(address, far.data_ptr(), size_t(near.nbytes()), out, stream, epoch);
  if (!(pinned && out)) copy_values(to, from);  // after: an earlier copy into this memory has run now
  if (!(pinned && non_blocking)) host_waits(stream.clock);
}

at::Tensor& copy(at::Tensor& self, const at::Tensor& source, bool non_blocking) {
  if (is_on_device(self) && is_on_device(source))
    copy_on_devices(self, source);
  else
    copy_across(self, source, non_blocking);
  return self;
}

at::Scalar item(const at::Tensor& tensor) {
  {
    Lock lock;
    auto& stream = current_stream(tensor.device().index());
    note(tensor, stream, launch(stream), false);
    host_waits(stream.clock);
  }
  return on_host(tensor).item();
}

// The math kernel of attention: what a device has beside it is not here.
int64_t choose_attention(const at::Tensor&, const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&,
                         double, bool, std::optional<double>, bool) {
  return 0;
}

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("copy_", &copy);
  m.impl("_local_scalar_dense", &item);
  m.impl("_fused_sdp_choice", &choose_attention);
}

}  // namespace
}  // namespace emulated
