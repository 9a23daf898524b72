"""One or two numbers that stand for the values of a saved tensor, computed where the tensor is.

A fingerprint changes with every bit of the tensor, and with the order of its elements in the ways in which programs
change it: shuffled rows, shuffled columns. It is not a cryptographic hash, and two tensors with the same values and
different strides have the same fingerprint.

NOTE [ What the bits of a tensor are ]
The bits in memory, beneath everything that is only metadata. A wrapper of a torch.func transform is removed, and
transforms are bypassed, because the fingerprint of a forward in `jacrev` is compared after the transform has ended: a
tensor that `vmap` batches has the bits of the whole batch. A subclass that wraps other tensors has their bits. A lazily
conjugated or negated tensor is materialised first: it may come back from a store as a materialised copy.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from torchremat._compat.modes import without_torch_function
from torchremat._compat.tensors import is_dense
from torchremat._compat.transforms import below_transforms, transform_level_of, without_wrappers
from torchremat.ambient.hidden import hiding
from torchremat.errors import UnsupportedError
from torchremat.tensors.metadata import span_of
from torchremat.tensors.parts import PLAIN_CLASSES, inner_of

# The most bytes that Python hashes sooner than NumPy adds them up.
_HASHED_BYTES = 32 << 10
# The most bytes of a tensor with gaps that are copied to be hashed.
_GATHERED_BYTES = 512 << 10
# Words of a row, and the most words of which each is weighted by itself.
_ROW, _SMALL = 1024, 4096
_WEIGHTS = np.arange(1, 2 * _SMALL + 1, 2)
_add = np.add.reduce


def fingerprint(tensor: Tensor, *, by_memory: bool = False) -> Tensor:
    """Return the fingerprint of a tensor: two int64 on its device, without waiting for it.

    Args:
        tensor: Any shape, dtype and layout; a tensor without elements has a fingerprint as well.
        by_memory: Whether to take dimensions in the order of their strides. A transposed tensor need not be copied for
            that, and has another fingerprint than an equal one that is not.

    Raises:
        UnsupportedError: The bits of its class cannot be read.
    """
    with torch.no_grad(), below_transforms(), hiding():
        return _of(without_wrappers(tensor), type(tensor).__name__, by_memory)


def hash_here(tensor: Tensor) -> int | None:
    """Return a hash of the bits of a tensor on the host, in memory order if it is dense; None of some tensors.

    None of tensors elsewhere, of those whose bits are not in their own memory, and of large ones with gaps.
    It holds in this process only. No operator runs, and no memory is allocated that a recording would see: a tensor of
    a few kilobytes takes a microsecond or two, where the operators of a fingerprint take thirty.
    """
    if type(tensor) not in PLAIN_CLASSES or not tensor.is_cpu or transform_level_of(tensor) != -1:
        return None
    if tensor.layout is not torch.strided or tensor.is_neg() or tensor.is_conj():
        return None
    if tensor._is_zerotensor():  # like lazily negated and conjugated ones: what it stands for is not in its memory
        return None
    size = tensor.nbytes
    if not is_dense(tensor):
        return hash(_gather(tensor)) if size <= _GATHERED_BYTES else None
    if size <= _HASHED_BYTES:
        return hash(ctypes.string_at(tensor.data_ptr(), size))
    # As in a fingerprint: sums of rows and of columns.
    whole = size // (8 * _ROW) * _ROW
    memory = _memory(tensor, size)
    words = np.frombuffer(memory, np.int64, whole).reshape(-1, _ROW)
    return hash((_add(words, 1).tobytes(), _add(words, 0).tobytes(), memory[8 * whole :].tobytes()))


def _gather(tensor: Tensor) -> bytes:
    """Return the bits of a tensor on the host, element by element."""
    shape, strides, size = tensor.shape, tensor.stride(), tensor.element_size()
    memory = _memory(tensor, span_of(shape, strides) * size)
    return np.ndarray(shape, f"V{size}", memory, 0, [stride * size for stride in strides]).tobytes()


def _memory(tensor: Tensor, size: int) -> memoryview:
    """Return the bytes of a tensor on the host from its first element on."""
    return memoryview((ctypes.c_char * size).from_address(tensor.data_ptr())).cast("B")


def alike(one: Tensor, other: Tensor) -> bool:
    """Return whether two fingerprints are equal, which waits for their device."""
    with below_transforms(), hiding():
        return torch.equal(one, other)


def differing(ones: Sequence[Tensor], others: Sequence[Tensor]) -> list[bool]:
    """Return which fingerprints differ, pair by pair, which waits for their device once."""
    with torch.no_grad(), below_transforms(), hiding():
        return (torch.stack(tuple(ones)) != torch.stack(tuple(others))).any(1).tolist()


def _of(tensor: Tensor, name: str, by_memory: bool) -> Tensor:
    # See NOTE [ What the bits of a tensor are ]
    if tensor.is_meta:
        return torch.zeros(2, dtype=torch.int64)
    kind = type(tensor)
    if hasattr(kind, "trigger_wait"):  # a collective may still be writing to the wrapped tensor
        return _of(cast("Any", tensor).trigger_wait(), name, by_memory)
    if kind is not Tensor and hasattr(kind, "__tensor_flatten__"):
        return _of_parts(tensor, name, by_memory)
    if not _has_memory(kind):
        raise UnsupportedError(
            f'check="values": the values of a {name} that a region saves cannot be compared. Check its metadata, '
            'check="metadata", or only regions without such tensors.'
        )
    with without_torch_function():
        words, rest = _words(_plain(tensor, by_memory=by_memory))
        if words.device.type == "cpu" and type(words) is Tensor:
            # Many short operators: NumPy calls them sooner, and a profiler that records allocations slows torch's down.
            parts = _sums(np.from_dlpack(words), np.from_dlpack(rest))
            return torch.from_numpy(np.concatenate(parts))
        return torch.cat(_sums(words, rest))


def _sums(words: Any, rest: Any) -> tuple[Any, Any]:
    """Return the two numbers of a fingerprint, in the same arithmetic for tensors and for NumPy's arrays."""
    count = math.prod(words.shape)
    if count <= _SMALL:
        return _weigh(words), words.sum(0, keepdims=True) + 3 * _weigh(rest)
    # Sums of rows and of columns: reading a long tensor costs the most, and sums are read at once.
    whole = count // _ROW * _ROW
    square = words[:whole].reshape(-1, _ROW)
    return _weigh(square.sum(1)), _weigh(square.sum(0)) + 3 * _weigh(words[whole:]) + 5 * _weigh(rest)


