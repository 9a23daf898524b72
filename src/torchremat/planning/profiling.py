"""One profiled step in which every unit is a region: what each unit needs, and what is live at each moment beside it.

Such a step needs little memory, less than any plan that keeps something, and still shows everything: the allocator's
events of a unit's forward say what it would need if its saved tensors stayed (leave out their frees), or if it stopped at
its last save (cut there). So one pass gives (full, truncated) x (seconds, bytes) of every unit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import groupby
from weakref import ReferenceType, ref

import numpy as np
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from torchremat.errors import StepError
from torchremat.measuring.allocator import AllocationTrace, record_allocations
from torchremat.measuring.step import loss_of
from torchremat.measuring.untouched import untouched
from torchremat.planning.layout import installed
from torchremat.planning.memory import Key, Lifetimes, Live, Moment, UnitBytes, Walk
from torchremat.planning.tracing import Step
from torchremat.planning.units import Units
from torchremat.regions.region import Region as LiveRegion
from torchremat.regions.region import Settings
from torchremat.regions.runs import Place
from torchremat.saved.structure import tensors_in
from torchremat.schedules.chain import Keep, Region, Tree


@dataclass(frozen=True, kw_only=True)
class UnitCosts:
    """What running a unit's forward once more costs: whole, and up to its last save."""

    seconds: float
    seconds_truncated: float
    flops: int
    flops_truncated: int


@dataclass(frozen=True, kw_only=True)
class Profile:
    """What a plan is made from.

    Attributes:
        units: The units, with the trace.
        sizes: Bytes, by unit.
        lifetimes: What lives whatever the plan is.
        costs: Seconds and flops, by unit.
        order: Units in the order in which backward comes to them.
        extra_bytes: Bytes live at each moment that do not depend on the plan, relative to the start of the step.
        after_bytes: Highest live bytes between a moment and the next one, over those live at the moment.
        before_bytes: The same before a unit is entered, over those live when it is.
        seconds: Of a step without any recompute, estimated.
    """

    units: Units
    sizes: tuple[UnitBytes, ...]
    lifetimes: Lifetimes
    costs: tuple[UnitCosts, ...]
    order: tuple[int, ...]
    extra_bytes: dict[Key, int]
    after_bytes: dict[Key, int]
    before_bytes: tuple[int, ...]
    seconds: float
    peak_bytes: int


@dataclass
class _Save:
    unit: int
    mark: int
    pointer: int
    number: int  # of the storage in the trace, where the same save was seen
    storage: StorageWeakRef


@dataclass
class _Watched:
    """What is noted of one unit while the step runs."""

    begins: int = -1
    ends: int = -1
    inputs: dict[int, int] = field(default_factory=dict[int, int])  # address of a storage -> number in the trace
    outputs: dict[int, int] = field(default_factory=dict[int, int])
    output_refs: list[StorageWeakRef] = field(default_factory=list[StorageWeakRef])
    boundary: set[int] = field(default_factory=set[int])
    saves: list[_Save] = field(default_factory=list[_Save])
    saved: list[int] = field(default_factory=list[int])  # storages of all saves in the trace, in order
    position: int = 0
    state_bytes: int = 0
    recompute: int = -1
    recomputed: int = -1
    released: int = -1
    region: ReferenceType[LiveRegion] | None = None


class _Watcher:
    """The observer of the profiled step."""

    def __init__(self, units: Units, mark: Callable[[str], int], fixed: set[int]) -> None:
        self.units = units
        self.mark = mark
        self.fixed = fixed
        self.watched = [_Watched(saved=units.saved(unit)) for unit in range(len(units.units))]
        self.order: list[int] = []
        self.last_save = [-1] * len(units.units)

    def unit_of(self, region: LiveRegion) -> int | None:
        place = region.label
        if not isinstance(place, Place) or place.first != place.last:
            return None
        return place.first

    def began(self, region: LiveRegion, call: int, tensors: list[Tensor]) -> None:
        unit = self.unit_of(region)
        if unit is None or self.watched[unit].recompute >= 0:
            return
        own = self.watched[unit]
        seen = self.units.trace.calls[self.units.units[unit].calls[call]].inputs
        for tensor, was in zip(tensors, seen, strict=False):
            own.inputs.setdefault(tensor.untyped_storage()._cdata, was.storage)
        if call == 0:
            own.region = ref(region, lambda _: self.released(unit))
            own.begins = self.mark("begins")

    def released(self, unit: int) -> None:
        if self.watched[unit].released < 0:
            self.watched[unit].released = self.mark("released")

    def saved(self, region: LiveRegion, call: int, tensor: Tensor) -> None:
        unit = self.unit_of(region)
        if unit is None or self.watched[unit].recompute >= 0:
            return
        own = self.watched[unit]
        storage = tensor.untyped_storage()
        mark = self.mark("saves")
        self.last_save[unit] = mark
        address = storage._cdata
        position, own.position = own.position, own.position + 1
        if address in self.fixed:
            return
        if address in own.inputs:
            own.boundary.add(own.inputs[address])
        else:
            number = own.saved[position] if position < len(own.saved) else -1
            own.saves.append(_Save(unit, mark, storage.data_ptr(), number, StorageWeakRef(storage)))

    def ended(self, region: LiveRegion, call: int, output: object, state_bytes: int) -> None:
        unit = self.unit_of(region)
        if unit is None or self.watched[unit].recompute >= 0:
            return
        own = self.watched[unit]
        seen = self.units.trace.calls[self.units.units[unit].calls[call]].outputs
        for tensor, was in zip(tensors_in(output), seen, strict=False):
            storage = tensor.untyped_storage()
            own.outputs[storage._cdata] = was.storage
            own.output_refs.append(StorageWeakRef(storage))
        own.state_bytes += state_bytes
        own.ends = self.mark("ends")

    def recomputing(self, region: LiveRegion) -> None:
        unit = self.unit_of(region)
        if unit is not None and self.watched[unit].recompute < 0:
            self.order.append(unit)
            self.watched[unit].recompute = self.mark("recompute")

    def recomputed(self, region: LiveRegion) -> None:
        unit = self.unit_of(region)
        if unit is not None and self.watched[unit].recomputed < 0:
            self.watched[unit].recomputed = self.mark("recomputed")


