"""Reads a profile out of the allocator's events of a watched step.

bytes of a unit                            its forward's events
if it saves nothing                        as they are
if its saved tensors stay                  without their frees
if it ends at its last save                cut there
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import torch

from torchremat.measuring.before import BytesBefore
from torchremat.measuring.timeline import MemoryTimeline
from torchremat.planning.devices.overheads import NOMINAL, Overheads
from torchremat.planning.profiles.backwards import Backwards, UnitBackward
from torchremat.planning.profiles.optimizers import OptimizerBytes
from torchremat.planning.profiles.step_runs import StepRuns
from torchremat.planning.profiles.traces import casts_of_leaves, nominal_seconds, storages_of
from torchremat.planning.profiles.units import Units, not_called
from torchremat.planning.profiles.watching import SavedMemory, UnitSave, WatchedUnit, Watcher
from torchremat.planning.simulator.points import Key, Lifetimes, Live, ProgramPoint, UnitBytes
from torchremat.planning.simulator.simulator import MemorySimulator, Options
from torchremat.schedules.chain import Tree
from torchremat.stores.parameter_moves import MOVES


@dataclass(frozen=True, kw_only=True)
class UnitCosts:
    """The cost of running a unit's forward once more, and the seconds of its backward.

    Attributes:
        seconds: Seconds of the whole forward.
        seconds_truncated: Seconds of a recompute that ends at the unit's last save, including the region's overhead.
        seconds_backward: Seconds of its backward.
        flops: Flops of the whole forward.
        flops_truncated: Flops of the forward up to its last save.
        state_s: Seconds that a region around it takes for the state that its calls see, in forward and recompute; 0
            where a device hides them.
        region_s: The part of `seconds_truncated` that the region takes.
    """

    seconds: float
    seconds_truncated: float
    seconds_backward: float
    flops: int
    flops_truncated: int
    state_s: float = 0.0
    region_s: float = 0.0

    @property
    def seconds_inside(self) -> float:
        """Seconds of a recompute of the whole forward, in a region that goes on."""
        return self.seconds + self.state_s

    def slower(self, factor: float) -> UnitCosts:
        """Return the same with `factor` times the seconds."""
        names = ("seconds", "seconds_truncated", "seconds_backward", "region_s")
        return replace(self, **{name: factor * getattr(self, name) for name in names})


@dataclass(frozen=True, kw_only=True)
class Profile:
    """The measurements that a plan is made from.

    Attributes:
        units: The units, with the trace.
        sizes: Bytes, by unit.
        lifetimes: Live ranges that do not depend on the plan.
        costs: Seconds and flops, by unit.
        order: Units in the order in which backward reaches them.
        extra_bytes: Bytes live at each program point that do not depend on the plan, relative to the start of the step.
        after_bytes: Peak between a program point and the next one, over the live bytes at the first.
        start_bytes: Highest live bytes before the first unit is entered.
        seconds: Seconds of a step without any recompute, estimated.
        forward_seconds: Seconds of a forward.
        before: Live bytes before the step, gradients included.
        device: The device of these bytes.
        optimizer: The bytes of `optimizer.step()`; None if no optimizer was given.
        options: For each unit the ways of keeping a part of it, see `options`.
        backwards: The allocator's events in the backward of each unit that has one.
        overheads: The executor's own overheads, without state that calls see.
        state_s: For each unit the host's seconds for the state that its calls see, in the watched step.
        generator_bytes: Bytes of a generator's state, if such states are on the device.
        runs: What the step needs under a tree, if only its runs can tell; none of the bytes above does then.
    """

    units: Units
    sizes: tuple[UnitBytes, ...]
    lifetimes: Lifetimes
    costs: tuple[UnitCosts, ...]
    order: tuple[int, ...]
    extra_bytes: dict[Key, int]
    after_bytes: dict[Key, int]
    start_bytes: int
    seconds: float
    forward_seconds: float
    before: BytesBefore
    device: torch.device
    optimizer: OptimizerBytes | None = None
    options: Options = ()
    backwards: Mapping[int, UnitBackward] = field(default_factory=dict[int, UnitBackward])
    overheads: Overheads = NOMINAL
    state_s: tuple[float, ...] = ()
    generator_bytes: int = 0
    runs: StepRuns | None = None

    @cached_property
    def reached(self) -> tuple[tuple[list[int], int], ...]:
        """For each unit its operators, and the first operator after its last save, which no recompute reaches."""
        trace, found = self.units.trace, list[tuple[list[int], int]]()
        last_save = {save.call: save.position for save in trace.operators.saves}
        for unit, inside in zip(self.units.units, self.units.inside, strict=True):
            ends = max((last_save.get(call, 0) for call in inside), default=0)
            found.append(([index for call in unit.calls for index in trace.calls[call].operators], ends))
        return tuple(found)

    @cached_property
    def nominal_s(self) -> tuple[tuple[float, float], ...]:
        """For each unit the seconds of its forward on a generic device: in full, and up to its last save."""
        log, found = self.units.trace.operators, list[tuple[float, float]]()
        for operators, ends in self.reached:
            seconds = [(index, nominal_seconds(log, log.runs[index])) for index in operators]
            found.append((sum(s for _, s in seconds), sum(s for index, s in seconds if index < ends)))
        return tuple(found)

    @property
    def step_flops(self) -> int:
        """The flops of a plain step, estimated if no run has shown them."""
        return 3 * self.units.trace.flops if self.runs is None else self.runs.flops(self.runs.plain_tree)

    @cached_property
    def nominal_forward_s(self) -> float:
        """The seconds of the whole forward on a generic device, including code between the units."""
        log = self.units.trace.operators
        return sum(nominal_seconds(log, run) for run in log.runs)


def read_profile(tree: Tree, watcher: Watcher, run: MemoryTimeline) -> Profile:
    """Return the profile of a watched step.

    Args:
        tree: The tree that the step ran under.
        watcher: The notes of its watcher.
        run: The allocator's events.

    Raises:
        StepError: A unit was not called.
    """
    return _Reader(tree, watcher, run).profile()


class _Reader:
    """Reads the profile out of the allocator's events."""

    def __init__(self, tree: Tree, watcher: Watcher, run: MemoryTimeline) -> None:
        self.units = units = watcher.units
        self.tree = tree
        self.watcher = watcher
        kinds = defaultdict[tuple[object, ...], list[int]](list)
        for unit in range(len(units.units)):
            kinds[units.signature(unit)].append(unit)
        self.kinds = kinds.values()
        self.run = run
        self.trace = watcher.without_copies(run.trace)
        self.marks: dict[Key, tuple[int, int]] = {}
        self.live = self.trace.live
        self.position = [mark.position for mark in self.trace.marks]
        for own in watcher.watched:
            if own.released >= 0:
                self.position[own.released] = self.freed_after(own.released)
        self.reader = Backwards(run.trace, self.trace.delta_bytes, self.position)
        self.live_with_copies = run.trace.live
        log = units.trace.operators
        self.cast_values = casts_of_leaves(log)
        self.casts = storages_of(log, self.cast_values)

    def freed_after(self, mark: int) -> int:
        """The position after the frees that follow a mark: a region's mark comes just before its tensors are freed."""
        following = (one.id for one in self.trace.marks[mark + 1 :] if one.label not in MOVES)
        position, end = self.position[mark], self.position[next(following)]
        while position < end and self.trace.delta_bytes[position] <= 0:
            position += 1
        return position

    def at(self, mark: int) -> int:
        return int(self.live[self.position[mark]])

    def over(self, first: int, last: int) -> int:
        """The peak between two marks over the live bytes at the first."""
        between = self.live[self.position[first] : self.position[last] + 1]
        return int(between.max()) - self.at(first) if len(between) else 0

    def profile(self) -> Profile:
        watched, units = self.watcher.watched, self.units
        for unit, own in enumerate(watched):
            if own.begins < 0 or own.ends < 0:
                raise not_called(units, unit)
        order = tuple(self.watcher.order)
        sizes = tuple(self.size(unit) for unit in range(len(watched)))
        self.marks = self.points(order)
        extra, after = dict[Key, int](), dict[Key, int]()
        lifetimes = Lifetimes(units, sizes)
        for state in MemorySimulator(units, sizes, order, lifetimes, self.tree):
            if isinstance(state, Live) and state.key in self.marks and state.key not in extra:
                begin, end = self.marks[state.key]
                extra[state.key] = self.at(begin) - state.held_bytes
                after[state.key] = self.over(begin, end)
        recompute_s = sum(
            self.time(own.recomputed) - self.time(own.recompute) for own in watched if own.recomputed >= 0
        )
        seconds = self.time(self.run.ends) - self.time(self.run.start) - recompute_s
        return Profile(
            units=units,
            sizes=sizes,
            lifetimes=lifetimes,
            costs=self.costs(),
            order=order,
            extra_bytes=extra,
            after_bytes=after,
            start_bytes=self.over(self.run.start, watched[0].looks),
            seconds=seconds,
            forward_seconds=self.time(self.run.backward) - self.time(self.run.start),
            before=replace(self.run.before, slack_bytes=self.slack_bytes(sizes)),
            device=self.trace.device,
            backwards=self.backwards(order),
            state_s=tuple(self.by_kind([own.state_s for own in watched])),
        )

    def backwards(self, order: tuple[int, ...]) -> dict[int, UnitBackward]:
        watched, fixed = self.watcher.watched, self.units.trace.fixed
        return {unit: self.reader.of(watched[unit], *self.marks[ProgramPoint.BACKWARD, unit], fixed) for unit in order}

    def slack_bytes(self, sizes: Sequence[UnitBytes]) -> int:
        """Bytes that the allocator may add to requests, if everything is kept: per byte as much as here."""
        live = max(1, self.trace.peak_bytes)
        kept = sum(size.inside_bytes for size in sizes) + sum(self.units.trace.storage_bytes.values())
        return math.ceil(self.trace.slack_bytes * (live + kept) / live)

    def time(self, mark: int) -> float:
        return self.trace.marks[mark].time_ns * 1e-9

    def points(self, order: tuple[int, ...]) -> dict[Key, tuple[int, int]]:
        """The marks at which the program points are, and the marks at which their stretches end."""
        watched = self.watcher.watched
        marks: dict[Key, tuple[int, int]] = {}
        for unit, own in enumerate(watched):
            marks[ProgramPoint.FORWARD, unit] = (own.looks, own.ends)
            following = watched[unit + 1].looks if unit + 1 < len(watched) else self.run.backward
            marks[ProgramPoint.LEFT, unit] = (own.ends, following)
        first = watched[order[0]].recompute if order else self.run.ends
        marks[ProgramPoint.END, 0] = (self.run.backward, first)
        for place, unit in enumerate(order):
            own = watched[unit]
            following = watched[order[place + 1]].recompute if place + 1 < len(order) else self.run.ends
            released = min(own.released if own.released >= 0 else following, following)
            marks[ProgramPoint.RECOMPUTE, unit] = (own.recompute, own.recomputed)
            marks[ProgramPoint.BACKWARD, unit] = (own.recomputed, released)
            marks[ProgramPoint.RELEASED, unit] = (released, following)
        return marks

    def size(self, unit: int) -> UnitBytes:
        own = self.watcher.watched[unit]
        begin, end = self.position[own.begins], self.position[own.ends]
        live = self.live[begin : end + 1] - self.live[begin]
        boundary = {storage for save in own.saves if not own.is_dropped(save) for storage in save.inputs}
        left = set[int]()
        made_here = {one.number for save, one in own.saved_memories if self.interval(own, save, one)[0] is not None}
        # By the events that allocate and free a storage: its bytes that are held, and until when.
        inside, until = dict[tuple[int, int], int](), dict[tuple[int, int], int]()
        for save, memory in own.saved_memories:
            address, is_dropped = memory.storage.cdata, own.is_dropped(save)
            if address in own.outputs and not is_dropped:
                boundary.add(own.outputs[address])
            allocated, freed = self.interval(own, save, memory)
            if address not in own.outputs and memory.number >= 0 and not is_dropped:
                if allocated is None and memory.number in self.casts:
                    left.add(memory.number)  # See NOTE [ Casts in a recompute ]
                    continue
                if allocated is None:  # it existed before the unit and is none of its inputs
                    boundary.add(memory.number)
                    continue
                if self.units.outlives(memory.number, unit):
                    left.add(memory.number)
                    continue
            if allocated is None:
                continue
            made = allocated, freed
            until[made] = max(self.position[save.dropped] if is_dropped else end, until.get(made, 0))
            held = 0 if is_dropped or address in own.outputs else int(self.trace.delta_bytes[allocated])
            inside[made] = max(held, inside.get(made, 0))
        stays = np.zeros(end - begin + 1, np.int64)
        for (allocated, freed), last in until.items():
            if freed <= end:
                # After its free it would still be live.
                stays[max(freed - begin, 0) + 1 : last - begin + 1] += int(self.trace.delta_bytes[allocated])
        cut = self.position[own.last_save] - begin if own.last_save >= 0 else 0
        kept, copies = live + stays, self.copies(own)
        copied_bytes = self.reader.copied_bytes(own, self.units.trace.fixed)
        return UnitBytes(
            saved=frozenset(boundary),
            left=frozenset(left),
            captured=frozenset(own.captured - made_here),
            inside_bytes=sum(inside.values()),
            drop_peak_bytes=int(live.max()),
            full_peak_bytes=int(kept.max()),
            truncated_peak_bytes=int(kept[: cut + 1].max()),
            exit_bytes=self.at(own.settles) - self.at(own.begins),
            **copies,
            copied_bytes=min(copied_bytes, copies["state_bytes"]),
            recast_bytes=self.recast_bytes(unit),
            graph_bytes=self.graph_bytes(unit),
            has_backward=own.recompute >= 0,
        )

    def graph_bytes(self, unit: int) -> int:
        """Bytes that a unit's graph keeps without any hook; 0 where its region may have kept them instead."""
        own, linked = self.watcher.watched[unit], self.units.units[unit]
        if len(linked.calls) > 1 or linked.carried:  # states between its calls, and what is in objects among arguments
            return 0
        # What is saved through a hook as well, as by `torch.cond`, is there once in a recompute.
        intervals = (self.interval(own, save, memory) for save, memory in own.saved_memories)
        saved = {allocated for allocated, _ in intervals if allocated is not None}
        return self.reader.graph_bytes(own, self.run.backward, saved)

    def recast_bytes(self, unit: int) -> int:
        """Bytes of the casts of leaves that a unit finds already made, see NOTE [ Casts in a recompute ]."""
        log, calls = self.units.trace.operators, self.units.trace.calls
        runs = [log.runs[index] for call in self.units.units[unit].calls for index in calls[call].operators]
        own = {value for run in runs for value in run.makes}
        read = {value for run in runs for value in run.reads if value in self.cast_values} - own
        return sum(log.values[value].size_bytes for value in read)

    def copies(self, own: WatchedUnit) -> dict[str, int]:
        """The copies that the unit's region makes of generator states and buffers; see `UnitBytes`."""
        position, live, copying = self.position, self.live_with_copies, self.watcher.copying
        calls = copying[bisect_left(copying, (own.looks,)) : bisect_left(copying, (own.ends,))]
        settling = live[position[own.settles] : position[own.ends] + 1]
        return {
            "look_bytes": max(int(live[position[b]] - live[position[a]]) for a, b in calls),
            "state_bytes": sum(self.at(b) - self.at(a) for a, b in calls),
            "settle_bytes": int(settling.max() - settling[0]),
        }

    def interval(self, own: WatchedUnit, save: UnitSave, memory: SavedMemory) -> tuple[int | None, int]:
        """The events that allocated and freed a storage that a unit has saved; None if it existed before the unit."""
        found = self.reader.interval(memory.pointer, self.position[save.mark])
        return (None, 0) if found is None or found[0] < self.position[own.begins] else found

    def backward_seconds(self, unit: int) -> float:
        key = (ProgramPoint.RELEASED, unit)
        if key not in self.marks:
            return 0.0
        return self.time(self.marks[key][1]) - self.time(self.marks[ProgramPoint.BACKWARD, unit][0])

    def costs(self) -> tuple[UnitCosts, ...]:
        """Return the costs; what recomputes took longer than the forward up to the last save is the region's."""
        watched = self.watcher.watched
        full = self.by_kind([self.time(own.ends) - self.time(own.begins) for own in watched])
        cut = self.by_kind([self.time(max(own.last_save, own.begins)) - self.time(own.begins) for own in watched])
        took = [(own, self.time(own.recomputed) - self.time(own.recompute)) for own in watched]
        longer = [seconds - cut[unit] for unit, (own, seconds) in enumerate(took) if own.recomputed >= 0]
        again_s = max(0.0, float(np.median(longer))) if longer else 0.0
        costs = [
            UnitCosts(
                seconds=full[unit],
                seconds_truncated=cut[unit] + again_s,
                seconds_backward=self.backward_seconds(unit),
                flops=self.units.flops(unit),
                flops_truncated=self.units.flops_truncated(unit),
                region_s=again_s,
            )
            for unit in range(len(watched))
        ]
        return tuple(costs)

    def by_kind(self, seconds: Sequence[float]) -> list[float]:
        """Return for each unit the median of the seconds of all units like it."""
        found = list(seconds)
        for members in self.kinds:
            median = float(np.median([seconds[unit] for unit in members]))
            for unit in members:
                found[unit] = median
        return found
