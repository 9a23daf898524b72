"""Select the operator outputs that a region holds, so that its recompute costs least for the bytes held.

A recompute runs the operators in their order and ends when nothing is missing any more; operators whose outputs are
held do not run. So the requests are closed: a value that backward needs is held, or the recompute reaches the operator
that saves it, and each operator on the way is held or runs, its inputs being available since the operators before it
were held or ran. See NOTE [ What a selection means ].

Deliberately missing: skipping operators whose outputs have no reader. A recompute is code that runs; to skip operators
in between, hold their results.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from torchremat.schedules.dataflow import Dataflow
from torchremat.schedules.knapsacks import Floats, Knapsack

# NOTE [ What a selection means ]
#
# `held` are operators. For each of them
#
#   its needed outputs     are held to their backward
#   its other outputs      are held to their next use in the recompute, if it gets there and the operator is replaceable
#
# A needed value that no operator makes is available, if it is holdable. Every other needed value that is not held is
# missing, and the recompute ends at the last save of a missing one. It costs the sum over the operators before that
# point that are not both held and replaceable, and an overhead for each operator that it passes.
#
# An operator can be held if all its outputs can, or, if it is not replaceable, one that is needed.

# NOTE [ A knapsack for each end ]
#
# Suppose a recompute passes exactly the first n operators. Then only one choice is left open:
#
#   values saved after the first n      are held, or the recompute would not end there
#   held operators of the first n       do not run again if replaceable; if not, holding them spares nothing
#
# so each replaceable operator of the first n whose outputs are saved by then is held or runs, independently of the
# others: things with bytes as weight and the cost of running them as worth, in the remaining room. A recompute ends
# where values are saved, so the best selection is the best of one knapsack for each such position, and upper bounds on
# their worth rule out most of them once one has been solved.
#
# The fewest bytes at a cost are knapsacks too: of the operators not held, with their cost as weight and bytes as worth.

_CAP_S = 60.0
# Selections that cost at most this much more than the best are as good, and of these the one with the fewest bytes
# wins.
_GAP = 1e-4


@dataclass(frozen=True, kw_only=True)
class OperatorSelection:
    """Operators whose outputs are held, and the resulting bytes and cost.

    Attributes:
        held: The operators, by index.
        held_bytes: Of the values held from forward to recompute.
        cost: Of the recompute.
        ends: How many operators the recompute passes; 0 without a recompute.
        bound: No selection within the same limit costs less; at most a ten thousandth below `cost` if it was solved to
            the end.
        is_lowest: Whether it was chosen for its bytes alone, whatever operators cost.
    """

    held: frozenset[int]
    held_bytes: int
    cost: float
    ends: int
    bound: float
    is_lowest: bool = field(default=False, compare=False)


def evaluate(flow: Dataflow, held: Iterable[int], *, overhead: float = 0.0) -> OperatorSelection:
    """Return the effect of holding some operators. See NOTE [ What a selection means ].

    Args:
        flow: The operators.
        held: Operators whose outputs are held.
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
    return OperatorSelection(held=chosen, held_bytes=held_bytes, cost=cost, ends=ends, bound=cost)


def held_values(flow: Dataflow, held: frozenset[int]) -> set[int]:
    """Return the values that backward finds if the outputs of some operators are held."""
    return {
        number
        for number, value in enumerate(flow.values)
        if value.holdable and (number not in flow.maker or flow.maker[number] in held)
    }


def holdable(flow: Dataflow) -> list[int]:
    """Return the operators that can be held. See NOTE [ What a selection means ]."""
    result: list[int] = []
    for index, operator in enumerate(flow.operators):
        outputs = [flow.values[value] for value in operator.outputs]
        if operator.replaceable:
            if all(value.holdable for value in outputs):
                result.append(index)
        elif any(value.needed and value.holdable for value in outputs):
            result.append(index)
    return result


def select(
    flow: Dataflow, limit_bytes: int, *, overhead: float = 0.0, cap_s: float = _CAP_S
) -> OperatorSelection | None:
    """Return the selection of least cost, to a ten thousandth, that holds at most `limit_bytes`; None if there is none.

    Of equally cheap ones the selection that holds the fewest bytes. See NOTE [ A knapsack for each end ].

    Args:
        flow: The operators of a region.
        limit_bytes: Of the values held from forward to recompute.
        overhead: See `evaluate`.
        cap_s: Seconds, after which the best selection found so far is returned, with its bound.
    """
    return _Knapsacks(flow, overhead).solve(limit_bytes, cap_s)


