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

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from torchremat._compat.modes import without_torch_function
from torchremat._compat.transforms import below_transforms, without_wrappers
from torchremat.ambient.hidden import hiding
from torchremat.errors import UnsupportedError

# Elements of a row long enough for kernels, and of a tensor small enough for the split not to matter.
_LONG, _SMALL = 256, 4096


def fingerprint(tensor: Tensor) -> Tensor:
    """Return the fingerprint of a tensor: two int64 on its device, without waiting for it.

    Args:
        tensor: Any shape, dtype and layout; a tensor without elements has a fingerprint as well.

    Raises:
        UnsupportedError: The bits of its class cannot be read.
    """
    with torch.no_grad(), below_transforms(), hiding():
        return _of(without_wrappers(tensor), type(tensor).__name__)


def alike(one: Tensor, other: Tensor) -> bool:
    """Return whether two fingerprints are equal, which waits for their device."""
    with below_transforms(), hiding():
        return torch.equal(one, other)


def differing(ones: Sequence[Tensor], others: Sequence[Tensor]) -> list[bool]:
    """Return which fingerprints differ, pair by pair, which waits for their device once."""
    with torch.no_grad(), below_transforms(), hiding():
        return (torch.stack(tuple(ones)) != torch.stack(tuple(others))).any(1).tolist()


def _of(tensor: Tensor, name: str) -> Tensor:
    # See NOTE [ What the bits of a tensor are ]
    kind = type(tensor)
    if hasattr(kind, "trigger_wait"):  # a collective may still be writing to the wrapped tensor
        return _of(cast("Any", tensor).trigger_wait(), name)
    if kind is not Tensor and hasattr(kind, "__tensor_flatten__"):
        return _of_parts(tensor, name)
    if not _has_memory(kind):
        raise UnsupportedError(
            f'check="values": the values of a {name} that a region saves cannot be compared. Check its metadata, '
            'check="metadata", or only regions without such tensors.'
        )
    with without_torch_function():
        values = _plain(tensor)
        if values.element_size() == 1:
            words, rest = _words(values)
            return torch.stack((_ordered(words), _ordered(rest)))
        if values.dim() == 0:
            return _hashed(values).expand(2)
        # By rows, whose order counts, and by alternate parts of a row in each of its dimensions.
        inner = _dimensions_of_a_row(values)
        odd = _hashed(values[..., ::2])
        for place in range(1, inner):
            odd = odd + (2 * place + 1) * _hashed(values[(..., slice(None, None, 2), *[slice(None)] * place)])
        return torch.stack((_ordered(_hashed(values, inner).flatten()), odd))


def _of_parts(tensor: Tensor, name: str) -> Tensor:
    names, _ = cast("Any", tensor).__tensor_flatten__()
    whole = torch.zeros(2, dtype=torch.int64, device=tensor.device)
    for place, part in enumerate(cast("list[str]", names)):
        inner = getattr(tensor, part)
        if isinstance(inner, Tensor):
            whole = whole + (2 * place + 1) * _of(inner, name).to(tensor.device, non_blocking=True)
    return whole


def _has_memory(kind: type[Tensor]) -> bool:
    """Return whether a class of tensors has its elements in memory of its own, whatever its name."""
    return getattr(kind, "__torch_dispatch__", None) is getattr(Tensor, "__torch_dispatch__", None)


def _dimensions_of_a_row(values: Tensor) -> int:
    """Return how many of the last dimensions form a row: several for large tensors, since kernels like long rows."""
    dimensions, elements = 1, values.shape[-1]
    if values.numel() > _SMALL:
        while elements < _LONG and dimensions + 1 < values.dim():
            dimensions += 1
            elements *= values.shape[-dimensions]
    return dimensions


def _ordered(numbers: Tensor) -> Tensor:
    # Odd weights lose no bit; overflow wraps around.
    return (numbers * torch.arange(1, 2 * numbers.numel() + 1, 2, device=numbers.device)).sum()


def _hashed(values: Tensor, inner: int | None = None) -> Tensor:
    """Return the hash of a tensor, or one for each row of the last dimensions."""
    if inner is None:
        return torch.hash_tensor(values).view(torch.int64)
    return torch.hash_tensor(values, dim=tuple(range(-inner, 0))).view(torch.int64)


def _words(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return the bytes of a tensor of one-byte elements as int64 words, and the leftover bytes."""
    # The exclusive or of bytes has few bits; for a mask it has a single one.
    flat = values.contiguous().view(torch.uint8).flatten()
    whole = flat.numel() // 8 * 8
    return flat[:whole].view(torch.int64), flat[whole:].long()


def _plain(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    if tensor.is_complex():
        # A copy, if it is lazily conjugated: it may come back materialised.
        tensor = torch.view_as_real(tensor.resolve_conj())
    return tensor if tensor.numel() else tensor.new_zeros((), dtype=torch.int64)
