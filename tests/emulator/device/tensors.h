// Tensors of the device: how they are made, and how the CPU's kernels see their memory.
#pragma once
#include "memory.h"

#include <ATen/core/Tensor.h>

namespace emulated {

bool is_on_device(const at::Tensor& tensor);
Block* block_of(const at::Tensor& tensor);

at::Tensor empty_strided(c10::IntArrayRef sizes, c10::IntArrayRef strides, c10::ScalarType dtype, c10::Device device);

// The same memory as a tensor of the CPU. A kernel that resizes it gives it memory of the host.
at::Tensor on_host(const at::Tensor& tensor);

// A tensor of the device on the storage of `base`, laid out as `like`.
at::Tensor view_like(const at::Tensor& base, const at::Tensor& like);

// Gives `tensor` the layout and content of `from`, which is on the host.
void resize_to(const at::Tensor& tensor, const at::Tensor& from);

}  // namespace emulated
