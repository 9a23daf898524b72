#include "tensors.h"

#include <ATen/EmptyTensor.h>
#include <ATen/native/TensorFactories.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <cstring>

namespace emulated {
namespace {

const c10::DispatchKeySet kKeys(c10::DispatchKey::CUDA);

size_t bytes_for(c10::IntArrayRef sizes, c10::IntArrayRef strides, size_t itemsize, int64_t offset) {
  return at::detail::computeStorageNbytes(sizes, strides, itemsize, offset);
}

void grow(const c10::Storage& storage, size_t bytes) {
  if (bytes <= storage.nbytes()) return;
  auto larger = allocate(bytes);
  if (storage.nbytes()) std::memcpy(larger.get(), storage.data(), storage.nbytes());
  storage.set_data_ptr_noswap(std::move(larger));
  storage.set_nbytes(bytes);
}

at::Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<at::Device> device, std::optional<bool> pin, std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_generic(size, &allocator(), kKeys, c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided_op(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                            std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool> pin) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_strided_generic(size, stride, &allocator(), kKeys, c10::dtype_or_default(dtype));
}

// Forward-mode differentiation's zeros, which have no memory.
at::Tensor zeros_without_memory(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                                std::optional<at::Device> device, std::optional<bool>) {
  auto place = device.value_or(c10::Device(c10::kCUDA));
  if (!place.has_index()) place.set_index(current_device());
  auto none = at::native::ZeroTensorAllocator(place);
  return at::detail::empty_generic(size, &none, kKeys | c10::DispatchKeySet(c10::DispatchKey::ZeroTensor),
                                   c10::dtype_or_default(dtype), std::nullopt);
}

at::Tensor as_strided(const at::Tensor& tensor, c10::IntArrayRef size, c10::IntArrayRef stride,
                      std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(tensor, size, stride, offset);
}

at::Tensor view(const at::Tensor& tensor, c10::IntArrayRef size) { return at::native::view(tensor, size); }

at::Tensor reshape_alias(const at::Tensor& tensor, c10::IntArrayRef size, c10::IntArrayRef stride) {
  return at::native::_reshape_alias(tensor, size, stride);
}

const at::Tensor& resize(const at::Tensor& self, c10::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  c10::OptionalDeviceGuard guard(self.device());
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(size);
  if (format) impl->empty_tensor_restride(*format);
  grow(self.storage(), bytes_for(self.sizes(), self.strides(), self.itemsize(), self.storage_offset()));
  return self;
}

at::Tensor& set_storage(at::Tensor& self, at::Storage source, int64_t offset, c10::IntArrayRef size,
                        c10::IntArrayRef stride) {
  c10::OptionalDeviceGuard guard(self.device());
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  impl->set_storage_offset(offset);
  if (stride.data())
    impl->set_sizes_and_strides(size, stride);
  else
    impl->set_sizes_contiguous(size);
  grow(self.storage(), bytes_for(self.sizes(), self.strides(), self.itemsize(), offset));
  return self;
}

at::Tensor& set_whole_storage(at::Tensor& self, at::Storage source) {
  auto count = int64_t(source.nbytes() / self.itemsize());
  return set_storage(self, std::move(source), 0, {count}, {1});
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return set_storage(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

at::Tensor& set_nothing(at::Tensor& self) {
  auto nothing = empty({0}, self.scalar_type(), {}, self.device(), {}, {});
  return set_storage(self, nothing.storage(), 0, {0}, {1});
}

void record_stream(at::Tensor& self, c10::Stream stream) {
  allocator().recordStream(self.storage().data_ptr(), stream);
}

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided_op);
  m.impl("_efficientzerotensor", &zeros_without_memory);
  m.impl("as_strided", &as_strided);
  m.impl("view", &view);
  m.impl("_reshape_alias", &reshape_alias);
  m.impl("resize_", &resize);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("set_.source_Storage", &set_whole_storage);
  m.impl("set_.source_Tensor", &set_tensor);
  m.impl("set_", &set_nothing);
  m.impl("record_stream", &record_stream);
}

}  // namespace

bool is_on_device(const at::Tensor& tensor) { return tensor.defined() && tensor.device().type() == c10::kCUDA; }

Block* block_of(const at::Tensor& tensor) {
  return tensor.has_storage() ? find_block(tensor.storage().data()) : nullptr;
}

at::Tensor empty_strided(c10::IntArrayRef sizes, c10::IntArrayRef strides, c10::ScalarType dtype, c10::Device device) {
  return empty_strided_op(sizes, strides, dtype, {}, device, {});
}

at::Tensor on_host(const at::Tensor& tensor) {
  const auto& storage = tensor.storage();
  auto* data = const_cast<void*>(storage.data());
  c10::Storage same(c10::Storage::use_byte_size_t(), storage.nbytes(), c10::DataPtr(data, c10::Device(c10::kCPU)),
                    c10::GetAllocator(c10::kCPU), /*resizable=*/true);
  auto alias = at::detail::make_tensor<c10::TensorImpl>(std::move(same), c10::DispatchKeySet(c10::DispatchKey::CPU),
                                                        tensor.dtype());
  auto* impl = alias.unsafeGetTensorImpl();
  impl->set_storage_offset(tensor.storage_offset());
  impl->set_sizes_and_strides(tensor.sizes(), tensor.strides());
  if (tensor.is_conj()) alias._set_conj(true);
  if (tensor.is_neg()) alias._set_neg(true);
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
  return alias;
}

at::Tensor view_like(const at::Tensor& base, const at::Tensor& like) {
  const c10::DispatchKeySet of_values({c10::DispatchKey::Conjugate, c10::DispatchKey::Negative});
  auto view = at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(base.storage()),
                                                       base.key_set() - of_values, like.dtype());
  auto* impl = view.unsafeGetTensorImpl();
  impl->set_storage_offset(like.storage_offset());
  impl->set_sizes_and_strides(like.sizes(), like.strides());
  if (like.is_conj()) view._set_conj(true);
  if (like.is_neg()) view._set_neg(true);
  return view;
}

void resize_to(const at::Tensor& tensor, const at::Tensor& from) {
  c10::OptionalDeviceGuard guard(tensor.device());
  auto* impl = tensor.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(from.sizes(), from.strides());
  auto bytes = bytes_for(from.sizes(), from.strides(), from.itemsize(), from.storage_offset());
  impl->set_storage_offset(from.storage_offset());
  grow(tensor.storage(), bytes);
  if (bytes) std::memcpy(const_cast<void*>(tensor.storage().data()), from.storage().data(), bytes);
}

}  // namespace emulated
