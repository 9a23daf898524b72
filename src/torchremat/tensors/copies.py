"""Copies of tensors: views of one another wherever the tensors are, and equal to the last bit."""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor

from torchremat._compat.tensors import is_nested_strided
from torchremat.tensors.metadata import shape_of, span_of
from torchremat.tensors.parts import is_wrapper, parts_of, sparse_parts


def again(tensors: list[Tensor], values: list[Tensor] | None = None) -> list[Tensor]:
    """Return a copy of each tensor, without its graph; tensors that share a storage have copies that share one.

    Args:
        tensors: Any shapes; a tensor that appears several times has one copy.
        values: The values for the copies, of the same shapes; the values of `tensors` if None.
    """
    values = tensors if values is None else values
    distinct = {id(tensor): (tensor, value) for tensor, value in zip(tensors, values, strict=True)}
    shared = Counter(_storage_of(tensor) for tensor, _ in distinct.values())
    storages: dict[int, torch.UntypedStorage] = {}
    copies: dict[int, Tensor] = {}
    with torch.no_grad():
        for tensor, value in distinct.values():
            key = _storage_of(tensor)
            if shared[key] == 1:
                copies[id(tensor)] = value.clone()
                continue
            if key not in storages:
                storages[key] = tensor.untyped_storage().clone()
            copy = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
            copy.set_(storages[key], tensor.storage_offset(), tensor.shape, tensor.stride())
            if value is not tensor:
                copy.copy_(value)
            copies[id(tensor)] = copy
    return [copies[id(tensor)] for tensor in tensors]


def apart(tensor: Tensor) -> Tensor:
    """Return a copy of a tensor in new memory, with its strides and repeated elements, without its graph."""
    with torch.no_grad():
        if not _is_plain(tensor) or tensor.numel() == 0:
            return tensor.detach().clone()
        # Copy the bytes in between too: then no element needs to be told from another.
        span = tensor.detach().as_strided((span_of(tensor.shape, tensor.stride()),), (1,)).clone()
        return span.as_strided(tensor.shape, tensor.stride())


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors have one shape, type and every bit in common: -0.0 is not 0.0, and a NaN is itself."""
    if shape_of(one) != shape_of(other) or one.dtype != other.dtype:
        return False
    if one.is_meta and other.is_meta:
        return True  # neither has bits
    if is_wrapper(one) and not one.is_nested:  # its class compares values, that of DTensors on all processes at once
        return torch.equal(one, other) or bool(torch.all((one == other) | ((one != one) & (other != other))))
    pairs = zip(_strided(one.detach()), _strided(other.detach()), strict=True) if one.layout is other.layout else None
    return pairs is not None and all(torch.equal(_bits(part), _bits(its)) for part, its in pairs)


_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _bits(tensor: Tensor) -> Tensor:
    if tensor.is_quantized:
        return tensor  # `torch.equal` knows its parts
    plain = tensor.to_dense() if tensor.is_mkldnn else tensor.resolve_conj().resolve_neg()
    plain = torch.view_as_real(plain) if plain.is_complex() else plain
    return plain.view(_WORDS[plain.element_size()])


def _storage_of(tensor: Tensor) -> int:
    # Sparse and other tensors have no storage, empty tensors have no address; they share nothing.
    address = tensor.untyped_storage().data_ptr() if _is_plain(tensor) else 0
    return address or id(tensor)


def _is_plain(tensor: Tensor) -> bool:
    return type(tensor) is Tensor and tensor.layout is torch.strided and not tensor.is_nested


def _strided(tensor: Tensor) -> tuple[Tensor, ...]:
    if tensor.is_nested:
        return tuple(tensor.unbind() if is_nested_strided(tensor) else parts_of(tensor))
    return sparse_parts(tensor) or (tensor,)
