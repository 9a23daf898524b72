"""The moments of a step and what is known of units at them: the words that a walk through a step is made of."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from typing import TypeAlias

import numpy as np

from torchremat.planning.profiles.units import Units


class ProgramPoint(Enum):
    """When in a step; each but the last is a moment of one unit.

    Source of the times: the profiled step, in which every unit is a region.
    """

    FORWARD = "forward"  # a unit is entered in the first forward
    LEFT = "left"  # it has returned; code between it and the unit after runs
    RECOMPUTE = "recompute"  # before a recompute that ends with the unit
    BACKWARD = "backward"  # all that the unit saved is there, its backward begins
    RELEASED = "released"  # all that the unit saved is gone; code between it and the unit before runs its backward
    END = "end"  # the step's forward has returned

    # By identity: members are looked up at every moment of every walk, and by name they are hashed in Python.
    __hash__ = object.__hash__


Key = tuple[ProgramPoint, int]
# Bytes that go together with a saved tensor, by its number among all that a unit saves.
Releases: TypeAlias = tuple[tuple[int, int], ...]


@dataclass(frozen=True, kw_only=True)
class UnitBytes:
    """What one unit needs, measured. All peaks are over what is live when they begin.

    Attributes:
        saved: Boundary storages that it saves if it is kept: inputs, outputs, others that were there before.
        left: Storages that it saves and that somebody else has as well, of which a recompute makes new ones: a
            key-value cache, casts that autocast keeps, an attribute that a hook sets.
        inside_bytes: Bytes that it saves beside those.
        drop_peak_bytes: Of a forward that saves nothing.
        full_peak_bytes: Of a forward that saves.
        truncated_peak_bytes: Of a forward that saves and ends at its last save.
        exit_bytes: Live when it returns, over what was when it began, if nothing is saved.
        look_bytes: Copies of generator states and buffers that each region around it makes before, and holds while it
            runs. Copies of generator states lie on the host, and count if that is the device.
        state_bytes: Those of them that each region keeps, since the unit has drawn from the generator or changed the
            buffer.
        copied_bytes: Buffers that it changes and autograd saves: a recompute makes them anew, from that state.
        settle_bytes: What finding that out takes beside `look_bytes`.
        recast_bytes: What a recompute casts that its forward found cast, see NOTE [ Casts in a recompute ].
        has_backward: Whether anything of it is needed in backward.
    """

    saved: frozenset[int]
    left: frozenset[int]
    inside_bytes: int
    drop_peak_bytes: int
    full_peak_bytes: int
    truncated_peak_bytes: int
    exit_bytes: int
    look_bytes: int
    state_bytes: int
    copied_bytes: int
    settle_bytes: int
    recast_bytes: int
    has_backward: bool

    def dropping_bytes(self, levels: int, option: OptionBytes | None = None) -> int:
        """Peak of a forward inside so many regions, all of which look before it and settle after it.

        Args:
            levels: How many.
            option: What the innermost holds, if anything.
        """
        peak, held = (self.drop_peak_bytes, 0) if option is None else (option.forward_peak_bytes, option.kept_bytes)
        return max(peak, self.exit_bytes + held + self.settle_bytes) + levels * self.look_bytes


@dataclass(frozen=True, kw_only=True)
class OptionBytes:
    """What one unit needs if it is a region of its own that holds the outputs of some operators.

    Attributes:
        kept: Boundary storages that it holds from its forward on, beside its inputs.
        kept_bytes: Bytes that it holds beside those until its recompute.
        forward_peak_bytes: Of its forward, over what is live when it begins.
        early_peak_bytes: Of its backward until the recompute, likewise, with what it holds live.
        recompute_peak_bytes: Of its recompute, over what is live when its backward begins.
        ahead_peak_bytes: Of its recompute if that comes before its backward, over what is live then.
        late_peak_bytes: Of its backward from then on, over what were live at its beginning with all that it saves.
        recomputes: Whether it has one.
        seconds: That it adds to a step.
        overhead_s: Those of them that the executor takes by itself, whatever the shapes are.
        nominal_s: The same on a device of no name, see `operators.nominal_seconds`.
        flops: Of its recompute.
        ordinals: The operators whose outputs it holds, as its policy counts them.
        operators: The names of all of its operators, as its policy counts them.
    """

    kept: frozenset[int]
    kept_bytes: int
    forward_peak_bytes: int
    early_peak_bytes: int
    recompute_peak_bytes: int
    ahead_peak_bytes: int
    late_peak_bytes: int
    recomputes: bool
    seconds: float
    overhead_s: float
    nominal_s: float
    flops: int
    ordinals: tuple[int, ...]
    operators: tuple[str, ...]

    def slower(self, factor: float) -> OptionBytes:
        """Return the same with `factor` times the seconds of the operators that it recomputes."""
        return replace(self, seconds=self.overhead_s + (self.seconds - self.overhead_s) * factor)


@dataclass(frozen=True, slots=True)
class Live:
    """The walk at one moment: bytes held, the peak of what runs then over them, and whose forward it is, if one's.

    `over_bytes` is None where the profile must say the peak. That figure is for a recomputed unit; for a kept one,
    `stays` are the storages that remain because others hold them, and `lets_go` what stores let go of meanwhile, by the
    number of the tensor among all that the unit saves.
    """

    key: Key
    held_bytes: int
    over_bytes: int | None
    what: str
    unit: int = -1
    moves: bool = False  # nothing runs but copies into a store or back, with `over_bytes` as their peak
    stays: frozenset[int] | None = None
    lets_go: Releases = ()


@dataclass(frozen=True, slots=True)
class RanForward:
    """A unit's forward that a recompute ran, whole or up to its last save, or as far as its option needs."""

    unit: int
    truncated: bool
    option: int = 0


