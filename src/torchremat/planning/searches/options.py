"""Ways of keeping a part of a unit: a region of its own that holds the outputs of some operators.

    which operators      `schedules.closures`, for several numbers of bytes; alike units are solved once, and so are
                         those that run the same on about as many bytes, like blocks whose experts get other tokens
    bytes                `replays`, from the allocator's events of the traced forward, and `partial_backward`, from
                         those of the watched backward
    seconds              of the operators that run again, and of the executor, see `profiles.overheads`

Units of several calls have no options, nor have units whose tensors something else also references (except for the
casts that autocast keeps), nor compiled code, which would run eagerly under a policy. Outputs of casts are never held,
since autocast makes them sometimes in the forward and sometimes in the recompute: see NOTE [ Casts in a recompute ].
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TypeAlias

from torchremat.measuring.traces import AllocationTrace
from torchremat.planning.profiles.events import intervals_of
from torchremat.planning.profiles.operators import Run, casts_of_leaves, nominal_seconds, numbers_of
from torchremat.planning.profiles.overheads import NOMINAL
from torchremat.planning.profiles.reading import Profile
from torchremat.planning.searches.chains import Cost, amount
from torchremat.planning.searches.flows import flow_of, operators_of, pooled_seconds, saves_of, values_of
from torchremat.planning.searches.partial_backward import in_parts
from torchremat.planning.searches.replays import SelectionReplay
from torchremat.planning.searches.search_budget import SearchBudget
from torchremat.planning.simulator.points import OptionBytes
from torchremat.planning.simulator.simulator import Options
from torchremat.policies.ordinals import asked_about
from torchremat.schedules.dataflow import Dataflow, Value
from torchremat.schedules.operator_selection import OperatorSelection, choices, evaluate, select

_POINTS = 16
# The best selection for a unit is nearly the best for a unit with the same operators, if bytes and costs differ by
# less.
_ALIKE = 0.05
_MOST_OPERATORS = 3000


# By unit, the selections that are options of it.
Selections: TypeAlias = tuple[tuple[OperatorSelection, ...], ...]


def options_of(profile: Profile, cost: Cost, search_budget: SearchBudget | None = None) -> Options:
    """Return the options of each unit of a profile; empty if no unit has any.

    Args:
        profile: Profile of the step.
        cost: The cost that the options should minimise.
        search_budget: The time limit; units after that have no options, unless they are alike earlier ones.
    """
    maker = _maker(profile, cost)
    if maker is None:
        return ()
    maker.search_budget = search_budget or maker.search_budget
    return tuple(tuple(option for _, option in found) for found in maker.alike())


def selections_of(profile: Profile, cost: Cost) -> Selections:
    """Return which operators the options of each unit hold; empty if no unit has any."""
    maker = _maker(profile, cost)
    if maker is None:
        return ()
    return tuple(tuple(selection for selection, _ in found) for found in maker.alike())


def options_with(profiles: Sequence[Profile], selections: Selections, cost: Cost) -> list[Options]:
    """Return the options that hold the same operators in each of some profiles of one form.

    Units whose operators, or the tensors that these read and save, differ between the profiles have none.
    """
    makers = [_maker(profile, cost) for profile in profiles]
    found: list[list[tuple[OptionBytes, ...]]] = [[] for _ in profiles]
    for unit, chosen in enumerate(selections):
        forms = {None if maker is None else maker.form(unit) for maker in makers} if chosen else {None}
        is_known = len(forms) == 1 and None not in forms
        for options, maker in zip(found, makers, strict=True):
            options.append(() if maker is None or not is_known else tuple(maker.option(unit, one) for one in chosen))
    return [tuple(options) if any(options) else () for options in found]


def options_like(options: Options, profile: Profile) -> Options:
    """Return the options that hold the same operators as given ones, in a profile of the same step.

    Args:
        options: Options of another profile, by unit.
        profile: The profile to read the bytes from.
    """
    maker = _maker(profile, "flops") if options else None
    if maker is None:
        return ()
    return tuple(tuple(maker.like(unit, one) for one in found) for unit, found in enumerate(options))


def _maker(profile: Profile, cost: Cost) -> _Maker | None:
    allocations = profile.units.trace.allocations
    log = profile.units.trace.operators
    casts = numbers_of(log, casts_of_leaves(log))
    units = range(len(profile.sizes))
    having = [unit for unit in units if allocations is not None and _has_options(profile, unit, casts)]
    return None if allocations is None or not having else _Maker(profile, cost, allocations, frozenset(having))


def _has_options(profile: Profile, unit: int, casts: frozenset[int]) -> bool:
    own, size, trace = profile.units.units[unit], profile.sizes[unit], profile.units.trace
    if len(own.calls) != 1 or own.carried or size.left - casts or not size.has_backward or size.inside_bytes == 0:
        return False
    runs = [trace.operators.runs[index] for index in operators_of(profile, unit)]
    return 1 < len(runs) <= _MOST_OPERATORS and not any(run.is_compiled for run in runs)


class _Maker:
    def __init__(self, profile: Profile, cost: Cost, allocations: AllocationTrace, having: frozenset[int]) -> None:
        self.profile = profile
        self.cost: Cost = cost
        self.allocations = allocations
        self.having = having
        self.intervals = intervals_of(allocations)
        self.seconds = pooled_seconds(profile.units.trace.operators.runs)
        self.flows: dict[int, Dataflow] = {}
        self.storages: dict[int, list[int]] = {}
        self.saved: dict[int, list[int] | None] = {}
        self.solved: dict[Dataflow, tuple[OperatorSelection, ...]] = {}
        self.forms: dict[Dataflow, list[Dataflow]] = {}
        self.search_budget = SearchBudget()

    def amount(self, seconds: float, nominal_s: float, flops: float) -> float:
        return amount(self.profile, self.cost, seconds=seconds, nominal_s=nominal_s, flops=flops)

    def alike(self) -> Iterator[list[tuple[OperatorSelection, OptionBytes]]]:
        """Yield the results of `options` for each unit, restricted to those that the unit has in all calls of its root.

        One plan serves all calls of a root, so an option that is used in one call is used in all.
        """
        units = self.profile.units.units
        found = [
            {(option.operators, option.ordinals): (selection, option) for selection, option in self.options(unit)}
            for unit in self.search_budget.parts(range(len(units)))
        ]
        same: dict[tuple[tuple[str, int], ...], list[int]] = {}
        for unit, own in enumerate(units):
            same.setdefault(own.keys, []).append(unit)
        for unit, own in enumerate(units):
            first, *others = same[own.keys]
            yield [found[unit][one] for one in found[first] if all(one in found[other] for other in others)]

    def options(self, unit: int) -> Iterator[tuple[OperatorSelection, OptionBytes]]:
        """Yield the options of a unit, most bytes first, with the selection of each."""
        if unit not in self.having:
            return
        profile, costs = self.profile, self.profile.costs[unit]
        whole_s = profile.nominal_s[unit][1] + NOMINAL.region_s
        whole = self.amount(costs.seconds_truncated, whole_s, costs.flops_truncated)
        for selection in self.selections(unit):
            option = self.option(unit, selection)
            # Otherwise keeping everything, or a plain region with its early stop, does the same without a policy.
            cheaper = self.amount(option.seconds, option.nominal_s, option.flops) < whole
            if cheaper and option.kept_bytes < profile.sizes[unit].inside_bytes:
                yield selection, option

    def selections(self, unit: int) -> tuple[OperatorSelection, ...]:
        """Return the selections of operators of a unit that may be held."""
        flow = self.flow(unit)
        if flow not in self.solved:
            self.search_budget.tell("options")
            passing = self.amount(self.profile.overheads.replayed_s, NOMINAL.replayed_s, 0.0)
            known = self.forms.setdefault(_form(flow), [])
            alike = next((one for one in known if _is_alike(one, flow)), None)
            if alike is None:
                known.append(flow)
                self.solved[flow] = self._solved(flow, unit, passing)
            else:
                self.solved[flow] = tuple(evaluate(flow, one.held, overhead=passing) for one in self.solved[alike])
        return self.solved[flow]

    def _solved(self, flow: Dataflow, unit: int, passing: float) -> tuple[OperatorSelection, ...]:
        most_bytes = None
        if self.cost == "flops" and self.search_budget.left_s:
            most_bytes = _free_of_flops(flow, self.runs(unit), self.search_budget.left_s)
        left_s = self.search_budget.left_s
        if not left_s:
            return ()
        return choices(flow, points=_POINTS, overhead=passing, most_bytes=most_bytes, most_seconds=left_s)

    def option(self, unit: int, selection: OperatorSelection) -> OptionBytes:
        """Return the bytes and time of a unit that holds some operators' outputs."""
        profile, log = self.profile, self.profile.units.trace.operators
        runs = self.runs(unit)
        seconds, nominal_s = self.run_seconds(unit), [nominal_seconds(log, run) for run in runs]
        storages = self.storages_of(unit)
        call = profile.units.trace.calls[profile.units.units[unit].calls[0]]
        outputs = set(profile.units.units[unit].outputs)
        window = call.begins, call.ends
        # The states of generators are on the host: the held output of an operator that has drawn comes with one.
        state_bytes = profile.generator_bytes
        replay = SelectionReplay(
            log, runs, self.flow(unit), storages, selection, self.allocations, self.intervals, window, state_bytes
        )
        boundary = {one: number for one in replay.held if (number := log.storages.get(one, -1)) in outputs}
        again = [index for index in range(selection.ends) if index not in replay.spared]
        ordinals = tuple(_ordinal(runs, index) for index in sorted(selection.held))
        operators = tuple(run.name for run in runs if run.op_info.is_counted)
        seen = self._seen(unit, asked_about(operators, ordinals))
        taken = len(profile.units.saved(unit)), seen, min(seen, selection.ends)
        overhead_s = profile.overheads.seconds(*taken)
        backward = in_parts(profile.backwards[unit], self.saves(unit), self.flow(unit), selection, replay)
        return OptionBytes(
            kept=frozenset(boundary.values()),
            kept_bytes=replay.held_bytes - sum(map(replay.size, boundary)),
            forward_peak_bytes=replay.forward_peak(),
            early_peak_bytes=backward.early_bytes,
            recompute_peak_bytes=backward.recompute_bytes,
            ahead_peak_bytes=replay.recompute_peak(),
            late_peak_bytes=backward.late_bytes,
            recomputes=selection.ends > 0,
            seconds=overhead_s + sum(seconds[index] for index in again),
            overhead_s=overhead_s,
            nominal_s=NOMINAL.seconds(*taken) + sum(nominal_s[index] for index in again),
            flops=sum(runs[index].flops for index in again),
            ordinals=ordinals,
            operators=operators,
        )

    def _seen(self, unit: int, asked: int) -> int:
        """Return how many operators of a unit are seen if the policy is asked about the first `asked` that it counts.

        After the last of these, operators are seen until something is saved.
        """
        runs = self.runs(unit)
        counted = [index for index, run in enumerate(runs) if run.op_info.is_counted]
        saves = (value.saved_after for value in self.flow(unit).values if value.needed)
        return min((position for position in saves if not asked or position > counted[asked - 1]), default=len(runs))

    def like(self, unit: int, option: OptionBytes) -> OptionBytes:
        """Return the bytes and time of a unit that holds the same operators as an option."""
        runs = self.runs(unit)
        counted = (index for index, run in enumerate(runs) if run.op_info.is_counted)
        held = (index for index in counted if _ordinal(runs, index) in option.ordinals)
        return self.option(unit, evaluate(self.flow(unit), held))

    def form(self, unit: int) -> Dataflow | None:
        """Return the operators of a unit without the parts that depend on shapes; None if it has no options."""
        if unit not in self.having:
            return None
        return _form(self.flow(unit))

    def storages_of(self, unit: int) -> list[int]:
        """The storages of the values of a unit's dataflow."""
        if unit not in self.storages:
            values = self.profile.units.trace.operators.values
            self.storages[unit] = [values[value].storage for value in values_of(self.profile, unit)]
        return self.storages[unit]

    def saves(self, unit: int) -> list[int] | None:
        """The values that autograd saves in a unit, in their order; None if the watched step has saved more."""
        if unit not in self.saved:
            saves, asked = saves_of(self.profile, unit), self.profile.backwards[unit].asked_at
            self.saved[unit] = saves if saves is not None and max(asked, default=-1) < len(saves) else None
        return self.saved[unit]

    def runs(self, unit: int) -> list[Run]:
        log = self.profile.units.trace.operators
        return [log.runs[index] for index in operators_of(self.profile, unit)]

    def run_seconds(self, unit: int) -> list[float]:
        """The seconds of the operators of a unit, scaled to those of its forward."""
        operators = operators_of(self.profile, unit)
        factor = self.profile.costs[unit].seconds / max(sum(self.seconds[index] for index in operators), 1e-12)
        return [self.seconds[index] * factor for index in operators]

    def flow(self, unit: int) -> Dataflow:
        """The operators of a unit, with the minimised quantity as costs, and casts that cannot be held."""
        if unit not in self.flows:
            self.flows[unit] = self._flow(unit)
        return self.flows[unit]

    def _flow(self, unit: int) -> Dataflow:
        log, runs, seconds = self.profile.units.trace.operators, self.runs(unit), self.run_seconds(unit)
        flow = flow_of(self.profile, "flops", unit)
        operators = tuple(
            replace(operator, cost=self.amount(measured_s, nominal_seconds(log, run), operator.cost))
            for operator, run, measured_s in zip(flow.operators, runs, seconds, strict=True)
        )
        casts = {v for one, run in zip(operators, runs, strict=True) if run.op_info.is_cast for v in one.outputs}
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
    """The number of an operator as the policy of a region counts them: without casts and views."""
    return sum(run.op_info.is_counted for run in runs[:index])


def _form(flow: Dataflow) -> Dataflow:
    """Return operators without the parts that depend on shapes."""
    operators = tuple(replace(one, cost=0.0) for one in flow.operators)
    return Dataflow(operators=operators, values=tuple(replace(one, size_bytes=0) for one in flow.values))


def _is_alike(one: Dataflow, other: Dataflow) -> bool:
    pairs = zip(_totals(one), _totals(other), strict=True)
    return all(abs(a - b) <= _ALIKE * max(a, b) for a, b in pairs)


def _totals(flow: Dataflow) -> tuple[float, float]:
    return sum(value.size_bytes for value in flow.values), sum(operator.cost for operator in flow.operators)


def _free_of_flops(flow: Dataflow, runs: list[Run], most_seconds: float) -> int:
    """Return the fewest bytes to hold for the fewest flops; more bytes spare only small operators."""
    counted = (replace(operator, cost=float(run.flops)) for operator, run in zip(flow.operators, runs, strict=True))
    alone = Dataflow(operators=tuple(counted), values=flow.values)
    total = sum(value.size_bytes for value in flow.values)
    found = select(alone, total, cap_s=most_seconds)
    return total if found is None else found.held_bytes
