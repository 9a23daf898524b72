"""The place of a tensor in its storage: an interval of bytes, or a pattern with gaps."""

from __future__ import annotations

import torch
from torch import Tensor

from torchremat.tensors.metadata import span_of


class TensorPlace:
    """The place of one saved tensor in its storage. The storage's record knows the tensor by this object.

    Attributes:
        size: The tensor's shape.
        stride: Its strides in elements.
        offset: The element of the storage at which it begins.
        dtype: Its dtype.
        start: Its first byte in the storage.
        stop: The byte after its last.
        has_gaps: Whether it skips bytes in between and repeats no element. If elements overlap other than by strides of
            0 it counts as having no gaps: all of its span may be copied, but nothing may be written to it through its
            own strides.
    """

    __slots__ = ("__weakref__", "dtype", "has_gaps", "offset", "size", "start", "stop", "stride")

    def __init__(self, tensor: Tensor) -> None:
        self.size = tensor.shape
        self.stride = tensor.stride()
        self.offset = int(tensor.storage_offset())
        self.dtype = tensor.dtype
        self.start = self.offset * tensor.itemsize
        if tensor.is_contiguous():
            self.stop = self.start + tensor.numel() * tensor.itemsize
            self.has_gaps = False
        else:
            self.stop = self.start + span_of(self.size, self.stride) * tensor.itemsize
            self.has_gaps = _has_gaps(self.size, self.stride)

    @property
    def without_repeats(self) -> tuple[int, ...]:
        """Its shape, with size 1 for each dimension of stride 0."""
        return tuple(1 if stride == 0 and size else size for size, stride in zip(self.size, self.stride, strict=True))


def _has_gaps(shape: torch.Size, strides: tuple[int, ...]) -> bool:
    gaps = False
    reach = 1
    for stride, size in sorted(zip(strides, shape, strict=True)):
        if size == 1 or stride == 0:
            continue
        if stride < reach:
            return False
        gaps = gaps or stride > reach
        reach = stride * (size - 1) + reach
    return gaps


def missing(start: int, stop: int, covered: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the parts of an interval that no covered interval contains, in order."""
    found: list[tuple[int, int]] = []
    for left, right in sorted(covered):
        if right <= start or left >= stop:
            continue
        if left > start:
            found.append((start, left))
        start = max(start, right)
    if start < stop:
        found.append((start, stop))
    return found
