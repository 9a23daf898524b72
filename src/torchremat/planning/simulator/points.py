"""The program points of a step, and unit sizes at them: the vocabulary of a simulated step."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from torchremat.planning.profiles.units import Units


class ProgramPoint(Enum):
    """A program point of a step; each but the last belongs to one unit.

    Source of the times: the profiled step, in which every unit is a region.
    """

    FORWARD = "forward"  # a unit is entered in the first forward
    LEFT = "left"  # it has returned; code between it and the next unit runs
    RECOMPUTE = "recompute"  # before a recompute that ends with the unit
    BACKWARD = "backward"  # all saved tensors of the unit are there, its backward begins
    RELEASED = "released"  # its saved tensors are freed; code between it and the previous unit runs its backward
    END = "end"  # the step's forward has returned

    # By identity: every program point of every simulation looks members up, and hashing by name runs in Python.
    __hash__ = object.__hash__


Key = tuple[ProgramPoint, int]
# Bytes freed together with a saved tensor, by its number among all saved tensors of a unit.
Releases: TypeAlias = tuple[tuple[int, int], ...]


@dataclass(frozen=True, kw_only=True)
class UnitBytes:
    """Bytes that one unit needs, measured. All peaks are over the live bytes when they begin.

    Attributes:
        saved: Boundary storages that it saves if it is kept: inputs, outputs, others that were there before.
        left: Storages that it saves, that something else also references, and that a recompute makes anew: a key-value
            cache, casts that autocast keeps, an attribute that a hook sets.
        captured: Storages in the state that its calls see, made earlier in the step: an attribute that an earlier call
            of the module has set. A region around it holds them for its recompute.
        inside_bytes: Bytes of its other saved tensors.
        drop_peak_bytes: Peak of a forward that saves nothing.
        full_peak_bytes: Peak of a forward that saves.
        truncated_peak_bytes: Peak of a forward that saves and ends at its last save.
        exit_bytes: Live bytes when it returns, over those when it began, if nothing is saved.
        look_bytes: Copies of generator states and buffers that each region around it makes before, and holds while it
            runs. Copies of generator states are on the host, and count if that is the device.
        state_bytes: The part of these copies that each region keeps, since the unit has drawn from the generator or
            changed the buffer.
        copied_bytes: Buffers that it changes and autograd saves: a recompute makes them anew, from the state in
            `state_bytes`.
        settle_bytes: Bytes to find out what it has drawn or changed, in addition to `look_bytes`.
        recast_bytes: Casts that a recompute makes and its forward found already made,
            see NOTE [ Casts in a recompute ].
        graph_bytes: Bytes that its graph keeps without any hook: numbers that its operators take as 0-d tensors, and
            what an `autograd.Function` keeps as an attribute of its context.
        has_backward: Whether backward needs anything of it.
    """

    saved: frozenset[int]
    left: frozenset[int]
    captured: frozenset[int]
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
    graph_bytes: int
    has_backward: bool

    def dropping_bytes(self, levels: int, option: OptionBytes | None = None) -> int:
        """Peak of a forward inside `levels` regions, each of which looks before it and settles after it.

        Args:
            levels: Number of regions around it.
            option: The outputs that the innermost region holds, if any.
        """
        peak, held = (self.drop_peak_bytes, 0) if option is None else (option.forward_peak_bytes, option.kept_bytes)
        return max(peak, self.exit_bytes + held + self.settle_bytes) + levels * self.look_bytes


@dataclass(frozen=True, kw_only=True)
class OptionBytes:
    """Bytes and time of one unit as a separate region that holds the outputs of some operators, or recomputes in parts.

    Attributes:
        kept: Boundary storages that it holds from its forward on, in addition to its inputs.
        kept_bytes: Bytes of other storages that it holds until its recompute.
        forward_peak_bytes: Peak of its forward, over the live bytes when it begins.
        early_peak_bytes: Peak of its backward until the last recompute, likewise, with its held tensors live.
        recompute_peak_bytes: Peak of its last recompute, over the live bytes when its backward begins.
        ahead_peak_bytes: Peak of its recompute if it runs before its backward, over the live bytes then.
        late_peak_bytes: Peak of its backward from then on, over the bytes that would be live at its beginning with all
            its saved tensors.
        recomputes: Whether it has a recompute.
        seconds: Seconds that it adds to a step.
        overhead_s: The part of `seconds` that is the executor's own overhead, whatever the shapes are.
        nominal_s: The same on a generic device, see `traces.nominal_seconds`.
        flops: Flops of its recompute.
        ordinals: The operators whose outputs it holds, as its policy counts them.
        operators: The names of all of its operators, as its policy counts them.
        saves: How many of these have begun before each save; empty if that is not known.
        cuts: The saves that begin a part of the recompute, without the first save; see `Settings.cuts`.
        exchanges: Whether its recompute exchanges with other processes.
        late_from: With cuts, the event of its backward that comes after the last recompute.
        is_lowest: Whether it was chosen for its bytes alone, whatever operators cost.
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
    exchanges: bool
    saves: tuple[int, ...] = ()
    cuts: tuple[int, ...] = ()
    late_from: int = 0
    is_lowest: bool = False

    @property
    def nests(self) -> bool:
        """Whether a region may contain it: then the unit holds nothing but its inputs."""
        return not self.ordinals

    def slower(self, factor: float) -> OptionBytes:
        """Return the same with `factor` times the seconds of the operators that it recomputes."""
        return replace(self, seconds=self.overhead_s + (self.seconds - self.overhead_s) * factor)


