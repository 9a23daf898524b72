"""The watched step in which every unit is a region: the events of each unit's region, and the saves in it.

The observer only takes notes; `profiling` reads the numbers out of the allocator's events afterwards.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from weakref import ReferenceType, WeakKeyDictionary, ref

import numpy as np
from torch import Tensor, UntypedStorage
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import Parameter

from torchremat._compat.autograd import retains_graph
from torchremat._compat.dynamo import outside_graphs
from torchremat.measuring.storages import StorageMap, address_of
from torchremat.measuring.traces import AllocationTrace
from torchremat.planning.exactness.comparison import Comparison
from torchremat.planning.profiles.units import Units
from torchremat.regions.runs import RegionPlace
from torchremat.regions.settings import Observer
from torchremat.regions.slots import Recomputable, Slot, waits
from torchremat.schedules.chain import KeepNode, RegionNode, Tree
from torchremat.stores.stored_parameters import StoredParameter, parameter_in
from torchremat.tensors.parts import memories_of
from torchremat.tensors.structure import tensors_in


@dataclass
class SavedMemory:
    """Memory of a tensor that autograd saved in a unit, neither an input's nor a parameter's."""

    pointer: int
    number: int  # of the storage in the trace, where the same save was seen
    storage: StorageWeakRef


@dataclass
class UnitSave:
    """One save of autograd in a unit, with the marks at which its graph died: in the forward, or in backward."""

    mark: int
    inputs: list[int] = field(default_factory=list[int])  # the inputs of the unit among what was saved
    memories: list[SavedMemory] = field(default_factory=list[SavedMemory])
    slot: ReferenceType[Slot] | None = None
    dropped: int = -1
    lost: int = -1


@dataclass
class WatchedUnit:
    """The notes about one unit while the step runs."""

    looks: int = -1
    begins: int = -1
    settles: int = -1
    ends: int = -1
    inputs: dict[int, int] = field(default_factory=dict[int, int])  # address of a storage -> number in the trace
    outputs: dict[int, int] = field(default_factory=dict[int, int])
    output_refs: list[StorageWeakRef] = field(default_factory=list[StorageWeakRef])  # so that no address is reused
    output_pointers: list[int] = field(default_factory=list[int])  # of the outputs, among the allocations
    captured: set[int] = field(default_factory=set[int])  # storages in the state that its calls see
    saves: list[UnitSave] = field(default_factory=list[UnitSave])
    parts: list[tuple[int, ...]] = field(default_factory=list[tuple[int, ...]])  # of all saves in the trace, in order
    recompute: int = -1
    recomputed: int = -1
    is_retained: bool = False  # whether a backward has retained its graph, or another one has recomputed it again
    asked: dict[int, tuple[int, int]] = field(default_factory=dict[int, tuple[int, int]])  # by save: mark and pointer
    released: int = -1
    region: ReferenceType[Recomputable] | None = None
    state_s: float = 0.0  # the host's, for the state that its calls see: captured, and restored for the recompute

    def asked_here(self) -> list[tuple[int, int]]:
        """Return the saves that backward asked for and the trace knows, each with the address that it got."""
        return [(save, pointer) for save, (_, pointer) in self.asked.items() if save < len(self.parts)]

    def is_dropped(self, save: UnitSave) -> bool:
        """Return whether a save has lost its graph when the unit has ended."""
        return 0 <= save.dropped < self.ends

    @property
    def saved_memories(self) -> Iterator[tuple[UnitSave, SavedMemory]]:
        """The memory of its saves, in order."""
        return ((save, memory) for save in self.saves for memory in save.memories)

    @property
    def last_save(self) -> int:
        """The mark of the last save that has a graph at the unit's end; -1 if none has."""
        return max((save.mark for save in self.saves if not self.is_dropped(save)), default=-1)


