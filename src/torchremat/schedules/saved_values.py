"""The values to save between a forward and its backward, for a peak within a limit at the least recompute.

Three steps, each exact in its own terms, and the exact split decides:

    hull       minimise recompute + price x saved bytes over the whole list, for a few prices. Each gives the values
               worth saving at that price.
    stretches  between two places with few live bytes, the forward can be recomputed by itself from the values that
               cross the first. A stretch under one of the prices has a cost, and adds a curve of bytes to the step.
    cover      an integer program takes stretches from the first operator to the last, a price for each, so that the
               sum of their curves stays below the limit everywhere. Rows are added where it does not.

The answer is split as the compiler would split it, and its peak compared; the excess over the limit tightens the next
try. Splits of the hull that cost less and do not fit are lowered, a value at a time, until they fit or cost as much. In
the end further values are saved while there is room.

Source: the cover of stretches is the persistent schedule of hal-02352969 without nesting, over the curve of the whole
step instead of one number for each stage.

The local search tries each change by splitting the list, so its effect on the peak is exact, in the order of the cost
per byte of the operator.

Missing on purpose: changes of two values at once, and values that are made more than twice, so that a chain needs
about twice the root of its length.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np

from torchremat.schedules.joint import Adjustments, Joint, Split, is_possible, split
from torchremat.schedules.linear_programs import Rows, minimize
from torchremat.schedules.prices import Prices
from torchremat.schedules.recompute_spans import RecomputeSpans, SpanChoice

_MOST_RAISED = 60
# Values that are tried before one is chosen, and the most that are tried in all.
_MOST_AT_ONCE = 30
_MOST_LOWERED = 150


def raised(joint: Joint, best: Split, limit_bytes: int) -> Split:
    """Save more while the peak is at most `limit_bytes`: the values with the highest recompute cost per byte first."""
    readable = {value for operator in joint.operators for value in operator.inputs}
    again = (index for index in set(best.forward) & set(best.backward) if joint.operators[index].cost > 0)
    for index in _by_worth(joint, again)[::-1][:_MOST_RAISED]:
        if index not in best.backward:
            continue
        wanted = readable.intersection(joint.operators[index].outputs)
        found = split(joint, {*best.saved, *wanted})
        if found.peak_bytes <= limit_bytes and found.cost < best.cost:
            best = found
    return best


def lowered(joint: Joint, high: Split, limit_bytes: int, *, below_cost: float) -> Split | None:
    """Save less until the peak is at most `limit_bytes`: each time drop the value that lowers it most for its cost.

    Returns:
        None if the peak does not get there, or not at a cost below `below_cost`.
    """
    tried = 0
    while high.peak_bytes > limit_bytes:
        steps: list[tuple[float, Split]] = []
        makers = {joint.maker[value] for value in high.saved if joint.size_bytes[value]}
        for index in _by_worth(joint, makers)[:_MOST_AT_ONCE]:
            found = split(joint, high.saved.difference(joint.operators[index].outputs))
            tried += 1
            if is_possible(found) and found.peak_bytes < high.peak_bytes and found.cost < below_cost:
                less = high.peak_bytes - max(found.peak_bytes, limit_bytes)
                steps.append((less / max(found.cost - high.cost, 1e-300), found))
        if not steps or tried > _MOST_LOWERED:
            return None
        _, high = max(steps, key=lambda step: step[0])
    return high


def _by_worth(joint: Joint, indices: Iterable[int]) -> list[int]:
    """Operators by cost per byte made, without the ones that must not run again."""
    operators, sizes = joint.operators, joint.size_bytes
    found = [index for index in indices if math.isfinite(operators[index].cost)]
    return sorted(
        found,
        key=lambda index: operators[index].cost / max(1, sum(sizes[output] for output in operators[index].outputs)),
    )


_MOST_TRIES = 8
_MOST_ROWS = 60
_CAP_S = 60.0
# A good cover is found at once, but its proof may take half a minute: `Prices.bound` bounds the possible gain.
_PROGRAM_S = 2.0
_LEAST_S = 0.05  # for one program, when no time is left
_GAP = 5e-3


class Saver:
    """Chooses the values to save for one joint list, for any number of limits.

    Args:
        joint: The list.
        more: Splits from elsewhere; they are candidates like the rest.
        cap_s: Seconds for one limit, after which the best split found so far is taken.
        prices: The prices of the list, if known.
    """

    def __init__(
        self, joint: Joint, more: Iterable[Iterable[int]] = (), *, cap_s: float = _CAP_S, prices: Prices | None = None
    ) -> None:
        self.joint = joint
        self._more = [frozenset(saved) for saved in more]
        self._cap_s = cap_s
        self._until_s = 0.0  # on the clock
        self._prices = prices or Prices(joint)
        self.plain = split(joint, joint.asked)
        found = (split(joint, saved) for saved in (*self._more, *self._prices.hull))
        self._known = [self.plain, *(one for one in found if is_possible(one))]

    def told(self, adjustments: Adjustments) -> Saver:
        """Return a saver for the same list with the bytes in addition to its values."""
        return Saver(replace(self.joint, adjustments=adjustments), self._more, cap_s=self._cap_s, prices=self._prices)

    @cached_property
    def floor(self) -> Split:
        """The split with the smallest peak found."""
        self._until_s = time.monotonic() + self._cap_s
        saved = self._cover(None)
        found = [*self._known, *([] if saved is None else [split(self.joint, saved)])]
        return min(filter(is_possible, found), key=lambda one: (one.peak_bytes, one.cost))

    def solve(self, limit_bytes: int) -> Split | None:
        """Return the split found with the least recompute and a peak of at most `limit_bytes`."""
        if self.plain.peak_bytes <= limit_bytes:
            return self.plain
        fitting = [one for one in self._known if one.peak_bytes <= limit_bytes]
        target = limit_bytes
        self._until_s = time.monotonic() + self._cap_s
        for _ in range(_MOST_TRIES):
            saved = self._cover(target)
            if saved is None:
                break
            found = split(self.joint, saved)
            if is_possible(found) and found.peak_bytes <= limit_bytes:
                fitting.append(found)
                break
            target -= max(1, found.peak_bytes - limit_bytes)
        if not fitting and self.floor.peak_bytes <= limit_bytes:
            fitting.append(self.floor)
        if not fitting:
            return None
        best = raised(self.joint, min(fitting, key=lambda one: (one.cost, one.peak_bytes)), limit_bytes)
        for near in self.nearly(limit_bytes, below_cost=best.cost):
            low = lowered(self.joint, near, limit_bytes, below_cost=best.cost)
            if low is not None:
                best = raised(self.joint, low, limit_bytes)
        return best

    def nearly(self, limit_bytes: int, *, below_cost: float) -> list[Split]:
        """Return the candidates below a cost whose peak is above a limit, the lowest first."""
        found = [one for one in self._known if one.cost < below_cost and one.peak_bytes > limit_bytes]
        return sorted(found, key=lambda one: one.peak_bytes)

    @cached_property
    def _stretches(self) -> RecomputeSpans:
        return RecomputeSpans(self.joint, self._prices.hull)

    def _cover(self, limit_bytes: int | None) -> frozenset[int] | None:
        """Return the values saved by a cover of stretches, of least cost within a limit, or of least peak for None."""
        choices, base = self._stretches.choices, self._stretches.base
        count = len(choices)
        path, ends = self._path(choices)
        costs = np.array([choice.cost for choice in choices])
        scale = max(float(costs.max()), 1.0)
        peak_scale = float(max(base.max(), max(choice.curve.max() for choice in choices), 1.0))
        # Times where single choices are highest; rows for other times follow when violated.
        times = sorted({int(np.argmax(base)), *(int(np.argmax(base + choice.curve)) for choice in choices)})
        curves = np.array([choice.curve for choice in choices])
        chosen: np.ndarray | None = None
        for _ in range(_MOST_ROWS):
            rows = curves[:, times].T / peak_scale
            if limit_bytes is None:
                rows = np.hstack([rows, -np.ones((len(times), 1))])
                objective = np.append(costs / scale * 1e-6, 1.0)
                upper = -base[times] / peak_scale
                extra = 1
            else:
                objective, upper, extra = costs / scale, (limit_bytes - base[times]) / peak_scale, 0
            left_s = self._until_s - time.monotonic()
            solved = minimize(
                objective,
                Rows(rows, highest=upper),
                Rows(np.pad(path, ((0, 0), (0, extra))), ends, ends),
                integers=np.array([1] * count + [0] * extra),
                highest=np.append(np.ones(count), np.full(extra, np.inf)),
                most_s=min(_PROGRAM_S, max(_LEAST_S, left_s)),
                gap=_GAP,
            )
            if solved.x is None:
                return None
            chosen = np.asarray(solved.x[:count] > 0.5)
            total = base + curves[chosen].sum(axis=0)
            limit = float(solved.x[-1]) * peak_scale if limit_bytes is None else float(limit_bytes)
            broken = int(np.argmax(total))
            if total[broken] <= limit * (1 + 1e-9) + 0.5 or broken in times:
                break
            times.append(broken)
        assert chosen is not None
        return frozenset[int]().union(*(choices[index].saved for index in np.flatnonzero(chosen)))

    def _path(self, choices: Sequence[SpanChoice]) -> tuple[np.ndarray, np.ndarray]:
        """The rows that make a path of stretches from the first cut to the last, and what these are to sum up to."""
        rows, ends = np.zeros((len(self._stretches.cuts), len(choices))), np.zeros(len(self._stretches.cuts))
        for place, choice in enumerate(choices):
            rows[choice.first, place], rows[choice.last, place] = 1, -1
        ends[0], ends[-1] = 1, -1
        return rows, ends