def choices(
    flow: Dataflow,
    *,
    points: int = 8,
    overhead: float = 0.0,
    most_bytes: int | None = None,
    most_seconds: float = _CAP_S,
) -> tuple[OperatorSelection, ...]:
    """Return selections between holding everything that spares cost and holding nothing, most bytes first.

    None of them is dominated by another one in cost and bytes, nor by holding nothing at all.

    Args:
        flow: The operators of a region.
        points: The most selections between the two.
        overhead: See `evaluate`.
        most_bytes: The most bytes that these hold, if holding more is known to be worth little.
        most_seconds: After so many seconds the best ones found are returned.
    """
    ends_s = time.perf_counter() + most_seconds
    knapsacks = _Knapsacks(flow, overhead)
    most = knapsacks.solve(sum(value.size_bytes for value in flow.values), min(_CAP_S, most_seconds))
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
        one = knapsacks.solve(limit, min(_CAP_S, left_s))
        if one is not None and one.held:
            found.append(one)
    return tuple(dict.fromkeys(one for one in found if not any(_beats(other, one) for other in (*found, nothing))))


def _beats(one: OperatorSelection, other: OperatorSelection) -> bool:
    """Whether `one` is no worse in both, and better in one."""
    if one.held_bytes > other.held_bytes or one.cost > other.cost:
        return False
    return (one.held_bytes, one.cost) != (other.held_bytes, other.cost)


@dataclass(frozen=True, kw_only=True, eq=False)
class _RecomputeEnd:
    """The open choices if a recompute ends at one position.

    Attributes:
        held: Operators that must be held.
        held_bytes: Their bytes.
        cost: If no others are held.
        places: The other operators that may be held, in decreasing order of cost spared per byte.
        spared: The cost that holding each of them spares.
        size_bytes: The bytes of each of them.
        room_bytes: Limit on their total bytes.
    """

    held: list[int]
    held_bytes: float
    cost: float
    places: NDArray[np.int64]
    spared: Floats
    size_bytes: Floats
    room_bytes: float

    @cached_property
    def knapsack(self) -> Knapsack:
        """The knapsack of operators to hold, to spare the most."""
        return Knapsack(self.spared, self.size_bytes, self.room_bytes)

    @property
    def least(self) -> float:
        """No selection with this end costs less."""
        return self.cost - self.knapsack.bound

    def left_out(self, most_cost: float) -> tuple[Knapsack, NDArray[np.int64]] | None:
        """Return the knapsack of operators not to hold, to save the most bytes within a cost, and their places."""
        room = most_cost - (self.cost - float(self.spared.sum()))
        takes = np.flatnonzero(self.size_bytes > 0)[::-1]
        # Of equal ones the first are left out, as operators that spare most for their bytes are held.
        takes = takes[np.argsort(-self.size_bytes[takes] / self.spared[takes], kind="stable")]
        return None if room < 0 else (Knapsack(self.size_bytes[takes], self.spared[takes], room), takes)


@dataclass
class _BestSelection:
    """The best selection so far.

    Attributes:
        held: The operators.
        held_bytes: Their bytes.
        cost: Of the recompute.
        missed: Lower bound on the cost of selections not searched.
    """

    held: list[int] = field(default_factory=list[int])
    held_bytes: float = math.inf
    cost: float = math.inf
    missed: float = math.inf


