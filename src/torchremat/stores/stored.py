"""The object that autograd holds in place of a tensor that a store has, and the prefetch of the next ones.

Nodes run from the last one made to the first, and each asks for its saved tensors in the order in which it saved them.
Autograd does not guarantee this, so it is only a hint: whatever the order, each tensor is right, and only reading it
may take a wait.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from weakref import ReferenceType, ref

from torch import Tensor

from torchremat._compat.autograd import current_graph_task, negated
from torchremat._compat.modes import sequence_number
from torchremat.stores.geometry import TensorPlace
from torchremat.stores.in_catalog import InCatalog
from torchremat.stores.records import Record
from torchremat.tensors.metadata import Metadata
from torchremat.tensors.packed import Owner


@dataclass(eq=False, slots=True, weakref_slot=True)
class Turn:
    """The turn of one saved tensor, which owns it.

    Attributes:
        prefetch: Lets the store begin to bring the tensor back; returns how many bytes that will be, 0 if nothing needs
            to be done.
        number: Its number in the order; negative before that is known.
    """

    prefetch: Callable[[], int]
    number: int = -1


class Schedule:
    """Saved tensors in the order in which they are likely to be asked for.

    Args:
        window_bytes: How many bytes may be in transfer at once; None for twice the largest stored tensor.
    """

    def __init__(self, window_bytes: int | None = None) -> None:
        self._window_bytes = window_bytes
        self._lock = threading.Lock()
        self._added: list[tuple[int, ReferenceType[Turn]]] = []
        self._order: list[ReferenceType[Turn]] = []
        self._is_sorted = True
        self._task = -1
        self._next = 0
        self._largest = 0
        # The transfers in progress: the bytes of each.
        self._coming: dict[ReferenceType[Turn], int] = {}

    def add(self, turn: Turn, stored_bytes: int) -> None:
        """Append the turn of a tensor that has just been saved, with its stored bytes."""
        with self._lock:
            self._largest = max(self._largest, stored_bytes)
            if len(self._added) >= 1024 and len(self._added) >= 2 * len(self._order):
                self._sort()
            self._added.append((-sequence_number(), ref(turn)))
            self._is_sorted = False

    def asked(self, turn: Turn) -> None:
        """Prefetch the tensors after the one that is asked for now, within the window."""
        task = current_graph_task()
        if task < 0 or self._window_bytes == 0:
            return
        with self._lock:
            if not self._is_sorted:
                self._sort()
            if task != self._task:
                self._task, self._next = task, 0
                self._coming.clear()
            coming = self._coming
            coming.pop(ref(turn), None)
            self._next = max(self._next, turn.number + 1)
            window = 2 * self._largest if self._window_bytes is None else self._window_bytes
            on_their_way = sum(count for alive, count in coming.items() if alive() is not None)
            while on_their_way < window and self._next < len(self._order):
                following = self._order[self._next]
                self._next += 1
                one = following()
                count = 0 if one is None else one.prefetch()
                if count:
                    coming[following] = count
                    on_their_way += count

    def _sort(self) -> None:
        self._added = [(key, alive) for key, alive in self._added if alive() is not None]
        self._added.sort(key=lambda one: one[0])
        self._order = [alive for _, alive in self._added]
        for number, alive in enumerate(self._order):
            turn = alive()
            if turn is not None:
                turn.number = number
        self._is_sorted = True
        self._next = 0


class Stored(InCatalog):
    """A saved tensor. Dropping it is the only way to free it."""

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
