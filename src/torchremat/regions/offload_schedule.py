"""Saved tensors of one forward's calls, on their way into stores and back, at planned program points.

The life of a stored unit's saved tensors, between two calls of the model that the plan names:

    saved        autograd gets small objects; the memory is held
    put          the unit's last call has returned: the stores begin to read the memory, or its encoding
    left         the unit `leaves_after` has returned: the stores are waited for, and both are released
    begun        the gradient has reached the unit `comes_before`: the stores begin to bring the tensors back
    there        the gradient has reached the unit itself: the stores are waited for, and all tensors are held
    gone         the tensor's node has run, as without a store

So the number of bytes in memory does not depend on the speed of a store; only the step time does.

NOTE [ Who owns an offload run ]
The open scope, until the forward ends or raises; then the nodes that report the progress of the backward. The run
refers to records weakly, and to memory only until the memory has left: everything that autograd frees is freed.
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
from torchremat.stores.base import held_in, settle
from torchremat.stores.catalog import Catalog, unpack
from torchremat.stores.in_catalog import InCatalog
from torchremat.stores.records import Record
from torchremat.stores.stored import Stored
from torchremat.tensors.structure import tensors_in

if TYPE_CHECKING:
    from torchremat.tensors.handles import Store


@dataclass(frozen=True, slots=True)
class Trigger:
    """A call at which a transfer starts or ends.

    Attributes:
        unit: The unit that the call belongs to.
        is_last: Whether it is the last call of the unit.
    """

    unit: int
    is_last: bool


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """Where the saved tensors of one unit go, and when.

    Attributes:
        store: The index of its store among the given stores.
        leaves_after: The unit at whose end the tensors have left memory.
        comes_before: The unit before whose backward the store begins to bring them back.
    """

    store: int
    leaves_after: int
    comes_before: int


@dataclass(frozen=True, eq=False)
class OffloadSchedule:
    """The transfers of a plan.

    Attributes:
        stores: The stores that tensors go to.
        transfers: By unit; transfers that come back at the same program point are in the order in which they are
            needed.
        seen: Is told of each tensor that a stored unit saves; made for the planner.
        leaving: For each unit, the units that have left memory at its end.
        coming: For each unit, the units that stores begin to bring back before its backward.
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
        """The units at whose calls a transfer starts or ends."""
        return frozenset((*self.transfers, *self.leaving, *self.coming))


class OffloadRun:
    """The transfers of one run of a scope. See NOTE [ Who owns an offload run ]."""

    __slots__ = ("__weakref__", "_arrived", "_catalogs", "_held", "_offload_schedule", "_records", "_task")

    def __init__(self, offload_schedule: OffloadSchedule) -> None:
        self._offload_schedule = offload_schedule
        self._catalogs: dict[int, Catalog] = {}
        self._held: dict[int, list[object]] = {}  # by unit its saved memory, or the encoding that stores read
        self._records: dict[int, dict[int, ReferenceType[Record]]] = {}
        self._task = -1
        self._arrived: set[int] = set()

    # ------------------------------------------------------------------------------------------------------- forward

    def run(self, stop: Trigger, hook: object, body: Callable[[], object]) -> object:
        """Run a call; store its saved tensors if the plan stores its unit.

        Args:
            stop: Identifies the call.
            hook: The pack hook at the place where the scope was opened. If another hook is active, the call is inside a
                region, which saves in its own way.
            body: The call.
        """
        top = top_saved_tensor_hooks(True)
        if (None if top is None else top[0]) is not hook:
            return body()
        transfer = self._offload_schedule.transfers.get(stop.unit)
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
        """End the forward: release all memory that has not left."""
        with hiding():
            for unit in list(self._held):
                self._let_go(unit)

    def _catalog(self, store: int) -> Catalog:
        if store not in self._catalogs:
            self._catalogs[store] = Catalog(self._offload_schedule.stores[store], window_bytes=0, by_storage=True)
        return self._catalogs[store]

    def _pack(self, unit: int, catalog: Catalog, tensor: Tensor) -> InCatalog:
        if self._offload_schedule.seen is not None:
            self._offload_schedule.seen(unit, tensor)
        held = self._held.setdefault(unit, [])
        with held_in(held):
            packed = catalog.put(tensor)
        if isinstance(packed, Stored):
            self._records.setdefault(unit, {}).setdefault(id(packed.record), ref(packed.record))
            held.append(tensor.untyped_storage())
        return packed

    def _left(self, unit: int) -> None:
        """Handle the return of a unit's last call."""
        with held_in(self._held.setdefault(unit, [])):
            for record in self._alive(unit):
                record.settle()
        for leaving in self._offload_schedule.leaving.get(unit, ()):
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
        """Let the nodes that made a unit's output report when the gradient has reached them."""
        if unit in self._offload_schedule.coming or unit in self._offload_schedule.transfers:
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
            for coming in self._offload_schedule.coming.get(unit, ()):
                for record in self._alive(coming):
                    record.begin()
            if unit in self._offload_schedule.transfers:
                for record in self._alive(unit):
                    record.bring()
