"""The operators of a unit, and what a region takes that holds the outputs of some of them.

    bytes      `replays`, from the allocator's events of the traced forward and of the watched backward
    seconds    of the operators that run again, and of the executor, see `devices.overheads`

Units of several calls have no options, nor have units whose tensors something else also references (except for the
casts that autocast keeps), nor compiled code, which would run eagerly under a policy. Outputs of casts are never held,
since autocast makes them sometimes in the forward and sometimes in the recompute: see NOTE [ Casts in a recompute ].
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from torchremat.measuring.step_record import Run, StepRecord
from torchremat.measuring.traces import AllocationTrace
from torchremat.planning.devices.overheads import NOMINAL
from torchremat.planning.profiles.reading import Profile
from torchremat.planning.profiles.traces import casts_of_leaves, nominal_seconds, storages_of
from torchremat.planning.searches.chains import Cost, RunCost, amount
from torchremat.planning.searches.flows import (
    flow_of,
    pooled_seconds,
    runs_of,
    save_positions,
    saves_of,
    unit_seconds,
    values_of,
)
from torchremat.planning.searches.replays import SelectionReplay, partial_backward
from torchremat.planning.simulator.points import OptionBytes
from torchremat.policies.ordinals import windows_of
from torchremat.regions.decisions import Window
from torchremat.schedules.dataflow import Dataflow
from torchremat.schedules.operator_selection import OperatorSelection, evaluate

_MOST_OPERATORS = 3000


@dataclass(eq=False, kw_only=True)
class UnitOperators:
    """The operators of one unit.

    Attributes:
        profile: The profile.
        cost: The quantity to minimise.
        unit: The unit.
        allocations: The allocator's events in the forward.
        pooled_s: The seconds of all operators of the forward, see `pooled_seconds`.
        has_options: Whether the unit may be kept in part.
    """

    profile: Profile
    cost: Cost
    unit: int
    allocations: AllocationTrace
    pooled_s: list[float]
    has_options: bool

    @property
    def _log(self) -> StepRecord:
        return self.profile.units.trace.operators

    def amount(self, work: RunCost | OptionBytes) -> float:
        """Return the quantity to minimise."""
        return amount(self.profile, self.cost, work)

    @cached_property
    def runs(self) -> list[Run]:
        """The operators as the forward has run them."""
        return runs_of(self.profile, self.unit)

    @cached_property
    def flow(self) -> Dataflow:
        """The operators, with the minimised quantity as costs, and casts that cannot be held."""
        runs, flow = self.runs, flow_of(self.profile, self.unit)
        operators = tuple(
            replace(operator, cost=self.amount(RunCost(measured_s, nominal_seconds(self._log, run), operator.cost)))
            for operator, run, measured_s in zip(flow.operators, runs, self.seconds, strict=True)
        )
        if self.is_pinned:
            operators = tuple(
                replace(one, cost=math.inf) if run.exchanges else one for one, run in zip(operators, runs, strict=True)
            )
        casts = {v for one, run in zip(operators, runs, strict=True) if run.op_info.is_cast for v in one.outputs}
        values = tuple(
            replace(value, holdable=value.holdable and number not in casts) for number, value in enumerate(flow.values)
        )
        return Dataflow(operators=operators, values=values)

    @property
    def is_pinned(self) -> bool:
        """Whether the unit must not exchange again in a recompute."""
        return self.unit in self.profile.units.pinned

    @property
    def form(self) -> Dataflow:
        """The operators without the parts that depend on shapes."""
        operators = tuple(replace(one, cost=0.0) for one in self.flow.operators)
        return Dataflow(operators=operators, values=tuple(replace(one, size_bytes=0) for one in self.flow.values))

    def option(self, selection: OperatorSelection) -> OptionBytes:
        """Return the bytes and time of a unit that holds some operators' outputs."""
        profile, unit, runs, log = self.profile, self.unit, self.runs, self._log
        nominal_s = [nominal_seconds(log, run) for run in runs]
        own = profile.units.units[unit]
        outputs, replay = set(own.outputs), self.replay(selection, self.flow)
        boundary = replay.held.intersection(outputs)
        again = [index for index in range(selection.ends) if index not in replay.spared]
        ordinals = tuple(_ordinal(runs, index) for index in sorted(selection.held))
        operators = tuple(run.name for run in runs if run.op_info.is_counted)
        seen = self._seen(windows_of(operators, ordinals, self.begun))
        passed = sum(len(range(one.start, min(one.stop, selection.ends))) for one in seen)
        taken = len(profile.units.saved(unit)), sum(map(len, seen)), passed
        overhead_s = profile.overheads.seconds(*taken) + profile.costs[unit].state_s
        backward = partial_backward(profile.backwards[unit], self.saves, self.flow, selection, replay)
        return OptionBytes(
            kept=frozenset(boundary),
            kept_bytes=replay.held_bytes - sum(map(replay.size, boundary)),
            forward_peak_bytes=replay.forward_peak(),
            early_peak_bytes=backward.early_bytes,
            recompute_peak_bytes=backward.recompute_bytes,
            ahead_peak_bytes=replay.recompute_peak(),
            late_peak_bytes=backward.late_bytes,
            recomputes=selection.ends > 0,
            seconds=overhead_s + sum(self.seconds[index] for index in again),
            overhead_s=overhead_s,
            nominal_s=NOMINAL.seconds(*taken) + sum(nominal_s[index] for index in again),
            flops=sum(runs[index].flops for index in again),
            ordinals=ordinals,
            operators=operators,
            saves=self.begun,
            exchanges=any(runs[index].exchanges for index in again),
            is_lowest=selection.is_lowest,
        )

    def replay(self, selection: OperatorSelection, flow: Dataflow) -> SelectionReplay:
        """Return the bytes of a selection; `flow` are the operators, perhaps with fewer values that are needed."""
        profile = self.profile
        call = profile.units.trace.calls[profile.units.units[self.unit].calls[0]]
        window = call.begins, call.ends
        # The states of generators are on the host: the held output of an operator that has drawn comes with one.
        state_bytes = profile.generator_bytes
        return SelectionReplay(
            self._log, self.runs, flow, self._storages, selection, self.allocations, window, state_bytes
        )

    def like(self, option: OptionBytes) -> OptionBytes:
        """Return the bytes and time of the unit when it holds the same operators as an option of another profile."""
        held = (index for index in self._counted if _ordinal(self.runs, index) in option.ordinals)
        return self.option(replace(evaluate(self.flow, held), is_lowest=option.is_lowest))

    def gains(self, option: OptionBytes) -> bool:
        """Return whether an option costs less than a plain region, or lowers its peak, and holds less than the unit."""
        costs = self.profile.costs[self.unit]
        whole_s = self.profile.nominal_s[self.unit][1] + NOMINAL.region_s
        region = RunCost(costs.seconds_truncated, whole_s, costs.flops_truncated)
        is_cheaper = self.amount(option) < self.amount(region)
        gains = not option.exchanges if self.is_pinned else is_cheaper or self.peak_of(option) < self.whole_bytes
        return gains and option.kept_bytes < self.profile.sizes[self.unit].inside_bytes

    @cached_property
    def whole_bytes(self) -> int:
        """The peak of the unit's backward with all its saved tensors, as after a plain region's recompute."""
        return self._saved_bytes + int(self.profile.backwards[self.unit].live_bytes().max())

    def peak_of(self, option: OptionBytes) -> int:
        """Return the peak of the unit's backward with an option, over the bytes without any of its saved tensors."""
        sizes = self.profile.units.trace.storage_bytes
        held_bytes = option.kept_bytes + sum(sizes[storage] for storage in option.kept)
        before = max(option.early_peak_bytes, option.recompute_peak_bytes)
        return max(held_bytes + before, self._saved_bytes + option.late_peak_bytes)

    @cached_property
    def _saved_bytes(self) -> int:
        own, trace = self.profile.units.units[self.unit], self.profile.units.trace
        size = self.profile.sizes[self.unit]
        return size.inside_bytes + sum(trace.storage_bytes[one] for one in size.saved if one not in own.inputs)

    def _seen(self, windows: Sequence[Window] | None) -> list[range]:
        """Return the operators that a watcher is shown."""
        if windows is None:
            return [range(len(self.runs))]
        saves = save_positions(self.profile, self.unit) if self.begun else []
        return [range(saves[one.sees - 1] if one.sees else 0, self._counted[one.last] + 1) for one in windows]

    @cached_property
    def _counted(self) -> list[int]:
        """The operators that the policy of a region counts."""
        return [index for index, run in enumerate(self.runs) if run.op_info.is_counted]

    @cached_property
    def begun(self) -> tuple[int, ...]:
        """How many of these have begun before each save; empty if not all saves are known."""
        if self.saves is None:
            return ()
        return tuple(bisect_left(self._counted, position) for position in save_positions(self.profile, self.unit))

    @cached_property
    def _storages(self) -> list[int]:
        """The storages of the values of the dataflow."""
        return [self._log.values[value].storage for value in values_of(self.profile, self.unit)]

    @cached_property
    def saves(self) -> list[int] | None:
        """The values that autograd saves, in their order; None if the watched step has saved more."""
        saves, asked = saves_of(self.profile, self.unit), self.profile.backwards[self.unit].asked_at
        return saves if saves is not None and max(asked, default=-1) < len(saves) else None

    @cached_property
    def seconds(self) -> list[float]:
        """The seconds of the operators, scaled to those of the unit's forward."""
        return unit_seconds(self.profile, self.unit, self.pooled_s)