class UnitObserver(Observer):
    """An observer of a step in which units are regions, which knows the unit of each region."""

    def __init__(self, units: Units) -> None:
        self.units = units
        self.unit_by_region: WeakKeyDictionary[Recomputable, int | None] = WeakKeyDictionary()
        self.waiting: dict[tuple[tuple[str, int], ...], list[int]] = {}
        for index, unit in enumerate(units.units):
            self.waiting.setdefault(unit.keys, []).append(index)

    def unit_of(self, region: Recomputable) -> int | None:
        """Return the unit that a region is, or None for one around several units."""
        try:
            return self.unit_by_region[region]
        except KeyError:
            unit = self.unit_by_region[region] = self.next_unit(region.label)
            return unit

    def next_unit(self, label: object) -> int | None:
        """Return the unit of a region that begins now; units of equal keys, one per call of the root, run in order."""
        if isinstance(label, RegionPlace):
            if label.first != label.last:
                return None
            keys = self.units.units[label.first].keys
        else:  # a root that is a unit itself
            keys = ((str(label), 0),)
        waiting = self.waiting.get(keys, [])
        return waiting.pop(0) if waiting else None


class Watcher(UnitObserver):
    """The observer of the profiled step.

    Args:
        units: The units.
        mark: Marks the current time among the allocations.
        pointer_of: Returns the address of a storage among the allocations.
        fixed: Tensors from before the step, which do not count.
        compares: Whether to compare each recompute with its forward; recomputes must run to their end then.
        seconds: Returns the host's time.
    """

    def __init__(
        self,
        units: Units,
        mark: Callable[[str], int],
        pointer_of: Callable[[UntypedStorage], int],
        fixed: Sequence[Tensor],
        *,
        compares: bool = False,
        seconds: Callable[[], float] = time.perf_counter,
    ) -> None:
        super().__init__(units)
        self.comparison = Comparison(mark) if compares else None
        self.mark = mark
        self.pointer_of = pointer_of
        self.seconds = seconds
        here = (one for one in fixed if type(one) is not StoredParameter)
        self.fixed = {address_of(memory) for tensor in here for memory in memories_of(tensor)}
        self.watched = [
            WatchedUnit(parts=[one.storages for one in units.saves_in(unit)]) for unit in range(len(units.units))
        ]
        self.order: list[int] = []
        self.numbers = StorageMap[int]()  # of the storages that units took, saved or returned, in the trace
        # The marks between which regions copy generator states and buffers, or drop the copies.
        self.copying: list[tuple[int, int]] = []
        self.since = -1
        self.since_s = 0.0
        self.is_over = False

    def looks(self, region: Recomputable) -> None:
        """See `Observer`."""
        self.since = self.mark("looks")
        self.since_s = self.seconds()

    def began(self, region: Recomputable, call: int, tensors: list[Tensor]) -> None:
        """See `Observer`."""
        now_s = self.seconds()
        begins = self.mark("begins")
        self.copying.append((self.since, begins))
        unit = self.unit_of(region)
        if unit is None or self.watched[unit].recompute >= 0:
            return
        own = self.watched[unit]
        own.state_s += now_s - self.since_s
        seen = self.units.trace.calls[self.units.units[unit].calls[call]].inputs
        for memory, was in zip(_memories(tensors), seen, strict=False):
            if memory is not None:
                own.inputs.setdefault(address_of(memory), was.storage)
                self.numbers[memory] = was.storage
        if call == 0:
            own.region = ref(region, lambda _: self.released(unit))
            own.looks, own.begins = self.since, begins

    def is_kept(self, unit: int, region: Recomputable) -> bool:
        """Return whether a region that has ended saves nothing, and reaches nothing that is freed with it."""
        if any(waits(one()) for one in region.slots) or self.units.units[unit].carried:
            return False
        reached = (tensor for call in region.calls for tensor in call.world.tensors())
        return all(self.is_fixed(memory) for tensor in reached for memory in memories_of(tensor))

    def is_fixed(self, memory: UntypedStorage) -> bool:
        """Return whether some memory is that of a tensor from before the step."""
        return address_of(memory) in self.fixed or parameter_in(memory) is not None

    def released(self, unit: int) -> None:
        """Record that the region of a unit is freed, and all that it held."""
        if self.watched[unit].released < 0:
            self.watched[unit].released = self.mark("released")

    @outside_graphs  # compiled code calls it, and dynamo would trace what is called from there
    def saved(self, region: Recomputable, call: int, tensor: Tensor) -> None:
        """See `Observer`."""
        unit = self.unit_of(region)
        if unit is None or self.watched[unit].recompute >= 0:
            return
        own = self.watched[unit]
        place, save = len(own.saves), UnitSave(self.mark("saves"))
        own.saves.append(save)
        slot = region.slots[-1]()
        if slot is not None:
            save.slot = ref(slot, lambda _: self.dropped(own, save))
        if self.comparison is not None:
            self.comparison.saved(unit, place, tensor, self.stays(unit))
        numbers = own.parts[place] if place < len(own.parts) else ()
        for part, storage in enumerate(memories_of(tensor)):
            if self.is_fixed(storage):
                continue
            address = address_of(storage)
            if address in own.inputs:
                save.inputs.append(own.inputs[address])
                continue
            number = numbers[part] if part < len(numbers) else -1
            save.memories.append(SavedMemory(self.pointer_of(storage), number, StorageWeakRef(storage)))
            self.numbers[storage] = number

    def stays(self, unit: int) -> Container[int]:
        """Return the addresses of the storages that a unit's region holds."""
        return self.watched[unit].inputs if len(self.units.units[unit].calls) == 1 else ()

    def dropped(self, own: WatchedUnit, save: UnitSave) -> None:
        """Record that the graph of a save is freed; in backward this happens to all saves."""
        if own.recompute < 0:
            save.dropped = self.mark("dropped")
        elif save.inputs:
            save.lost = self.mark("lost")

    @property
    def retained(self) -> list[str]:
        """The modules whose graphs serve more than one backward.

        If kept, their saved tensors stay for longer than the first; if not, they are recomputed for each.
        """
        units = (unit for unit, own in zip(self.units.units, self.watched, strict=True) if own.is_retained)
        return [name for unit in units for name, _ in unit.keys]

    def settles(self, region: Recomputable) -> None:
        """See `Observer`."""
        self.since = self.mark("settles")
        self.since_s = self.seconds()

    def ended(self, region: Recomputable, call: int, output: object) -> None:
        """See `Observer`."""
        now_s = self.seconds()
        ends = self.mark("ends")
        self.copying.append((self.since, ends))
        unit = self.unit_of(region)
        if unit is None or self.watched[unit].recompute >= 0:
            return
        if self.comparison is not None:
            self.comparison.returned(unit, call, output)
            if call + 1 == len(self.units.units[unit].calls) and self.is_kept(unit, region):
                self.watched[unit].region = None
                self.comparison.keeps(unit, region)
        own = self.watched[unit]
        own.state_s += now_s - self.since_s
        reached = (tensor for tensor in region.calls[call].world.tensors() if not isinstance(tensor, Parameter))
        numbers = (self.numbers.get(memory) for tensor in reached for memory in memories_of(tensor))
        own.captured.update(number for number in numbers if number is not None and number >= 0)
        seen = self.units.trace.calls[self.units.units[unit].calls[call]].outputs
        for storage, was in zip(_memories(tensors_in(output)), seen, strict=False):
            if storage is None:
                continue
            own.outputs[address_of(storage)] = self.numbers[storage] = was.storage
            own.output_refs.append(StorageWeakRef(storage))
            own.output_pointers.append(self.pointer_of(storage))
        own.settles, own.ends = self.since, ends

    def recomputing(self, region: Recomputable) -> None:
        """See `Observer`."""
        unit = self.unit_of(region)
        if not self.is_over and unit is not None:
            if self.watched[unit].recompute < 0:
                self.order.append(unit)
                self.watched[unit].recompute = self.mark("recompute")
            else:
                self.watched[unit].is_retained = True
        self.since_s = self.seconds()

    def reruns(self, region: Recomputable, call: int) -> None:
        """See `Observer`."""
        self.restored(self.unit_of(region))

    def restored(self, unit: int | None) -> None:
        """Record that what the recompute of a unit has just done was for the state that its calls see."""
        if unit is not None and self.watched[unit].recomputed < 0:
            self.watched[unit].state_s += self.seconds() - self.since_s

    @outside_graphs
    def filled(self, region: Recomputable, index: int, tensor: Tensor, *, ends: bool) -> None:
        """See `Observer`."""
        unit = self.unit_of(region)
        if unit is not None and self.comparison is not None:
            self.comparison.saved_again(unit, index, tensor, self.stays(unit), ends=ends)
        self.since_s = self.seconds()

    def returned(self, region: Recomputable, call: int, output: object) -> None:
        """See `Observer`."""
        unit = self.unit_of(region)
        if unit is not None and self.comparison is not None:
            self.comparison.returned_again(unit, call, output)
        self.since_s = self.seconds()

    def recomputed(self, region: Recomputable) -> None:
        """See `Observer`."""
        unit = self.unit_of(region)
        self.restored(unit)
        if self.comparison is not None:
            self.comparison.recomputed()
        if not self.is_over and unit is not None and self.watched[unit].recomputed < 0:
            self.watched[unit].recomputed = self.mark("recomputed")

    @outside_graphs
    def asked(self, region: Recomputable, index: int, tensor: Tensor) -> None:
        """See `Observer`."""
        unit = self.unit_of(region)
        if unit is not None and not self.is_over:
            self.watched[unit].is_retained |= retains_graph()
        if unit is not None and index not in self.watched[unit].asked:
            # The record shows no memory of parameters that move, but may show other memory at its address.
            memories = [one for one in memories_of(tensor)[:1] if parameter_in(one) is None]
            pointer = self.pointer_of(memories[0]) if memories else 0
            self.watched[unit].asked[index] = self.mark("asked"), pointer

    def without_copies(self, trace: AllocationTrace) -> AllocationTrace:
        """Return a trace of the step without the copies that regions make before a call and drop after it.

        Another tree has more or fewer regions around the call; copies that regions keep for longer remain.
        """
        of_copies = np.zeros(len(trace.delta_bytes) + 2, np.bool_)
        for begin, end in self.copying:
            of_copies[trace.marks[begin].position : trace.marks[end].position] = True
        pairs = trace.pairs
        delta = trace.delta_bytes.copy()
        delta[pairs[of_copies[pairs].all(1)]] = 0
        return replace(trace, delta_bytes=delta)


