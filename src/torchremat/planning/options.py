"""Ways of keeping a unit between all and nothing: a region of its own that holds some operators' outputs.

    which operators      `schedules.closures`, for several numbers of bytes; alike units are solved once
    bytes                `replays`, from the allocator's events of the traced forward
    seconds              of the operators that run again, and of the executor, see `overheads`

No options have units of several calls, units that leave tensors with somebody else, and compiled code, which a policy
would run eagerly. Nor are outputs of casts held: autocast makes them now in the forward and now in the recompute.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from torchremat.measuring.allocator import AllocationTrace
from torchremat.planning.chains import Cost, amount
from torchremat.planning.flows import flow_of, operators_of, pooled_seconds, values_of
from torchremat.planning.memory import Options
from torchremat.planning.moments import OptionBytes
from torchremat.planning.operators import Run, nominal_seconds
from torchremat.planning.overheads import NOMINAL, overheads
from torchremat.planning.reading import Profile, intervals_of
from torchremat.planning.replays import Replay
from torchremat.schedules.closures import Selection, choices
from torchremat.schedules.dataflow import Dataflow, Value

_POINTS = 8
_MOST_OPERATORS = 3000


def options_of(profile: Profile, cost: Cost) -> Options:
    """Return the options of each unit of a profile; none at all if no unit has any.

    Args:
        profile: Of the step.
        cost: What the options are to have little of.
    """
    allocations = profile.units.trace.allocations
    units = range(len(profile.units.units))
    having = [unit for unit in units if allocations is not None and _has_options(profile, unit)]
    if allocations is None or not having:
        return ()
    maker = _Maker(profile, cost, allocations)
    return tuple(tuple(maker.options(unit)) if unit in having else () for unit in units)


def _has_options(profile: Profile, unit: int) -> bool:
    own, size, trace = profile.units.units[unit], profile.sizes[unit], profile.units.trace
    if len(own.calls) != 1 or own.carried or size.left or not size.has_backward or size.inside_bytes == 0:
        return False
    runs = [trace.operators.runs[index] for index in operators_of(profile, unit)]
    return 1 < len(runs) <= _MOST_OPERATORS and not any(run.is_compiled for run in runs)


class _Maker:
    def __init__(self, profile: Profile, cost: Cost, allocations: AllocationTrace) -> None:
        self.profile = profile
        self.cost: Cost = cost
        self.allocations = allocations
        self.intervals = intervals_of(allocations)
        self.overheads = overheads()
        self.seconds = pooled_seconds(profile.units.trace.operators.runs)
        self.solved: dict[Dataflow, tuple[Selection, ...]] = {}

    def amount(self, seconds: float, nominal_s: float, flops: float) -> float:
        return amount(self.profile, self.cost, seconds=seconds, nominal_s=nominal_s, flops=flops)

    def options(self, unit: int) -> Iterator[OptionBytes]:
        """Yield the options of a unit, most bytes first."""
        profile, log = self.profile, self.profile.units.trace.operators
        operators, costs = operators_of(profile, unit), profile.costs[unit]
        runs = [log.runs[index] for index in operators]
        factor = costs.seconds / max(sum(self.seconds[index] for index in operators), 1e-12)
        seconds = [self.seconds[index] * factor for index in operators]
        nominal_s = [nominal_seconds(log, run) for run in runs]
        flow = self.flow(unit, runs, seconds, nominal_s)
        if flow not in self.solved:
            passing = self.amount(self.overheads.replayed_s, NOMINAL.replayed_s, 0.0)
            self.solved[flow] = choices(flow, points=_POINTS, overhead=passing)
        whole_s = profile.nominal_s[unit][1] + NOMINAL.region_s
        whole = self.amount(costs.seconds_truncated, whole_s, costs.flops_truncated)
        storages = [log.values[value].storage for value in values_of(profile, unit)]
        call = profile.units.trace.calls[profile.units.units[unit].calls[0]]
        window = call.begins, call.ends
        outputs = set(profile.units.units[unit].outputs)
        for selection in self.solved[flow]:
            replay = Replay(log, runs, flow, storages, selection, self.allocations, self.intervals, window)
            boundary = {one: number for one in replay.held if (number := log.storages.get(one, -1)) in outputs}
            again = [index for index in range(selection.ends) if index not in replay.spared]
            draws = sum(runs[index].traits.is_random for index in replay.spared)
            # The states of generators lie on the host: what is held of an operator that has drawn has one with it.
            state_bytes = torch.get_rng_state().nbytes if profile.device.type == "cpu" and draws else 0
            option = OptionBytes(
                kept=frozenset(boundary.values()),
                kept_bytes=draws * state_bytes + sum(replay.size(one) for one in replay.held - boundary.keys()),
                forward_peak_bytes=draws * state_bytes + replay.forward_peak(),
                recompute_peak_bytes=state_bytes + replay.recompute_peak(),
                recomputes=selection.ends > 0,
                seconds=self.overheads.seconds(len(runs), selection.ends) + sum(seconds[index] for index in again),
                nominal_s=NOMINAL.seconds(len(runs), selection.ends) + sum(nominal_s[index] for index in again),
                flops=sum(runs[index].flops for index in again),
                ordinals=tuple(_ordinal(runs, index) for index in sorted(selection.held)),
                operators=tuple(run.name for run in runs if not run.traits.is_cast),
            )
            # Otherwise keeping all, or a plain region with its early stop, does the same without a policy.
            cheaper = self.amount(option.seconds, option.nominal_s, option.flops) < whole
            if cheaper and option.kept_bytes < profile.sizes[unit].inside_bytes:
                yield option

    def flow(self, unit: int, runs: list[Run], seconds: list[float], nominal_s: list[float]) -> Dataflow:
        """The operators of a unit, with what is minimised as costs, and casts that cannot be held."""
        flow = flow_of(self.profile, "flops", unit)
        operators = tuple(
            replace(operator, cost=self.amount(measured_s, named_s, operator.cost))
            for operator, measured_s, named_s in zip(flow.operators, seconds, nominal_s, strict=True)
        )
        casts = {v for one, run in zip(operators, runs, strict=True) if run.traits.is_cast for v in one.outputs}
        values = tuple(
            Value(
                size_bytes=value.size_bytes,
                needed=value.needed,
                holdable=value.holdable and number not in casts,
                saved_after=value.saved_after,
            )
            for number, value in enumerate(flow.values)
        )
        return Dataflow(operators=operators, values=values)


def _ordinal(runs: list[Run], index: int) -> int:
    """The number of an operator as the policy of a region counts: without casts."""
    return sum(not run.traits.is_cast for run in runs[:index])