_NO_INPUTS: Mapping[int, int] = MappingProxyType({})


class Live(NamedTuple):
    """The simulation at one program point: bytes held, the peak over them, and the unit whose forward runs, if any.

    `over_bytes` is None where the profile must supply the peak. That peak is for a recomputed unit; for a kept unit,
    `stays` are the storages that remain because others hold them, and `lets_go` the bytes that stores free meanwhile,
    by the number of the tensor among all saved tensors of the unit. For a unit that a region of several recomputes,
    `inputs` are the bytes of those that nothing else holds, by storage; and for one in parts, `since` is the event of
    its backward that comes after its last recompute, from which the profile supplies a lower peak if it knows these.
    """

    key: Key
    held_bytes: int
    over_bytes: int | None
    what: str
    unit: int = -1
    moves: bool = False  # only copies into a store or back run, with `over_bytes` as their peak
    stays: frozenset[int] | None = None
    lets_go: Releases = ()
    inputs: Mapping[int, int] = _NO_INPUTS
    since: int = 0


class RanForward(NamedTuple):
    """A unit's forward that a recompute ran, whole, up to its last save, or up to the point that its option needs."""

    unit: int
    truncated: bool
    option: int = 0


class Lifetimes:
    """Live ranges of the boundary storages in a step whatever the plan is. Computed once for many simulations.

    Attributes:
        boundary: The boundary storages.
        entered: For each unit the storages that are alive when it is entered, in variables around the units.
        left: The same when it has returned.
        end: The storages alive when the forward has returned.
        made: For each unit the storages that it saves and has made.
        inter_call: Storages that code between the units saves, with the number of units that ran before.
        graphs: For each unit the time until which it has a graph, see `Units.graph_until`.
    """

    def __init__(self, units: Units, sizes: tuple[UnitBytes, ...], others: Iterable[int] = ()) -> None:
        self._units = units
        self.boundary = {
            storage
            for unit, size in zip(units.units, sizes, strict=True)
            for storage in (*unit.inputs, *unit.outputs, *unit.carried, *size.saved, *size.left, *size.captured)
        }.union(others)
        born, died = units.trace.born, units.trace.died
        self._storages = np.array(sorted(self.boundary), np.int64)
        self._born = np.array([born[one] for one in self._storages.tolist()], np.int64)
        self._died = np.array([died.get(one, units.trace.end) for one in self._storages.tolist()], np.int64)
        count = len(units.units)
        self.entered = [self._alive(units.entered(unit), self._died) for unit in range(count)]
        self.left = [self._alive(units.left(unit), self._died) for unit in range(count)]
        self.end = self._alive(units.trace.end, self._died)
        pairs = zip(units.units, sizes, strict=True)
        self.made = [(size.saved - set(unit.inputs)) | size.left for unit, size in pairs]
        self.inter_call = self._inter_call(units)
        self.graphs = [units.graph_until(unit) for unit in range(count)]

    @cached_property
    def returning(self) -> list[list[int]]:
        """For each unit the storages alive while it returns: also what dies with its return.

        That is also what dies as calls around it return at once. A store is given what a unit has saved in this moment.
        """
        gone = self._units.trace.lasting
        until = np.maximum(self._died, [gone.get(one, 0) for one in self._storages.tolist()])
        return [self._alive(self._units.left(unit), until) for unit in range(len(self.left))]

    @cached_property
    def inter_call_before(self) -> dict[int, list[int]]:
        """`inter_call` by the number of units that ran before."""
        found: dict[int, list[int]] = {}
        for storage, before in self.inter_call:
            found.setdefault(before, []).append(storage)
        return found

    def _alive(self, time: int, until: NDArray[np.int64]) -> list[int]:
        return self._storages[(self._born <= time) & (time <= until)].tolist()

    def _inter_call(self, units: Units) -> list[tuple[int, int]]:
        kept = (one for one in (*units.saves_between(), *units.trace.step_saved) if one.dropped is None)
        ends = [units.left(unit) for unit in range(len(units.units))]
        stored = ((storage, one.time) for one in kept for storage in one.storages)
        return [(storage, bisect_right(ends, time)) for storage, time in stored if storage in self.boundary]
