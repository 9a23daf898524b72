"""Bytes that are held by others: a view of them as long as they live and nobody has written to them."""

from __future__ import annotations

from typing import TYPE_CHECKING
from weakref import ref

import torch
from torch import Tensor, UntypedStorage

if TYPE_CHECKING:
    from torchremat.stores.geometry import Lies


class Counter:
    """Whether a tensor has been written since, by itself or by a view of it; it does not keep its storage alive.

    NOTE [ A version without a tensor ]
    Versions are counted by tensors, not by storages, and a tensor keeps its storage. But a detached alias that is given
    other data, of no bytes, still counts with the tensor that it was detached from; and an alias of such a counter that
    is given a view of the storage counts with it again.

    Args:
        tensor: The tensor.
    """

    __slots__ = ("_alias", "_version")

    def __init__(self, tensor: Tensor) -> None:
        self._version = tensor._version
        self._alias = tensor.detach()
        # See NOTE [ A version without a tensor ]
        self._alias.data = _empty(tensor.dtype, tensor.device)

    @property
    def has_moved(self) -> bool:
        """Whether it has been written."""
        return self._alias._version != self._version

    def counting(self, data: Tensor) -> Tensor:
        """Return an alias of a tensor, writes to which this counts."""
        alias = self._alias.detach()
        alias.data = data
        return alias


class WeakBytes:
    """A storage at a version, which it does not keep alive.

    Args:
        tensor: What the storage is reached through, without graph.
        start: The byte of the storage at which offset 0 of what is asked for lies; it may be negative.
    """

    __slots__ = ("_bytes", "_counters", "_start", "_storage")

    def __init__(self, tensor: Tensor, start: int = 0) -> None:
        storage = tensor.untyped_storage()
        self._storage = ref(storage)
        self._bytes = storage.nbytes()
        self._start = start
        self._counters = [Counter(tensor)]

    def watch(self, tensor: Tensor) -> None:
        """Count the writes to one more tensor of the storage: aliases need not count together (`unsafe_chunk`)."""
        self._counters.append(Counter(tensor))

    def storage(self) -> UntypedStorage | None:
        """Return the storage if it lives and holds what it held."""
        storage = self._storage()
        # Sharded parameters give their memory back and keep the storage.
        if storage is None or storage.nbytes() != self._bytes:
            return None
        return None if any(one.has_moved for one in self._counters) else storage

    def view(self, storage: UntypedStorage, place: Lies) -> Tensor:
        """Return a tensor that lies in the storage as `place` says; writes to it are counted."""
        offset = place.offset + self._start // place.dtype.itemsize
        lying = torch.empty(0, dtype=place.dtype, device=storage.device)
        return self._counters[0].counting(lying.set_(storage, offset, place.size, place.stride))


_EMPTY: dict[tuple[torch.dtype, torch.device], Tensor] = {}


def _empty(dtype: torch.dtype, device: torch.device) -> Tensor:
    found = _EMPTY.get((dtype, device))
    if found is None:
        found = torch.empty(0, dtype=dtype, device=device)
        if type(found) is Tensor and not found.is_inference():  # no mode has made something else of it
            _EMPTY[dtype, device] = found
    return found