def _memories(tensors: Iterable[Tensor]) -> Iterator[UntypedStorage | None]:
    """Yield the storages of tensors as the trace has them among inputs and outputs."""
    for tensor in tensors:
        yield from memories_of(tensor) or [None]


def every_unit(units: Units, pieces: int | None = None) -> Tree:
    """Return the tree in which every unit is a region.

    Args:
        units: The units.
        pieces: If given, the regions are inside this many outer ones, so that the step needs still less memory.
    """
    singles = [RegionNode((KeepNode(i),)) for i in range(len(units.units))]
    if pieces is None:
        return tuple(singles)
    size = -(-len(singles) // pieces)
    tree: list[KeepNode | RegionNode] = []
    for row in units.rows:
        for start in range(row.start, row.stop, size):
            first, *rest = singles[start : min(start + size, row.stop)]
            tree.append(RegionNode((first, *rest)) if rest else first)
    return tuple(tree)


def halves(units: Units) -> Tree:
    """Return the tree in which every unit is a region, inside nested regions around the halves of the units.

    The step holds the inputs of few other units: as many as there are halves around one unit.
    """
    tree: list[KeepNode | RegionNode] = []
    for row in units.rows:
        middle = (len(row) + 1) // 2
        tree += [_halved(part) for part in (row[:middle], row[middle:]) if part]
    return tuple(tree)


def _halved(members: range) -> RegionNode:
    if len(members) == 1:
        return RegionNode((KeepNode(members[0]),))
    middle = (len(members) + 1) // 2
    return RegionNode((_halved(members[:middle]), _halved(members[middle:])))
