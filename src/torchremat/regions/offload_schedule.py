"""What the calls of one forward have saved, on its way into stores and back, at planned moments.

The life of what a stored unit saves, between two calls of the model that the plan names:

    saved        autograd gets small objects; the memory is held
    put          the unit's last call has returned: the stores begin to read the memory, or what they encode it as
    left         the unit `leaves_after` has returned: the stores are waited for, and both are let go
    begun        the gradient has come to the unit `comes_before`: the stores begin to bring it back
    there        the gradient has come to the unit itself: the stores are waited for, and all of it is held
    gone         its node has run, as ever

So how many bytes are in memory does not depend on how fast a store is, only how long the step takes does.

NOTE [ Who owns a journey ]
The scope that is open, until the forward ends or raises; then the nodes that tell it where the backward is. It has
records weakly, and memory only until that has left: what autograd frees is freed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING
from weakref import ReferenceType, ref

from torch import Tensor

from torchremat._compat.autograd import (
    current_graph_task,
    pop_saved_tensor_hooks,
    push_saved_tensor_hooks,
    top_saved_tensor_hooks,
)
from torchremat.ambient.hidden import hiding
from torchremat.stores.catalog import Catalog, unpack
from torchremat.stores.held import InCatalog
from torchremat.stores.records import Record
from torchremat.stores.release import held_in, settle
from torchremat.stores.stored import Stored
from torchremat.tensors.structure import tensors_in

if TYPE_CHECKING:
    from torchremat.tensors.handles import Store


@dataclass(frozen=True, slots=True)
class Trigger:
    """A call at which something moves.

    Attributes:
        unit: The unit that it is a call of.
        is_last: Whether it is the last of them.
    """

    unit: int
    is_last: bool


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """Where what one unit saves goes, and when.

    Attributes:
        store: The place of its store among those given.
        leaves_after: The unit at whose end it has left.
        comes_before: The unit before whose backward the store begins to bring it back.
    """

    store: int
    leaves_after: int
    comes_before: int


@dataclass(frozen=True, eq=False)
class OffloadSchedule:
    """The trips of a plan.

    Attributes:
        stores: Where to.
        transfers: By unit; those that are brought back at the same moment in the order in which they are needed.
        seen: Is told of each tensor that a stored unit saves; made for the planner.
        leaving: For a unit those that have left at its end.
        coming: For a unit those that are begun to be brought back before its backward.
    """

    stores: tuple[Store, ...]
    transfers: Mapping[int, Transfer]
    seen: Callable[[int, Tensor], None] | None = None
    leaving: dict[int, list[int]] = field(init=False, default_factory=dict[int, list[int]])
    coming: dict[int, list[int]] = field(init=False, default_factory=dict[int, list[int]])

    def __post_init__(self) -> None:
        for unit, transfer in self.transfers.items():
            self.leaving.setdefault(transfer.leaves_after, []).append(unit)
            self.coming.setdefault(transfer.comes_before, []).append(unit)

    @property
    def stops(self) -> frozenset[int]:
        """The units at whose calls something moves."""
        return frozenset((*self.transfers, *self.leaving, *self.coming))


class OffloadRun:
    """What one run of a scope moves. See NOTE [ Who owns a journey ]."""

    __slots__ = ("__weakref__", "_arrived", "_catalogs", "_held", "_itinerary", "_records", "_task")

    def __init__(self, offload_schedule: OffloadSchedule) -> None:
        self._itinerary = offload_schedule
        self._catalogs: dict[int, Catalog] = {}
        self._held: dict[int, list[object]] = {}  # by unit what it has saved, and what stores read in its place
        self._records: dict[int, dict[int, ReferenceType[Record]]] = {}
        self._task = -1
        self._arrived: set[int] = set()

    # ------------------------------------------------------------------------------------------------------- forward

    def run(self, stop: Trigger, hook: object, body: Callable[[], object]) -> object:
        """Run a call; what it saves is stored if that is its unit's plan.

        Args:
            stop: Which call it is.
            hook: That packs what is saved where the scope was opened. With another one the call is inside of a region,
                which saves in its own way.
            body: The call.
        """
        top = top_saved_tensor_hooks(True)
        if (None if top is None else top[0]) is not hook:
            return body()
        transfer = self._itinerary.transfers.get(stop.unit)
        if transfer is None:
            output = body()
        else:
            push_saved_tensor_hooks(partial(self._pack, stop.unit, self._catalog(transfer.store)), unpack)
            try:
                output = body()
            finally:
                pop_saved_tensor_hooks()
        if stop.is_last:
            with hiding():
                self._left(stop.unit)
            self._watch(stop.unit, output)
        return output

    def end(self) -> None:
        """The forward has ended: hold nothing that has not left."""
        with hiding():
            for unit in list(self._held):
                self._let_go(unit)

    def _catalog(self, store: int) -> Catalog:
        if store not in self._catalogs:
            self._catalogs[store] = Catalog(self._itinerary.stores[store], window_bytes=0, by_storage=True)
        return self._catalogs[store]

    def _pack(self, unit: int, catalog: Catalog, tensor: Tensor) -> InCatalog:
        if self._itinerary.seen is not None:
            self._itinerary.seen(unit, tensor)
        held = self._held.setdefault(unit, [])
        with held_in(held):
            packed = catalog.put(tensor)
        if isinstance(packed, Stored):
            self._records.setdefault(unit, {}).setdefault(id(packed.record), ref(packed.record))
            held.append(tensor.untyped_storage())
        return packed

    def _left(self, unit: int) -> None:
        """A unit's last call has returned."""
        with held_in(self._held.setdefault(unit, [])):
            for record in self._alive(unit):
                record.settle()
        for leaving in self._itinerary.leaving.get(unit, ()):
            self._let_go(leaving)

    def _let_go(self, unit: int) -> None:
        for record in self._alive(unit):
            record.settle()
            for handle in record.handles:
                settle(handle)
        self._held.pop(unit, None)

    def _alive(self, unit: int) -> Iterator[Record]:
        for alive in self._records.get(unit, {}).values():
            record = alive()
            if record is not None:
                yield record

    # ------------------------------------------------------------------------------------------------------ backward

    def _watch(self, unit: int, output: object) -> None:
        """Have the nodes that made a unit's output tell when the gradient has come to them."""
        if unit in self._itinerary.coming or unit in self._itinerary.transfers:
            nodes = {id(one.grad_fn): one.grad_fn for one in tensors_in(output) if one.grad_fn is not None}
            for node in nodes.values():
                node.register_prehook(partial(self._came, unit))

    def _came(self, unit: int, _gradients: object) -> None:
        task = current_graph_task()
        if task < 0:
            return
        if task != self._task:
            self._task, self._arrived = task, set()
        if unit in self._arrived:
            return
        self._arrived.add(unit)
        with hiding():
            for coming in self._itinerary.coming.get(unit, ()):
                for record in self._alive(coming):
                    record.begin()
            if unit in self._itinerary.transfers:
                for record in self._alive(unit):
                    record.bring()
