"""Which outputs of a region's operators to hold, so that its recompute costs least for the bytes held.

A recompute runs the operators in their order and ends where nothing is missing any more; those whose outputs are held
do not run. So what is asked for is closed: a value that backward needs is held, or the recompute gets as far as the
operator that saves it, and each operator on the way is held or runs, its inputs being there since those before it were
held or ran. See NOTE [ What a selection means ].

Deliberately missing: leaving out operators whose outputs nobody asks for. A recompute is code that runs; to leave out
what lies between, hold what it leads to.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import cast

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, OptimizeResult, milp
from scipy.sparse import csr_array

from torchremat.schedules.dataflow import Dataflow

# NOTE [ What a selection means ]
#
# `held` are operators. For each of them
#
#   its needed outputs     are held to their backward
#   its other outputs      are held to their next use in the recompute, if it gets there and the operator is replaceable
#
# A needed value that no operator makes is there, if it is holdable. Every other needed value that is not held is
# missing, and the recompute ends at the last save of a missing one. It costs the sum over the operators before that
# which are not both held and replaceable, and an overhead for each operator that it passes.
#
# An operator can be held if all its outputs can, or, if it is not replaceable, one that is needed.

_GAP = 1e-4
_CAP_S = 60.0
# HiGHS stops within a millionth of the best as well, so the largest cost is made so many.
_LARGEST = 1e3
# Costs that are whole numbers of something stay whole, of at most so many: between two of them HiGHS need not look.
_MOST_WHOLE = 1e6
_ROUNDING = 1e-6  # HiGHS's own tolerance of a row


@dataclass(frozen=True, kw_only=True)
class Selection:
    """Operators whose outputs are held, and what comes of it.

    Attributes:
        held: The operators, by index.
        held_bytes: Of what is held from forward to recompute.
        cost: Of the recompute.
        ends: How many operators the recompute passes; 0 if there is none.
        bound: No selection within the same limit costs less; equal to `cost` if it was solved to the end.
    """

    held: frozenset[int]
    held_bytes: int
    cost: float
    ends: int
    bound: float


def evaluate(flow: Dataflow, held: Iterable[int], *, overhead: float = 0.0) -> Selection:
    """Return what holding some operators means. See NOTE [ What a selection means ].

    Args:
        flow: The operators.
        held: Those whose outputs are held.
        overhead: Cost of each operator that the recompute passes, run or not.
    """
    chosen = frozenset(held)
    there = held_values(flow, chosen)
    missing = (value.saved_after for number, value in enumerate(flow.values) if value.needed and number not in there)
    ends = max(missing, default=0)
    cost = overhead * ends
    for index, operator in enumerate(flow.operators[:ends]):
        if not (operator.replaceable and index in chosen):
            cost += operator.cost
    held_bytes = sum(
        flow.values[value].size_bytes
        for index in chosen
        for value in flow.operators[index].outputs
        if flow.values[value].needed or (index < ends and flow.operators[index].replaceable)
    )
    return Selection(held=chosen, held_bytes=held_bytes, cost=cost, ends=ends, bound=cost)


def held_values(flow: Dataflow, held: frozenset[int]) -> set[int]:
    """Return the values that are there when backward asks for them, if the outputs of some operators are held."""
    maker = {value: index for index, operator in enumerate(flow.operators) for value in operator.outputs}
    return {
        number
        for number, value in enumerate(flow.values)
        if value.holdable and (number not in maker or maker[number] in held)
    }


def holdable(flow: Dataflow) -> list[int]:
    """Return the operators that can be held. See NOTE [ What a selection means ]."""
    result: list[int] = []
    for index, operator in enumerate(flow.operators):
        outputs = [flow.values[value] for value in operator.outputs]
        if operator.replaceable:
            if outputs and all(value.holdable for value in outputs):
                result.append(index)
        elif any(value.needed and value.holdable for value in outputs):
            result.append(index)
    return result


def select(
    flow: Dataflow,
    limit_bytes: int,
    *,
    peak_bytes: int | None = None,
    overhead: float = 0.0,
    cap_s: float = _CAP_S,
) -> Selection | None:
    """Return the selection of least cost, to a ten thousandth, that holds at most so many bytes; None if there is none.

    Two mixed-integer programs, solved by HiGHS: the least cost, and then the fewest bytes that have it.

    Args:
        flow: The operators of a region.
        limit_bytes: Of what is held from forward to recompute.
        peak_bytes: If given, also of what is there when the recompute has ended: all that backward needs, and what was
            held for the recompute alone.
        overhead: See `evaluate`.
        cap_s: Seconds, after which the best selection found so far is returned, with its bound.
    """
    return _Program(flow, overhead).solve(limit_bytes, peak_bytes, cap_s)


def choices(
    flow: Dataflow,
    *,
    points: int = 8,
    overhead: float = 0.0,
    most_bytes: int | None = None,
    most_seconds: float = _CAP_S,
) -> tuple[Selection, ...]:
    """Return selections between holding all that spares cost and holding nothing, most bytes first.

    None of them has another one that costs no more and holds no more; nor has it holding nothing at all.

    Args:
        flow: The operators of a region.
        points: At most so many between the two.
        overhead: See `evaluate`.
        most_bytes: The most that those between hold, if what is above that is known to be worth little.
        most_seconds: After so many the best ones found are returned.
    """
    ends_s = time.perf_counter() + most_seconds
    program = _Program(flow, overhead)
    most = program.solve(sum(value.size_bytes for value in flow.values), None, min(_CAP_S, most_seconds))
    nothing = evaluate(flow, (), overhead=overhead)
    if most is None or not most.held:
        return ()
    found = [most]
    limits = [most.held_bytes * point // points for point in range(points - 1, 0, -1)]
    if most_bytes is not None and most_bytes < most.held_bytes:
        limits = [most_bytes * point // points for point in range(points, 0, -1)]
    for limit in limits:
        left_s = ends_s - time.perf_counter()
        if left_s <= 0:
            break
        one = program.solve(limit, None, min(_CAP_S, left_s))
        if one is not None and one.held:
            found.append(one)
    return tuple(dict.fromkeys(one for one in found if not any(_beats(other, one) for other in (*found, nothing))))


def _beats(one: Selection, other: Selection) -> bool:
    """Whether `one` is no worse in both, and better in one."""
    if one.held_bytes > other.held_bytes or one.cost > other.cost:
        return False
    return (one.held_bytes, one.cost) != (other.held_bytes, other.cost)


class _Program:
    """The mixed-integer program of a dataflow, with these variables, side by side.

    s    for each operator that can be held: it is
    p    for each position at which values are saved: the recompute gets there
    r    for each operator that can be held and replaced: it runs again
    y    for each such operator: its outputs that backward does not need are held
    """

    def __init__(self, flow: Dataflow, overhead: float) -> None:
        self.flow = flow
        self.overhead = overhead
        self.maker = {value: index for index, operator in enumerate(flow.operators) for value in operator.outputs}
        needed = [(number, value) for number, value in enumerate(flow.values) if value.needed and value.saved_after]
        self.ends = sorted({value.saved_after for _, value in needed})
        self.candidates = [one for one in holdable(flow) if self.ends and one < len(flow.operators)]
        self.s = {operator: place for place, operator in enumerate(self.candidates)}
        self.p = {end: len(self.s) + place for place, end in enumerate(self.ends)}
        before = len(self.s) + len(self.p)
        segment_of = np.searchsorted(np.array(self.ends, np.int64), np.arange(len(flow.operators)), side="right")
        # The position that a recompute must get to if it is to pass an operator; none behind the last.
        self.segment = [self.ends[place] if place < len(self.ends) else None for place in segment_of.tolist()]
        replaceable = [
            one for one in self.candidates if flow.operators[one].replaceable and self.segment[one] is not None
        ]
        self.r = {operator: before + place for place, operator in enumerate(replaceable)}
        self.y = {operator: before + len(replaceable) + place for place, operator in enumerate(replaceable)}
        self.count = before + 2 * len(replaceable)
        self.rows: list[dict[int, float]] = []
        self.lowest: list[float] = []
        self.upper: NDArray[np.float64] = np.ones(self.count)
        self.cost: NDArray[np.float64] = np.zeros(self.count)
        self._add_closure([(number, value.saved_after, value.holdable) for number, value in needed])
        self._add_costs()

    def _at_least(self, row: dict[int, float], lowest: float) -> None:
        self.rows.append(row)
        self.lowest.append(lowest)

    def _add_closure(self, needed: list[tuple[int, int, bool]]) -> None:
        for number, saved_after, can_be_held in needed:
            end = self.p[saved_after]
            maker = self.maker.get(number)
            if maker is None:
                if not can_be_held:
                    self._at_least({end: 1.0}, 1.0)
            elif can_be_held and maker in self.s:
                self._at_least({end: 1.0, self.s[maker]: 1.0}, 1.0)
            else:
                self._at_least({end: 1.0}, 1.0)
        for earlier, later in zip(self.ends, self.ends[1:], strict=False):
            self._at_least({self.p[earlier]: 1.0, self.p[later]: -1.0}, 0.0)

    def _add_costs(self) -> None:
        for index, operator in enumerate(self.flow.operators):
            segment = self.segment[index]
            if segment is None:
                continue
            passing = self.p[segment]
            self.cost[passing] += self.overhead
            runs = self.r.get(index)
            if runs is None:
                if math.isinf(operator.cost):
                    self.upper[passing] = 0.0
                else:
                    self.cost[passing] += operator.cost
                continue
            self._at_least({runs: 1.0, passing: -1.0, self.s[index]: 1.0}, 0.0)
            self._at_least({self.y[index]: 1.0, passing: -1.0, self.s[index]: -1.0}, -1.0)
            if math.isinf(operator.cost):
                self.upper[runs] = 0.0
            else:
                self.cost[runs] += operator.cost

    def _bytes(self, operator: int, *, needed: bool) -> int:
        values = (self.flow.values[value] for value in self.flow.operators[operator].outputs)
        return sum(value.size_bytes for value in values if value.needed is needed)

    def solve(self, limit_bytes: int, peak_bytes: int | None, cap_s: float) -> Selection | None:
        """See `select`."""
        if not self.candidates:
            found = evaluate(self.flow, (), overhead=self.overhead)
            return found if math.isfinite(found.cost) and limit_bytes >= 0 else None
        held: NDArray[np.float64] = np.zeros(self.count)
        extra: NDArray[np.float64] = np.zeros(self.count)
        for operator in self.candidates:
            held[self.s[operator]] = self._bytes(operator, needed=True)
            if operator in self.y:
                extra[self.y[operator]] = self._bytes(operator, needed=False)
        held += extra
        scale = float(max(held.max(), 1.0))
        limits = [(held, float(limit_bytes))]
        if peak_bytes is not None:
            needed = sum(value.size_bytes for number, value in enumerate(self.flow.values) if self._is_inside(number))
            limits.append((extra, float(peak_bytes - needed)))
        within = [LinearConstraint(row[None, :] / scale, -math.inf, limit / scale) for row, limit in limits]
        measure, ends_s = _measure(self.cost), time.perf_counter() + cap_s
        cheapest = self._minimised(self.cost / measure, within, ends_s)
        if cheapest.x is None:
            return None
        at_most = LinearConstraint(self.cost[None, :] / measure, -math.inf, float(cheapest.fun) + _ROUNDING)
        fewest = self._minimised(held / scale, [*within, at_most], ends_s)
        solution = cheapest.x if fewest.x is None else fewest.x
        chosen = [operator for operator, place in self.s.items() if solution[place] > 0.5]
        found = evaluate(self.flow, chosen, overhead=self.overhead)
        bound = found.cost
        if not cheapest.success:
            bound = min(bound, max(0.0, float(cheapest.mip_dual_bound) * measure))
        return Selection(
            held=_useful(self.flow, found),
            held_bytes=found.held_bytes,
            cost=found.cost,
            ends=found.ends,
            bound=bound,
        )

    def _minimised(self, weights: NDArray[np.float64], limits: list[LinearConstraint], ends_s: float) -> OptimizeResult:
        """Solve the program for some weights, within some limits."""
        return milp(
            weights,
            # With `s` the others are whole by themselves; told so, HiGHS need not solve for them once more.
            integrality=np.ones(self.count, np.int64),
            bounds=_bounds(self.upper),
            constraints=[self._closure, *limits],
            options={"mip_rel_gap": _GAP, "time_limit": max(0.0, ends_s - time.perf_counter())},
        )

    @cached_property
    def _closure(self) -> LinearConstraint:
        data, where = _sparse(self.rows)
        return _at_least(csr_array((data, where), shape=(len(self.rows), self.count)), np.array(self.lowest))

    def _is_inside(self, number: int) -> bool:
        return self.flow.values[number].needed and number in self.maker


# The stubs of SciPy know single numbers alone as bounds, and its documentation arrays as well.


def _bounds(upper: NDArray[np.float64]) -> Bounds:
    return Bounds(*cast("tuple[float, float]", (np.zeros(len(upper)), upper)))


def _at_least(rows: csr_array, lowest: NDArray[np.float64]) -> LinearConstraint:
    return LinearConstraint(rows, *cast("tuple[float, float]", (lowest, np.full(len(lowest), np.inf))))


def _measure(costs: NDArray[np.float64]) -> float:
    """Return what to divide costs by: what they are all whole numbers of, if there is such a thing."""
    largest = float(costs.max(initial=0.0))
    if largest <= 0:
        return 1.0
    if largest < 2**53 and (costs == np.rint(costs)).all():
        common = int(np.gcd.reduce(costs.astype(np.int64)))
        if largest / common <= _MOST_WHOLE:
            return float(common)
    return largest / _LARGEST


def _useful(flow: Dataflow, found: Selection) -> frozenset[int]:
    """Return the held operators without those that hold nothing and spare nothing."""
    return frozenset(
        index
        for index in found.held
        if any(flow.values[value].needed for value in flow.operators[index].outputs)
        or (index < found.ends and flow.operators[index].replaceable)
    )


def _sparse(rows: list[dict[int, float]]) -> tuple[NDArray[np.float64], tuple[NDArray[np.int64], NDArray[np.int64]]]:
    entries = [(weight, row, column) for row, columns in enumerate(rows) for column, weight in columns.items()]
    table = np.array(entries, np.float64).reshape(-1, 3)
    return table[:, 0], (table[:, 1].astype(np.int64), table[:, 2].astype(np.int64))
