"""Tensors that are too many to copy, and that a forward may write past their version counters: told by their bits.

Where reached code names an attribute such as `data` (see `code.py`), the parameters and the large tensors that it could
write to are hashed before a forward and after it. A recompute that reads one that has changed raises.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from torchremat.errors import UnsupportedError
from torchremat.tensors.fingerprints import fingerprint, hash_here


class Stamp(NamedTuple):
    """A tensor, and what stands for its bits."""

    tensor: Tensor
    bits: int | Tensor


def stamped(tensors: Iterable[Tensor]) -> list[Stamp]:
    """Return the stamps of tensors; those whose bits cannot be read are left out."""
    return [Stamp(one, bits) for one in tensors if (bits := _bits(one)) is not None]


def changed(stamps: Iterable[Stamp]) -> list[Tensor]:
    """Return the tensors whose bits are others now."""
    return [tensor for tensor, bits in stamps if not _same(_bits(tensor), bits)]


def _same(now: int | Tensor | None, then: int | Tensor) -> bool:
    if isinstance(now, Tensor) and isinstance(then, Tensor):
        return now.device == then.device and torch.equal(now, then)
    return isinstance(now, int) and isinstance(then, int) and now == then


def _bits(tensor: Tensor) -> int | Tensor | None:
    found = hash_here(tensor)
    if found is not None:
        return found
    try:
        return None if tensor.device.type == "meta" else fingerprint(tensor)
    except UnsupportedError:
        return None
