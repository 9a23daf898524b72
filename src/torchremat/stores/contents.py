"""The metadata of a stored tensor, and how the tensor is rebuilt."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from torchremat.tensors.metadata import dense
from torchremat.tensors.sizes import format_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Content:
    """The metadata that a store needs to give a tensor back.

    NOTE [ In a line ]
    Kernels are selected by strides, and the selected kernel decides the rounding. So a store holds the elements in
    memory order, in one dimension and each once, and the returned tensor has its original strides, without any gaps.

    Attributes:
        shape: Its shape.
        strides: The strides that it comes back with, 0 where an element stands for several.
        dtype: Its dtype.
        device: Its device.
        size_bytes: The bytes of its elements, each once.
    """

    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    size_bytes: int

    def empty(self, device: torch.device | None = None) -> Tensor:
        """Return fresh memory for its elements in a line, on its own device or another."""
        count = self.size_bytes // self.dtype.itemsize
        return torch.empty(count, dtype=self.dtype, device=self.device if device is None else device)

    def line(self, tensor: Tensor) -> Tensor:
        """Return the elements of the tensor in a line: a view if it has no gaps, else a copy."""
        order = sorted(range(tensor.dim()), key=lambda one: -self.strides[one])
        single = tensor.detach().permute(order)
        for place, dimension in enumerate(order):
            if self.strides[dimension] == 0 and self.shape[dimension] > 1:
                single = single.narrow(place, 0, 1)
        return single.reshape(-1)

    def back(self, line: Tensor) -> Tensor:
        """Return the tensor whose elements are in a line."""
        return line.as_strided(self.shape, self.strides)

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"a tensor of shape {tuple(self.shape)}, {dtype}, {format_bytes(self.size_bytes)}, from {self.device}"


def content_of(tensor: Tensor) -> Content:
    """Return the metadata of a tensor."""
    shape, strides = tensor.shape, tensor.stride()
    size_bytes = tensor.nbytes
    if not tensor.is_contiguous():
        strides = dense(shape, strides)
        for size, stride in zip(shape, strides, strict=True):
            size_bytes //= size if stride == 0 else 1
    return Content(shape=shape, strides=strides, dtype=tensor.dtype, device=tensor.device, size_bytes=size_bytes)