def every_unit(units: Units, pieces: int | None = None) -> Tree:
    """Return the tree in which every unit is a region.

    Args:
        units: The units.
        pieces: If given, the regions lie in so many outer ones, so that the step needs still less memory.
    """
    singles = [Region((Keep(i),)) for i in range(len(units.units))]
    if pieces is None:
        return tuple(singles)
    size = -(-len(singles) // pieces)
    tree: list[Keep | Region] = []
    for _, group in groupby(range(len(singles)), key=lambda index: units.units[index].root):
        members = list(group)
        for start in range(0, len(members), size):
            run = tuple(singles[index] for index in members[start : start + size])
            tree.append(Region(run) if len(run) > 1 else run[0])
    return tuple(tree)


def profile(model: nn.Module, step: Step, units: Units, device: torch.device, *, pieces: int | None = None) -> Profile:
    """Run the profiled step and return what it showed; the model is as before afterwards."""
    tree = every_unit(units, pieces)
    fixed = {t.untyped_storage()._cdata for t in (*model.parameters(), *model.buffers())}
    watcher: _Watcher | None = None
    with untouched(model), record_allocations(device) as recorder:
        watcher = _Watcher(units, recorder.mark, fixed)
        with installed(model, units, tree, Settings(observer=watcher)):
            begins = recorder.mark("step")
            loss = loss_of(step(model))
            forward = recorder.mark("forward")
            loss.backward()
            ends = recorder.mark("end")
        del loss
    return _Reader(units, tree, watcher, recorder.trace, begins, forward, ends).profile()


class _Reader:
    """Reads the profile out of the allocator's events."""

    def __init__(
        self, units: Units, tree: Tree, watcher: _Watcher, trace: AllocationTrace, begins: int, forward: int, ends: int
    ) -> None:
        self.units = units
        self.tree = tree
        self.watcher = watcher
        self.trace = trace
        self.begins = begins
        self.forward = forward
        self.ends = ends
        self.freed_at = _frees(trace)
        self.live = np.concatenate([[0], trace.live_bytes()])

    def at(self, mark: int) -> int:
        return int(self.live[self.trace.marks[mark].position])

    def over(self, first: int, last: int, base: int) -> int:
        """Highest live bytes between two marks over those at the mark `base`."""
        return max(0, self.trace.peak_bytes_between(first, last) - self.at(base))

    def profile(self) -> Profile:
        watched, units = self.watcher.watched, self.units
        for unit, own in enumerate(watched):
            if own.begins < 0 or own.ends < 0:
                raise StepError(f"`{units.units[unit].name}` was called in one run of the step and not in the next; a plan needs the same calls in the same order.")
        order = tuple(self.watcher.order)
        sizes = tuple(self.size(unit) for unit in range(len(watched)))
        key_marks = self.moments(order)
        extra, after = {}, {}
        lifetimes = Lifetimes(units, sizes)
        for state in Walk(units, sizes, order, lifetimes, self.tree):
            if isinstance(state, Live) and state.key in key_marks and state.key not in extra:
                begin, end = key_marks[state.key]
                extra[state.key] = self.at(begin) - state.held_bytes
                after[state.key] = self.over(begin, end, begin)
        before = tuple(
            self.over(watched[unit - 1].ends if unit else self.begins, own.begins, own.begins)
            for unit, own in enumerate(watched)
        )
        recompute_s = sum(
            (self.time(own.recomputed) - self.time(own.recompute)) for own in watched if own.recomputed >= 0
        )
        seconds = self.time(self.ends) - self.time(self.begins) - recompute_s
        return Profile(
            units=units,
            sizes=sizes,
            lifetimes=lifetimes,
            costs=self.costs(),
            order=order,
            extra_bytes=extra,
            after_bytes=after,
            before_bytes=before,
            seconds=seconds,
            peak_bytes=self.trace.peak_bytes,
        )

    def time(self, mark: int) -> float:
        return self.trace.marks[mark].time_ns * 1e-9

    def moments(self, order: tuple[int, ...]) -> dict[Key, tuple[int, int]]:
        """The marks at which the moments begin, and those until which what comes after them lasts."""
        watched = self.watcher.watched
        marks: dict[Key, tuple[int, int]] = {}
        for unit, own in enumerate(watched):
            marks[Moment.FORWARD, unit] = (own.begins, own.ends)
        first = watched[order[0]].recompute if order else self.ends
        marks[Moment.LAST, 0] = (watched[-1].ends, self.forward)
        marks[Moment.END, 0] = (self.forward, first)
        for place, unit in enumerate(order):
            own = watched[unit]
            following = watched[order[place + 1]].recompute if place + 1 < len(order) else self.ends
            released = min(own.released if own.released >= 0 else following, following)
            marks[Moment.RECOMPUTE, unit] = (own.recompute, own.recomputed)
            marks[Moment.BACKWARD, unit] = (own.recomputed, released)
            marks[Moment.RELEASED, unit] = (released, following)
        return marks

    def size(self, unit: int) -> UnitBytes:
        own = self.watcher.watched[unit]
        begin, end = (self.trace.marks[mark].position for mark in (own.begins, own.ends))
        live = self.live[begin : end + 1] - self.live[begin]
        boundary, left = set(own.boundary), set[int]()
        inside: dict[tuple[int, int], int] = {}
        stays = np.zeros(end - begin + 1, np.int64)
        for save in own.saves:
            address = save.storage.cdata
            if address in own.outputs:
                boundary.add(own.outputs[address])
            allocated, freed = self.interval(save)
            if address not in own.outputs and save.number >= 0:
                if allocated is None:  # it was there before the unit and is none of its inputs
                    boundary.add(save.number)
                    continue
                if self.units.outlives(save.number, unit):
                    left.add(save.number)
                    continue
            if allocated is None:
                continue
            if (save.pointer, allocated) in inside:
                continue
            inside[save.pointer, allocated] = 0 if address in own.outputs else int(self.trace.delta_bytes[allocated])
            if freed <= end:
                # From its free on it would still be there.
                stays[max(freed - begin, 0) + 1 :] += int(self.trace.delta_bytes[allocated])
        last = self.watcher.last_save[unit]
        cut = self.trace.marks[last].position - begin if last >= 0 else 0
        kept = live + stays
        return UnitBytes(
            saved=frozenset(boundary),
            left=frozenset(left),
            inside_bytes=sum(inside.values()),
            drop_peak_bytes=int(live.max()),
            full_peak_bytes=int(kept.max()),
            truncated_peak_bytes=int(kept[: cut + 1].max()),
            state_bytes=own.state_bytes if self.trace.device.type == "cpu" else 0,
            has_backward=own.recompute >= 0,
        )

    def interval(self, save: _Save) -> tuple[int | None, int]:
        """The events that allocated and freed a saved storage; None if it was there before its unit began."""
        position = self.trace.marks[save.mark].position
        begin = self.trace.marks[self.watcher.watched[save.unit].begins].position
        candidates = self.freed_at.get(save.pointer, [])
        for allocated, freed in candidates:
            if begin <= allocated < position <= freed:
                return allocated, freed
        return None, 0

    def costs(self) -> tuple[UnitCosts, ...]:
        watched = self.watcher.watched
        groups: dict[tuple[object, ...], list[int]] = {}
        for unit in range(len(watched)):
            signature = tuple(self.units.trace.calls[call].signature for call in self.units.units[unit].calls)
            groups.setdefault(signature, []).append(unit)
        full, truncated = [0.0] * len(watched), [0.0] * len(watched)
        for members in groups.values():
            whole = float(np.median([self.time(watched[u].ends) - self.time(watched[u].begins) for u in members]))
            cut = float(np.median([self.time(max(self.watcher.last_save[u], watched[u].begins)) - self.time(watched[u].begins) for u in members]))
            for unit in members:
                full[unit], truncated[unit] = whole, min(cut, whole)
        return tuple(
            UnitCosts(
                seconds=full[unit],
                seconds_truncated=truncated[unit],
                flops=self.units.flops(unit),
                flops_truncated=self.units.flops_truncated(unit),
            )
            for unit in range(len(watched))
        )


def _frees(trace: AllocationTrace) -> dict[int, list[tuple[int, int]]]:
    """For each address the events that allocated and freed it; a storage that stays is freed after the last event."""
    intervals: dict[int, list[tuple[int, int]]] = {}
    open_at: dict[int, int] = {}
    for event, (pointer, delta) in enumerate(zip(trace.ptr.tolist(), trace.delta_bytes.tolist(), strict=True)):
        if delta > 0:
            open_at[pointer] = event
        elif pointer in open_at:
            intervals.setdefault(pointer, []).append((open_at.pop(pointer), event))
    for pointer, event in open_at.items():
        intervals.setdefault(pointer, []).append((event, len(trace.ptr) + 1))
    return intervals
