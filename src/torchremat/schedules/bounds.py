"""The least cost of recomputing under any schedule: a lower bound by linear programming.

A plan is compared with the best of all schedules, persistent or not, at operator granularity, without a search for the
best one: finding it is NP-hard. See NOTE [ A bound over all schedules ].
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from torchremat.errors import ScheduleError
from torchremat.schedules.dataflow import Dataflow
from torchremat.schedules.linear_programs import Entries, Rows, minimize

# NOTE [ A bound over all schedules ]
#
# Any schedule runs the first forward, then the pulls of backward in their order, and runs operators again meanwhile.
# Choose a pull. For any schedule, at the moment of the pull
#
#   held(v)    is 1 if the value v is live, else 0
#   run(o)     is 1 if the operator o runs at least once from this moment on, else 0
#
# and these hold:
#
#   1. sum of size(v) held(v) + other  <=  limit      live bytes; other are bytes that no schedule can avoid: gradients
#                                                     under way
#   2. held(v) = 1                                    for each value that the pull reads
#   3. held(v) + run(maker of v)  >=  1               for each value read from this moment on
#   4. run(o)  <=  held(u) + run(maker of u)          for each input u of o
#
# The schedule costs at least the sum of cost(o) run(o). So the least such sum over all numbers between 0 and 1 is a
# bound, and the least over integral `held` is a higher one. More rows can only raise it. No row covers the time before
# the moment, nor the bytes of a recompute: leaving rows out can only lower it. The highest bound of several moments
# counts. Missing on purpose: one program for several moments, which knows what cannot be kept from one to the next. Of
# some hundred certificates it has raised none.
#
# Regions cost at least the sum of saved_cost(o) run(o), and begun_cost(o) for each o that runs again while the last
# relevant operator before it does not: between the two a region begins, or the first of them was skipped.
#
# Values without a maker, or without bytes, are free. Whether a value can be held in practice does not matter here: a
# bound that allows more schedules is still a bound.

# How many moments are tried.
_MOMENTS = 12
# No program starts after so many seconds, and the running one ends soon: a bound that took too long is still valid.
_MOST_S = 4.0
# The solver's own tolerance is 1e-7 for each row.
_TOLERANCE = 1e-6
_SOLVED, _INFEASIBLE = 0, 2  # status codes of the solver


@dataclass(frozen=True, kw_only=True)
class Pull:
    """An operator of the plain backward.

    Attributes:
        reads: Values that it reads, all of which are live while it runs.
        other_bytes: Other bytes live then under any schedule: gradients, including the ones that it makes.
    """

    reads: tuple[int, ...]
    other_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class Regions:
    """The least overhead of regions, in addition to the operators that run in them.

    Attributes:
        saved_cost: By operator, if it runs again at all.
        begun_cost: By operator, where it runs again and the one before it does not.
    """

    saved_cost: tuple[float, ...]
    begun_cost: tuple[float, ...]


def lower_bound(flow: Dataflow, backward: Iterable[Pull], limit_bytes: int, *, regions: Regions | None = None) -> float:
    """Return a lower bound on any schedule's recompute cost under a limit. See NOTE [ A bound over all schedules ].

    In the unit of the dataflow; infinite if no schedule fits.

    Args:
        flow: The operators of the forward. Operators of infinite cost must not run again.
        backward: The pulls of backward, in their order.
        limit_bytes: Of all live bytes in backward: values of the forward and `other_bytes`.
        regions: The overhead of regions; None if unknown.

    Raises:
        ScheduleError: Backward reads a value that the dataflow does not have.
    """
    start_s = time.perf_counter()
    pulls = tuple(backward)
    missing = sorted({value for pull in pulls for value in pull.reads if not 0 <= value < len(flow.values)})
    if missing:
        raise ScheduleError(f"backward reads the values {missing}, but the dataflow has {len(flow.values)}")
    problem = _Problem(flow, pulls, limit_bytes, regions)

    def left_s() -> float:
        return _MOST_S - (time.perf_counter() - start_s)

    found = [
        (problem.bound(moment, whole=False, most_seconds=left_s()), moment)
        for moment in problem.tightest(_MOMENTS)
        if left_s() > 0
    ]
    found.sort(reverse=True)
    best = max((cost for cost, _ in found), default=0.0)
    for _, moment in found:
        if left_s() > 0 and math.isfinite(best):
            best = max(best, problem.bound(moment, whole=True, most_seconds=left_s() / 2))
    return best


class _Problem:
    """The data that all programs of one limit share."""

    def __init__(self, flow: Dataflow, pulls: tuple[Pull, ...], limit_bytes: int, regions: Regions | None) -> None:
        self.flow = flow
        self.regions = regions
        self.pulls = pulls
        self.limit_bytes = limit_bytes
        self.size = [value.size_bytes for value in flow.values]
        # For each value that is not free, the operator that makes it.
        self.maker: dict[int, int] = {}
        for number, operator in enumerate(flow.operators):
            if operator.cost > 0 or any(value in self.maker for value in operator.inputs):
                self.maker.update((value, number) for value in operator.outputs if self.size[value])
        self.reads = [tuple(value for value in pull.reads if value in self.maker) for pull in pulls]
        self.inputs = [tuple(value for value in one.inputs if value in self.maker) for one in flow.operators]
        finite = sum(one.cost for one in flow.operators if math.isfinite(one.cost))
        self.unit = finite or 1.0  # costs are solved for in shares of this

    def tightest(self, count: int) -> list[int]:
        """Return the moments with the most bytes that must be live, each a local maximum, in order."""
        live = [
            pull.other_bytes + sum(self.size[value] for value in reads)
            for pull, reads in zip(self.pulls, self.reads, strict=True)
        ]
        padded = [-1, *live, -1]
        peaks = [i for i in range(len(live)) if padded[i] < padded[i + 1] >= padded[i + 2]]
        # Early moments have the most pulls before them, so of equals the first.
        chosen = sorted(peaks, key=lambda i: (-live[i], i))[: count - 1]
        return sorted({0, *chosen}) if live else []

    def bound(self, moment: int, *, whole: bool, most_seconds: float) -> float:
        """Return the bound of the program of a moment; 0 if it took too long.

        With `whole`, each value is held or not, and not in part.
        """
        program = _LinearProgram(self, moment)
        if program.is_hopeless:
            return math.inf
        if not len(program.cost):
            return 0.0
        result = minimize(
            program.cost,
            Rows(program.matrix(), highest=program.most),
            lowest=program.lowest,
            highest=program.highest,
            integers=(program.is_held * whole).astype(np.int64),
            most_s=max(0.1, most_seconds),
            gap=1e-4,
        )
        if result.status == _INFEASIBLE:
            return math.inf
        # The integer search has a bound whenever it is stopped; a linear program has none before its end.
        found = result.mip_dual_bound if whole else result.fun if result.status == _SOLVED else None
        if found is None or not math.isfinite(found):
            return 0.0
        return max(0.0, float(found) - _TOLERANCE) * self.unit


class _LinearProgram:
    """The rows of NOTE [ A bound over all schedules ] for a moment.

    Attributes:
        cost: Of each variable.
        lowest: The lower bound of each.
        highest: The upper bound of each.
        is_held: 1 for `held` variables, else 0.
        most: The upper bound of each row.
        is_hopeless: Whether the moment's reads alone exceed the limit.
    """

    def __init__(self, problem: _Problem, moment: int) -> None:
        self._problem = problem
        self._entries: tuple[list[int], list[int], list[float]] = ([], [], [])
        self._count = 0
        self.most: list[float] = []
        read = set[int]().union(*problem.reads[moment:])
        values, operators = self._relevant(read)
        self._held, self._run = self._variables(values), self._variables(operators)
        self._begun = self._variables(operators) if problem.regions else {}
        self.cost = np.zeros(self._count)
        self.lowest = np.zeros(self._count)
        self.highest = np.ones(self._count)
        self.is_held = np.zeros(self._count)
        self.is_hopeless = False
        self._moment(moment)
        self._closure(read)
        if problem.regions:
            self._regions(problem.regions)

    def matrix(self) -> Entries:
        """Return the factors in the rows."""
        numbers, variables, factors = self._entries
        return Entries(factors, numbers, variables, (len(self.most), self._count))

    def _relevant(self, values: set[int]) -> tuple[list[int], list[int]]:
        """Return the values and operators that can matter for making some values available."""
        found: set[int] = set()
        operators: set[int] = set()
        waiting = list(values)
        while waiting:
            value = waiting.pop()
            if value in found:
                continue
            found.add(value)
            maker = self._problem.maker[value]
            if maker not in operators:
                operators.add(maker)
                waiting += self._problem.inputs[maker]
        return sorted(found), sorted(operators)

    def _variables(self, names: list[int]) -> dict[int, int]:
        first, self._count = self._count, self._count + len(names)
        return {name: first + place for place, name in enumerate(names)}

    def _row(self, most: float, *entries: tuple[int, float]) -> None:
        numbers, variables, factors = self._entries
        for variable, factor in entries:
            numbers.append(len(self.most))
            variables.append(variable)
            factors.append(factor)
        self.most.append(most)

    def _there(self, value: int) -> tuple[tuple[int, float], tuple[int, float]]:
        """Return the negated entries for the ways to make a value available."""
        return (self._held[value], -1.0), (self._run[self._problem.maker[value]], -1.0)

    def _moment(self, moment: int) -> None:
        """Rows 1 and 2, and the costs."""
        problem, held = self._problem, self._held
        free_bytes = problem.limit_bytes - problem.pulls[moment].other_bytes
        forced = problem.reads[moment]
        self.is_hopeless = free_bytes < sum(problem.size[value] for value in forced)
        self.lowest[[held[value] for value in forced]] = 1.0
        self.is_held[list(held.values())] = 1
        unit = max(1, abs(free_bytes))
        self._row(free_bytes / unit, *((one, problem.size[value] / unit) for value, one in held.items()))
        for operator, variable in self._run.items():
            cost = problem.flow.operators[operator].cost
            if math.isfinite(cost):
                self.cost[variable] = cost / problem.unit
            else:
                self.highest[variable] = 0.0

    def _closure(self, read: set[int]) -> None:
        """Rows 3 and 4."""
        for value in read:
            self._row(-1.0, *self._there(value))
        for operator, variable in self._run.items():
            for value in self._problem.inputs[operator]:
                self._row(0.0, (variable, 1.0), *self._there(value))

    def _regions(self, regions: Regions) -> None:
        """The overhead of regions."""
        before: tuple[tuple[int, float], ...] = ()
        for operator, begun in self._begun.items():
            runs = self._run[operator]
            self.cost[runs] += regions.saved_cost[operator] / self._problem.unit
            self.cost[begun] = regions.begun_cost[operator] / self._problem.unit
            self._row(0.0, (runs, 1.0), (begun, -1.0), *before)
            before = ((runs, -1.0),)