def _weigh(numbers: Any) -> Any:
    # Odd weights lose no bit; overflow wraps around. Words of round numbers differ in their high bits alone, which the
    # weights would shift out: they are mixed into the low ones.
    mixed = numbers ^ (numbers >> 31)
    count = math.prod(numbers.shape)
    if isinstance(numbers, Tensor):
        weights: Any = torch.arange(1, 2 * count + 1, 2, device=numbers.device)
    else:
        weights = _WEIGHTS[:count] if count <= _SMALL else np.arange(1, 2 * count + 1, 2)
    return (mixed * weights).sum(0, keepdims=True)


def _of_parts(tensor: Tensor, name: str, by_memory: bool) -> Tensor:
    whole = torch.zeros(2, dtype=torch.int64, device=tensor.device)
    for place, inner in enumerate(inner_of(tensor).values()):
        if isinstance(inner, Tensor):
            whole = whole + (2 * place + 1) * _of(inner, name, by_memory).to(tensor.device, non_blocking=True)
    return whole


def _has_memory(kind: type[Tensor]) -> bool:
    """Return whether tensors of a class hold their elements in their own memory, whatever its name."""
    return getattr(kind, "__torch_dispatch__", None) is getattr(Tensor, "__torch_dispatch__", None)


def _words(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return the bits of a tensor as int64 words, and the bytes that are left over."""
    flat = values.contiguous().view(-1)
    size = flat.element_size()
    if flat.storage_offset() * size % 8 or flat.stride(0) != 1:  # a single element may have any stride
        flat = flat.clone(memory_format=torch.contiguous_format)
    whole = flat.numel() * size // 8 * 8 // size
    return flat[:whole].view(torch.int64), flat[whole:].view(torch.uint8).long()


def _plain(tensor: Tensor, *, by_memory: bool) -> Tensor:
    tensor = tensor.detach()
    if tensor._is_zerotensor():  # zero tangents of forward mode: a storage with a size and no memory
        tensor = tensor.new_zeros(tensor.shape)
    if tensor.is_quantized:
        tensor = tensor.int_repr()  # NumPy takes no view of one
    # A copy, if it is lazily negated or conjugated: it may come back materialised.
    tensor = tensor.resolve_neg()
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    if by_memory and not tensor.is_contiguous():
        strides = tensor.stride()
        tensor = tensor.permute(sorted(range(tensor.dim()), key=lambda place: -strides[place]))
    return tensor if tensor.numel() else tensor.new_zeros((), dtype=torch.int64)