def unit_operators(profile: Profile, cost: Cost) -> list[UnitOperators]:
    """Return the operators of each unit of a profile; empty if no unit has options."""
    log, allocations = profile.units.trace.operators, profile.units.trace.allocations
    casts = storages_of(log, casts_of_leaves(log))
    having = [allocations is not None and _has_options(profile, unit, casts) for unit in range(len(profile.sizes))]
    if allocations is None or not any(having):
        return []
    pooled_s = pooled_seconds(log.runs)
    return [
        UnitOperators(
            profile=profile,
            cost=cost,
            unit=unit,
            allocations=allocations,
            pooled_s=pooled_s,
            has_options=has_options,
        )
        for unit, has_options in enumerate(having)
    ]


def _has_options(profile: Profile, unit: int, casts: frozenset[int]) -> bool:
    own, size = profile.units.units[unit], profile.sizes[unit]
    if len(own.calls) != 1 or own.carried or unit in profile.units.unequal:
        return False
    if size.left - casts or not size.has_backward or size.inside_bytes == 0:
        return False
    runs = runs_of(profile, unit)
    return 1 < len(runs) <= _MOST_OPERATORS and not any(run.is_compiled for run in runs)


def _ordinal(runs: list[Run], index: int) -> int:
    """The number of an operator as the policy of a region counts them: without casts and views."""
    return sum(run.op_info.is_counted for run in runs[:index])
