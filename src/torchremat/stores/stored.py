"""The object that autograd holds in place of a tensor that a store has."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from torch import Tensor

from torchremat._compat.autograd import negated
from torchremat.stores.geometry import TensorPlace
from torchremat.stores.held import InCatalog
from torchremat.stores.records import Record
from torchremat.stores.schedule import Schedule, Turn
from torchremat.tensors.metadata import Metadata
from torchremat.tensors.packed import Owner


class Stored(InCatalog):
    """A saved tensor. Dropping it is the only way to free it.

    Args:
        tensor: The tensor.
        record: The record of its storage.
        schedule: Gets its turn, and is told when it is asked for.

    Attributes:
        record: The record of its storage.
        place: Its place there.
    """

    __slots__ = ("__weakref__", "_is_conjugated", "_is_negated", "_schedule", "_turn", "place", "record")

    def __init__(self, tensor: Tensor, record: Record, schedule: Schedule) -> None:
        self.record = record
        self.place = TensorPlace(tensor)
        self._is_conjugated = tensor.is_conj()
        self._is_negated = tensor.is_neg()
        self._schedule = schedule
        self._turn = Turn(partial(record.prefetch, self.place))
        schedule.add(self._turn, tensor.numel() * tensor.itemsize)

    def get(self) -> Tensor:
        """Return the tensor: its values, strides and alignment, without graph.

        Raises:
            StoreError: The tensor cannot be brought back.
            MutationError: The tensor was kept in place, and has been written in place since.
        """
        self._schedule.asked(self._turn)
        tensor = self.record.get(self.place)
        if self._is_conjugated:
            tensor = tensor.conj()
        return negated(tensor) if self._is_negated else tensor

    @property
    def metadata(self) -> Metadata:
        """The metadata of the tensor."""
        return self.place.size, self.place.dtype, self.record.device, self.place.stride

    @property
    def owners(self) -> Iterable[Owner]:
        """Its record, which holds loaded buffers as long as other saved tensors need them."""
        return (self.record,)

    def let_go(self) -> None:
        """Release its record."""
        del self.record, self._turn


def as_in_memory(tensor: Tensor) -> Tensor:
    """Return an alias of the tensor with the values as they are in memory, without its graph."""
    alias = tensor.detach()
    if tensor.is_conj():
        alias = alias.conj()
    return negated(alias) if tensor.is_neg() else alias