class _Knapsacks:
    """The knapsacks of a dataflow. See NOTE [ A knapsack for each end ]."""

    def __init__(self, flow: Dataflow, overhead: float) -> None:
        self.flow = flow
        self.overhead = overhead
        count, candidates = len(flow.operators), set(holdable(flow))
        self.cost = np.array([operator.cost for operator in flow.operators])
        spared = [one.replaceable and index in candidates for index, one in enumerate(flow.operators)]
        self.is_spared = np.array(spared, np.bool_)
        # The bytes of holding an operator, for backward and for the recompute.
        self.needed_bytes, self.other_bytes = np.zeros(count), np.zeros(count)
        # Where the last of its outputs that can be held to backward is saved. A recompute runs up to outputs that
        # cannot be held.
        self.saved_after, first_end = np.zeros(count, np.int64), 0
        for number, value in enumerate(flow.values):
            index = flow.maker.get(number)
            if index in candidates:
                (self.needed_bytes if value.needed else self.other_bytes)[index] += value.size_bytes
            if value.needed and value.holdable and index in candidates:
                self.saved_after[index] = max(self.saved_after[index], value.saved_after)
            elif value.needed and not (value.holdable and index is None):
                first_end = max(first_end, value.saved_after)
        ends = {0, *(value.saved_after for value in flow.values if value.needed)}
        # No recompute passes an operator that must not run again and would run whenever it is reached.
        runs_once = np.flatnonzero(np.isinf(self.cost) & ~self.is_spared)
        last_end = int(runs_once[0]) if len(runs_once) else max(ends)
        self.ends = sorted(end for end in ends if first_end <= end <= last_end)
        self._sort()

    def _sort(self) -> None:
        """Put the operators in the order of knapsacks. Of equal ones the last come first: their backward is first."""
        size_bytes = self.needed_bytes + self.other_bytes
        places = np.flatnonzero(self.is_spared & (self.cost > 0) & np.isfinite(self.cost))[::-1]
        with np.errstate(divide="ignore"):
            rates = self.cost[places] / size_bytes[places]
        self.places = places[np.argsort(-rates, kind="stable")]
        self.size_bytes = size_bytes[self.places]

    def _end(self, end: int, limit_bytes: int) -> _RecomputeEnd | None:
        """Return the open choices at a position; None if the operators that must be held there exceed the limit."""
        inside = np.arange(len(self.cost)) < end
        spared = inside & self.is_spared
        has_to = (self.saved_after > end) | (spared & np.isinf(self.cost))
        held_bytes = float(self.needed_bytes[has_to].sum() + self.other_bytes[has_to & spared].sum())
        if held_bytes > limit_bytes:
            return None
        may = (inside & ~has_to)[self.places]
        return _RecomputeEnd(
            held=np.flatnonzero(has_to).tolist(),
            held_bytes=held_bytes,
            cost=self.overhead * end + float(self.cost[inside & ~(has_to & spared)].sum()),
            places=self.places[may],
            spared=self.cost[self.places[may]],
            size_bytes=self.size_bytes[may],
            room_bytes=limit_bytes - held_bytes,
        )

    def solve(self, limit_bytes: int, cap_s: float) -> OperatorSelection | None:
        """See `select`."""
        ends_s = time.perf_counter() + cap_s
        every = (self._end(end, limit_bytes) for end in self.ends)
        ends = sorted((end for end in every if end is not None), key=lambda end: end.least)
        if not ends:
            return None
        found = _BestSelection()
        self._spare_most(ends, found, ends_s)
        least = min(found.cost, found.missed)
        self._hold_least(ends, found, ends_s)
        best = evaluate(self.flow, found.held, overhead=self.overhead)
        return replace(best, held=_useful(self.flow, best), bound=max(0.0, min(best.cost, least)))

    def _spare_most(self, ends: list[_RecomputeEnd], found: _BestSelection, ends_s: float) -> None:
        """Find the selection of least cost."""
        for end in ends:
            if end.least >= found.cost:
                break
            if math.isfinite(found.cost) and time.perf_counter() >= ends_s:
                found.missed = min(found.missed, end.least)
                break
            packing = end.knapsack.pack(above=end.cost - found.cost, ends_s=ends_s)
            if packing.missed is not None:
                found.missed = min(found.missed, end.cost - packing.missed)
            if end.cost - packing.worth < found.cost:
                found.cost = end.cost - packing.worth
                found.held = [*end.held, *(int(end.places[place]) for place in packing.taken)]
                found.held_bytes = end.held_bytes + float(end.size_bytes[list(packing.taken)].sum())

    def _hold_least(self, ends: list[_RecomputeEnd], found: _BestSelection, ends_s: float) -> None:
        """Find the selection with the fewest bytes at about the same cost."""
        most_cost = found.cost * (1 + _GAP)
        for end in ends:
            if end.least > most_cost or time.perf_counter() >= ends_s:
                break
            asked = end.left_out(most_cost)
            all_bytes = end.held_bytes + float(end.size_bytes.sum())
            if asked is None or all_bytes - asked[0].bound >= found.held_bytes:
                continue
            packing = asked[0].pack(above=all_bytes - found.held_bytes, ends_s=ends_s)
            if all_bytes - packing.worth < found.held_bytes:
                out = set(asked[1][list(packing.taken)].tolist())
                found.held = [*end.held, *(int(one) for place, one in enumerate(end.places) if place not in out)]
                found.held_bytes = all_bytes - packing.worth


def _useful(flow: Dataflow, found: OperatorSelection) -> frozenset[int]:
    """Return the held operators without the ones that hold nothing and spare nothing."""
    return frozenset(
        index
        for index in found.held
        if any(flow.values[value].needed for value in flow.operators[index].outputs)
        or (index < found.ends and flow.operators[index].replaceable)
    )
