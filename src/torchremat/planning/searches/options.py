"""Ways of keeping a part of a unit: a separate region that holds the outputs of some operators.

Which operators is solved for several numbers of bytes (`schedules.operator_selection`). Alike units are solved once,
and so are those that run the same on about as many bytes, like blocks whose experts get other tokens.

One more option has the lowest peak, whatever operators cost: it holds what is saved last, which backward frees before
it asks for the rest. The smallest budget is sought among these, so it does not depend on a clock.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TypeAlias

from torchremat.measuring.step_record import Run
from torchremat.planning.devices.overheads import NOMINAL
from torchremat.planning.profiles.reading import Profile
from torchremat.planning.searches.chains import Cost, RunCost
from torchremat.planning.searches.cuts import cut_at
from torchremat.planning.searches.search_budget import SearchBudget
from torchremat.planning.searches.unit_operators import UnitOperators, unit_operators
from torchremat.planning.simulator.points import OptionBytes
from torchremat.planning.simulator.simulator import Options
from torchremat.schedules.dataflow import Dataflow
from torchremat.schedules.operator_selection import OperatorSelection, choices, evaluate, holdable, select

_POINTS = 16
# The best selection for a unit is nearly the best for a unit with the same operators, if bytes and costs differ by
# less.
_ALIKE = 0.05
# How many numbers of last operators are tried for the lowest peak.
_MOST_TRIED = 16

# By unit, the selections that are options of it.
Selections: TypeAlias = tuple[tuple[OperatorSelection, ...], ...]


def options_of(profile: Profile, cost: Cost, search_budget: SearchBudget | None = None) -> Options:
    """Return the options of each unit of a profile; empty if no unit has any.

    Units that come after the time limit have no options, unless they are alike earlier ones.
    """
    found = _found(profile, cost, SearchBudget() if search_budget is None else search_budget)
    return tuple(tuple(option for _, option in own) for own in found)


def selections_of(profile: Profile, cost: Cost) -> Selections:
    """Return which operators the options of each unit hold; empty if no unit has any."""
    return tuple(tuple(selection for selection, _ in own) for own in _found(profile, cost, SearchBudget()))


def options_with(profiles: Sequence[Profile], selections: Selections, cost: Cost) -> list[Options]:
    """Return the options that hold the same operators in each of some profiles of one form.

    Units whose operators, or the tensors that these read and save, differ between the profiles have none.
    """
    units = [unit_operators(profile, cost) for profile in profiles]
    found: list[list[tuple[OptionBytes, ...]]] = [[] for _ in profiles]
    for unit, chosen in enumerate(selections):
        own = [one[unit] for one in units if chosen and one and one[unit].has_options]
        is_known = len(own) == len(profiles) and len({one.form for one in own}) == 1
        for place, options in enumerate(found):
            options.append(tuple(map(own[place].option, chosen)) if is_known else ())
    return [tuple(options) if any(options) else () for options in found]


def options_like(options: Options, profile: Profile) -> Options:
    """Return the options with the operators or the cuts of given ones, in a profile of the same step."""
    units = unit_operators(profile, "flops") if options else []
    return tuple(
        tuple(cut_at(own, option.cuts) if option.cuts else own.like(option) for option in found)
        for own, found in zip(units, options, strict=False)
    )


def _found(
    profile: Profile, cost: Cost, search_budget: SearchBudget
) -> Iterator[list[tuple[OperatorSelection, OptionBytes]]]:
    """Yield the options of each unit with their selections, restricted to those of the unit in all calls of its root.

    One plan serves all calls of a root, so an option that is used in one call is used in all.
    """
    search = _SelectionSearch(search_budget)
    found = [
        {(option.operators, option.ordinals): (selection, option) for selection, option in search.options(own)}
        for own in search_budget.parts(unit_operators(profile, cost))
    ]
    same: dict[tuple[tuple[str, int], ...], list[int]] = {}
    for unit, _ in enumerate(found):
        same.setdefault(profile.units.units[unit].keys, []).append(unit)
    for unit, _ in enumerate(found):
        first, *others = same[profile.units.units[unit].keys]
        yield [found[unit][one] for one in found[first] if all(one in found[other] for other in others)]


class _SelectionSearch:
    """Finds the operators of units to hold."""

    def __init__(self, search_budget: SearchBudget) -> None:
        self._search_budget = search_budget
        self._solved: dict[Dataflow, tuple[OperatorSelection, ...]] = {}
        self._by_form: dict[Dataflow, list[Dataflow]] = {}

    def options(self, own: UnitOperators) -> Iterator[tuple[OperatorSelection, OptionBytes]]:
        """Yield the options of a unit, most bytes first, that of the lowest peak last; with the selection of each."""
        for selection in self._selections(own) if own.has_options else ():
            option = own.option(selection)
            # Otherwise keeping everything, or a plain region with its early stop, does the same without a policy.
            if own.gains(option):
                yield selection, option

    def _selections(self, own: UnitOperators) -> tuple[OperatorSelection, ...]:
        flow = own.flow
        if flow not in self._solved:
            self._search_budget.tell("options")
            passing = own.amount(RunCost(own.profile.overheads.replayed_s, NOMINAL.replayed_s, 0.0))
            known = self._by_form.setdefault(own.form, [])
            alike = next((one for one in known if _is_alike(one, flow)), None)
            if alike is None:
                known.append(flow)
                self._solved[flow] = self._solve(own, passing)
            else:
                self._solved[flow] = tuple(
                    replace(evaluate(flow, one.held, overhead=passing), is_lowest=one.is_lowest)
                    for one in self._solved[alike]
                )
        return self._solved[flow]

    def _solve(self, own: UnitOperators, passing: float) -> tuple[OperatorSelection, ...]:
        most_bytes = None
        if own.cost == "flops" and self._search_budget.left_s:
            most_bytes = _free_of_flops(own.flow, own.runs, self._search_budget.left_s)
        left_s = self._search_budget.left_s
        if not left_s:
            return ()
        found = choices(own.flow, points=_POINTS, overhead=passing, most_bytes=most_bytes, most_seconds=left_s)
        lowest = _lowest(own, passing)
        return found if lowest is None else (*(one for one in found if one != lowest), lowest)


def _lowest(own: UnitOperators, overhead: float) -> OperatorSelection | None:
    """Return the selection of all that is saved last with which a unit has its lowest peak; None if none lowers it.

    A unit with operators that must not run again has no plain region: it has the selection that holds least.
    """
    flow = own.flow
    values = enumerate(flow.values)
    needed = [(flow.maker.get(number, -1), value.saved_after) for number, value in values if value.needed]
    never = {index for index, operator in enumerate(flow.operators) if math.isinf(operator.cost)}
    ends = sorted({saved_after for _, saved_after in needed if saved_after})[: None if never else -1]
    tried = ends[:: -(-len(ends) // _MOST_TRIED)] if ends else ()
    able = set(holdable(flow))
    last = ({maker for maker, saved_after in needed if saved_after > end} & able | never for end in tried)
    found = (replace(evaluate(flow, held, overhead=overhead), is_lowest=True) for held in last)
    options = ((own.option(one), one) for one in found if math.isfinite(one.cost))
    peaks = [(own.peak_of(option), one) for option, one in options if own.gains(option)]
    if never:
        return min((one for _, one in peaks), default=None, key=lambda one: one.held_bytes)
    least_bytes, lowest = min(peaks, default=(own.whole_bytes, None), key=lambda two: (two[0], -two[1].ends))
    return lowest if least_bytes < own.whole_bytes else None


def _is_alike(one: Dataflow, other: Dataflow) -> bool:
    pairs = zip(_totals(one), _totals(other), strict=True)
    return all(abs(a - b) <= _ALIKE * max(a, b) for a, b in pairs)


def _totals(flow: Dataflow) -> tuple[float, float]:
    costs = (operator.cost for operator in flow.operators if math.isfinite(operator.cost))
    return sum(value.size_bytes for value in flow.values), sum(costs)


def _free_of_flops(flow: Dataflow, runs: list[Run], most_seconds: float) -> int:
    """Return the fewest bytes to hold for the fewest flops; more bytes spare only small operators."""
    counted = (replace(operator, cost=float(run.flops)) for operator, run in zip(flow.operators, runs, strict=True))
    alone = Dataflow(operators=tuple(counted), values=flow.values)
    total = sum(value.size_bytes for value in flow.values)
    found = select(alone, total, cap_s=most_seconds)
    return total if found is None else found.held_bytes
