"""The metadata of a saved tensor, without its values."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from torchremat._compat.tensors import is_nested_strided

# Shape, dtype, device, and strides in elements; for a tensor without strides its layout instead.
Metadata = tuple[torch.Size, torch.dtype, torch.device, "tuple[int, ...] | torch.layout"]


# In place of a size that the items of a nested tensor do not share.
RAGGED = -1


def metadata_of(tensor: Tensor) -> Metadata:
    """Return the metadata of a tensor."""
    try:
        return tensor.shape, tensor.dtype, tensor.device, tensor.stride()
    except RuntimeError:  # sparse, opaque and nested tensors have no strides
        return shape_of(tensor), tensor.dtype, tensor.device, tensor.layout


def shape_of(tensor: Tensor) -> torch.Size:
    """Return the shape of a tensor, with `RAGGED` where one of the older nested layout has none."""
    return torch.Size(_sizes(tensor)) if is_nested_strided(tensor) else tensor.shape


def _sizes(tensor: Tensor) -> Iterator[int]:
    for dimension in range(tensor.ndim):
        try:
            yield tensor.size(dimension)
        except RuntimeError:
            yield RAGGED


def numbers_of(sizes: Iterable[int]) -> tuple[int, ...]:
    """Return a shape or strides as plain numbers, `RAGGED` where the items of a nested tensor have different ones."""
    return tuple([RAGGED if isinstance(one, torch.SymInt) else one for one in sizes])


def covers(wanted: torch.device, device: torch.device) -> bool:
    """Return whether a device is the wanted one; "cuda" without an index stands for all of its type."""
    return device.type == wanted.type and wanted.index in (None, device.index)


def empty_of(metadata: Metadata) -> Tensor:
    """Return a tensor of some metadata, with strides, and with any values."""
    shape, dtype, device, strides = metadata
    assert isinstance(strides, tuple)
    return torch.empty_strided(shape, strides, dtype=dtype, device=device)


def span_of(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Return how many elements of its memory a tensor spans, from the first one to the last; it has at least one."""
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


def version_of(tensor: Tensor) -> int:
    """Return how often a tensor was written in place, or -1 for an inference tensor, which does not count."""
    return -1 if tensor.is_inference() else tensor._version


def agree(then: Metadata, now: Metadata) -> bool:
    """Return whether two tensors are alike in shape, dtype, device, and in layout or the class of their strides.

    Strides are of one class if they order the dimensions in the same way and repeat elements along the same ones:
    kernels then traverse both tensors alike. The distance between elements may differ: a store may change it.
    """
    if then[:3] != now[:3]:
        return False
    if isinstance(then[3], tuple) and isinstance(now[3], tuple):
        return _stride_class(then[0], then[3]) == _stride_class(now[0], now[3])
    return then[3] == now[3]


def _stride_class(shape: torch.Size, strides: tuple[int, ...]) -> tuple[list[int], list[int]]:
    if 0 in shape:
        return [], []
    # The stride of a dimension of size one means nothing.
    long = [dimension for dimension, size in enumerate(shape) if size > 1]
    repeated = [dimension for dimension in long if strides[dimension] == 0]
    order = sorted((one for one in long if strides[one] != 0), key=lambda one: -strides[one])
    return order, repeated


def with_strides(tensor: Tensor, then: Metadata) -> Tensor:
    """Return a tensor from a store with its original strides, since kernels choose by them.

    Args:
        tensor: The tensor from the store; any strides.
        then: The metadata of the stored tensor. If the shape, the dtype or the layout differs, the tensor is returned
            unchanged: reporting that is the job of the code that compares them.
    """
    now = metadata_of(tensor)
    strides = then[3]
    if now[3] == strides or now[:2] != then[:2] or not isinstance(strides, tuple) or not isinstance(now[3], tuple):
        return tensor
    single = tensor[without_repeats(then[0], strides)]
    packed = torch.empty_strided(single.shape, _packed(single.shape, strides), dtype=tensor.dtype, device=tensor.device)
    return packed.copy_(single).expand(then[0])


def without_repeats(shape: torch.Size, strides: tuple[int, ...]) -> tuple[slice, ...]:
    """Return the index of each element once: along a dimension of stride 0 only one exists, repeated."""
    return tuple(
        slice(0, 1) if stride == 0 and size else slice(None) for size, stride in zip(shape, strides, strict=True)
    )


def dense(shape: torch.Size, strides: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides that a tensor has without its gaps, 0 where it repeats an element; its own if it has none."""
    repeats = [stride == 0 and size != 1 for size, stride in zip(shape, strides, strict=True)]
    single = torch.Size(1 if repeated else size for size, repeated in zip(shape, repeats, strict=True))
    packed = _packed(single, strides)
    if all(size == 1 or found == stride for size, found, stride in zip(single, packed, strides, strict=True)):
        return strides
    return tuple(0 if repeated else stride for stride, repeated in zip(packed, repeats, strict=True))


def _packed(shape: torch.Size, strides: tuple[int, ...]) -> list[int]:
    """Return the strides of a tensor without gaps whose dimensions are ordered as `strides` orders them."""
    packed, step = [0] * len(shape), 1
    for dimension in sorted(range(len(shape)), key=lambda one: (strides[one], shape[one])):
        packed[dimension] = step
        step *= shape[dimension]
    return packed