class Lifetimes:
    """What of the boundary storages lives in a step whatever the plan is. Computed once for many walks.

    Attributes:
        boundary: The boundary storages.
        entered: For each unit those that are alive when it is entered, in variables around the units.
        left: The same when it has returned.
        end: Those alive when the forward has.
        made: For each unit those that it saves and has made.
        inter_call: Storages that code between the units saves, with the number of units that ran before.
        graphs: For each unit the time until which it has a graph, see `Units.graph_until`.
    """

    def __init__(self, units: Units, sizes: tuple[UnitBytes, ...], others: Iterable[int] = ()) -> None:
        self._trace = units.trace
        self.boundary = {
            storage
            for unit, size in zip(units.units, sizes, strict=True)
            for storage in (*unit.inputs, *unit.outputs, *unit.carried, *size.saved, *size.left)
        }.union(others)
        born, died = units.trace.born, units.trace.died
        self._storages = np.array(sorted(self.boundary), np.int64)
        self._born = np.array([born[one] for one in self._storages.tolist()], np.int64)
        self._died = np.array([died.get(one, units.trace.end) for one in self._storages.tolist()], np.int64)
        count = len(units.units)
        self.entered = [self._alive(units.entered(unit)) for unit in range(count)]
        self.left = [self._alive(units.left(unit)) for unit in range(count)]
        self.end = self._alive(units.trace.end)
        pairs = zip(units.units, sizes, strict=True)
        self.made = [(size.saved - set(unit.inputs)) | size.left for unit, size in pairs]
        self.inter_call = self._inter_call(units)
        self.graphs = [units.graph_until(unit) for unit in range(count)]

    @cached_property
    def glue_before(self) -> dict[int, list[int]]:
        """`inter_call` by the number of units that ran before."""
        found: dict[int, list[int]] = {}
        for storage, before in self.inter_call:
            found.setdefault(before, []).append(storage)
        return found

    def _alive(self, time: int) -> list[int]:
        return self._storages[(self._born <= time) & (time <= self._died)].tolist()

    def _inter_call(self, units: Units) -> list[tuple[int, int]]:
        inside: set[int] = set()
        for unit in units.units:
            for call in unit.calls:
                inside.update(self._trace.descendants(call))
        saved = [one for i, call in enumerate(self._trace.calls) if i not in inside for one in call.saved]
        kept = (one for one in (*saved, *self._trace.step_saved) if one.dropped is None)
        ends = [units.left(unit) for unit in range(len(units.units))]
        stored = ((storage, one.time) for one in kept for storage in one.storages)
        return [(storage, bisect_right(ends, time)) for storage, time in stored if storage in self.boundary]
