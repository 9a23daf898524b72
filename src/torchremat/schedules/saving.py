"""What to save between a forward and its backward, so that the peak of both is within a limit at the least recompute.

Three steps, each exact in its own terms, and the split itself has the last word:

    hull       minimise recompute + price x saved bytes over the whole list, for a few prices: linear programs whose
               vertices are integral (they are minimum cuts). Each tells what is worth saving at that price.
    stretches  between two places where little is alive, the forward can be made again by itself from what crosses
               the first. A stretch under one of the prices costs so much, and adds a curve of bytes to the step.
    cover      an integer program takes stretches from the first operator to the last, a price for each, so that the
               sum of their curves stays below the limit everywhere. Rows are added where it does not.

The answer is split as the compiler would, and its peak compared; what it is above the limit, the next try is tightened
by. In the end values are saved in addition as long as there is room.

Source: the linear programs are the minimum cuts of "Rematerialization using min-cut" (MLSys 2023), with a price for
each byte; the cover of stretches is the persistent schedule of hal-02352969 without nesting, over the curve of
the whole step instead of one number for each stage.

Missing on purpose: values that are made more than twice, so that a chain needs about twice the root of its length.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from functools import cached_property

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array, csr_array

from torchremat.schedules.joint import Joint, Split, is_possible, split
from torchremat.schedules.stretches import Choice, Stretches

_MOST_PRICES = 7
_MOST_TRIES = 8
_MOST_ROWS = 60
_CAP_S = 60.0
# A good cover is found at once, and its proof may take half a minute: `bound` says what it could be worth.
_PROGRAM_S = 2.0
_LEAST_S = 0.05  # for one program, where no time is left
_GAP = 5e-3
_MOST_POLISHED = 60


class Saver:
    """Chooses what to save for one joint list, for any number of limits.

    Args:
        joint: The list.
        more: Splits that are known otherwise; they are candidates like the rest.
        cap_s: Seconds for one limit, after which the best split found so far is taken.
    """

    def __init__(self, joint: Joint, more: Iterable[Iterable[int]] = (), *, cap_s: float = _CAP_S) -> None:
        self.joint = joint
        self._cap_s = cap_s
        self._until_s = 0.0  # on the clock
        self.plain = split(joint, joint.asked)
        found = (split(joint, saved) for saved in (*more, *self._hull))
        self._known = [self.plain, *(one for one in found if is_possible(one))]

    @cached_property
    def floor(self) -> Split:
        """The split with the smallest peak that is found."""
        self._until_s = time.monotonic() + self._cap_s
        saved = self._cover(None)
        found = [*self._known, *([] if saved is None else [split(self.joint, saved)])]
        return min(filter(is_possible, found), key=lambda one: (one.peak_bytes, one.cost))

    def solve(self, limit_bytes: int) -> Split | None:
        """Return the split with the least recompute that is found with a peak of at most `limit_bytes`."""
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
        return self._polished(min(fitting, key=lambda one: (one.cost, one.peak_bytes)), limit_bytes)

    def bound(self, limit_bytes: int) -> float:
        """Return a cost below which nothing has a peak within a limit, whatever it makes again, and however often.

        When the backward begins, what is saved is there beside what is there all the time. So for each price of a
        byte the least of cost and price, less the price of what room there is, is a bound. The best price is where
        what is saved begins to fit.
        """
        room = limit_bytes - self.joint.fixed_bytes
        saved = [self._program.figures(one) for one in self._hull]
        above = min((one for one in saved if one[1] > room), key=lambda one: one[1], default=None)
        below = max((one for one in saved if one[1] <= room), key=lambda one: one[1], default=None)
        best = 0.0
        for _ in range(_MOST_PRICES):
            if above is None or below is None or above[0] >= below[0]:
                break
            price = (below[0] - above[0]) / (above[1] - below[1])
            cost, size = self._program.figures(self._program.solve(price))
            best = max(best, cost + price * (size - room))
            if (cost, size) in (above, below):
                break
            above, below = ((cost, size), below) if size > room else (above, (cost, size))
        return best

    def _polished(self, best: Split, limit_bytes: int) -> Split:
        """Save more as long as there is room: what would cost most to make again, for its bytes, comes first."""
        operators, sizes = self.joint.operators, self.joint.size_bytes
        again = sorted(
            (index for index in set(best.forward) & set(best.backward) if operators[index].cost > 0),
            key=lambda index: -operators[index].cost / max(1, sum(sizes[one] for one in operators[index].outputs)),
        )
        for index in again[:_MOST_POLISHED]:
            if index not in best.backward:
                continue
            wanted = [value for value in operators[index].outputs if value in self._readable]
            found = split(self.joint, {*best.saved, *wanted})
            if found.peak_bytes <= limit_bytes and found.cost < best.cost:
                best = found
        return best

    @cached_property
    def _readable(self) -> frozenset[int]:
        return frozenset(value for operator in self.joint.operators for value in operator.inputs)

    @cached_property
    def _program(self) -> _Program:
        return _Program(self.joint)

    @cached_property
    def _hull(self) -> list[frozenset[int]]:
        """What is saved at each of some prices per byte, from cheap to dear."""
        program = self._program
        cheap, dear = program.solve(1e-9), program.solve(1e9)
        found = {cheap: program.figures(cheap), dear: program.figures(dear)}
        spans = [(cheap, dear)]
        while spans and len(found) < _MOST_PRICES:
            # The widest gap first, so that the prices that there is room for spread over the whole curve.
            low, high = max(spans, key=lambda span: found[span[0]][1] - found[span[1]][1])
            spans.remove((low, high))
            (cost_low, bytes_low), (cost_high, bytes_high) = found[low], found[high]
            if bytes_low <= bytes_high:
                continue
            middle = program.solve((cost_high - cost_low) / (bytes_low - bytes_high))
            if middle not in found:
                found[middle] = program.figures(middle)
                spans += [(low, middle), (middle, high)]
        return sorted(found, key=lambda one: -found[one][1])

    @cached_property
    def _stretches(self) -> Stretches:
        return Stretches(self.joint, self._hull)

    def _cover(self, limit_bytes: int | None) -> frozenset[int] | None:
        """Return what a cover of stretches saves, of least cost within a limit, or of least peak for None."""
        choices, base = self._stretches.choices, self._stretches.base
        count = len(choices)
        if not count:
            return None
        flow = self._flow(choices)
        costs = np.array([choice.cost for choice in choices])
        scale = max(float(costs.max()), 1.0)
        peak_scale = float(max(base.max(), max(choice.curve.max() for choice in choices), 1.0))
        # Where choices are highest by themselves; rows for other times follow as they are broken.
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
            balance = np.hstack([flow[0].toarray(), np.zeros((flow[0].shape[0], extra))])
            left_s = self._until_s - time.monotonic()
            solved = milp(
                objective,
                constraints=[LinearConstraint(rows, -np.inf, upper), LinearConstraint(balance, flow[1], flow[1])],
                integrality=np.array([1] * count + [0] * extra),
                bounds=Bounds(0, np.append(np.ones(count), np.full(extra, np.inf))),
                options={"time_limit": min(_PROGRAM_S, max(_LEAST_S, left_s)), "mip_rel_gap": _GAP},
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

    def _flow(self, choices: Sequence[Choice]) -> tuple[csr_array, np.ndarray]:
        """The rows that make a path of stretches from the first cut to the last."""
        cuts = len(self._stretches.cuts)
        starts = [choice.first for choice in choices]
        ends = [choice.last for choice in choices]
        columns = list(range(len(choices)))
        values = [1.0] * len(choices) + [-1.0] * len(choices)
        rows = coo_array((values, ([*starts, *ends], columns * 2)), shape=(cuts, len(choices)))
        balance = np.zeros(cuts)
        balance[0], balance[-1] = 1, -1
        return csr_array(rows), balance


class _Program:
    """Minimise the cost of what runs again plus a price for each saved byte."""

    def __init__(self, joint: Joint) -> None:
        self.joint = joint
        operators = joint.operators
        # Only what the asked values come from can matter.
        self.running = sorted(joint.needed_for(joint.asked))
        row_of = {index: place for place, index in enumerate(self.running)}
        self.values = [value for index in self.running for value in operators[index].outputs]
        place = {value: len(self.running) + number for number, value in enumerate(self.values)}
        entries: list[tuple[int, int, float]] = []
        lower: list[float] = []
        for value in sorted(joint.asked):
            entries += [(len(lower), place[value], 1.0), (len(lower), row_of[joint.maker[value]], 1.0)]
            lower.append(1.0)
        for index in self.running:
            for value in operators[index].inputs:
                maker = joint.maker.get(value)
                if maker is not None:
                    entries += [(len(lower), place[value], 1.0), (len(lower), row_of[maker], 1.0)]
                    entries.append((len(lower), row_of[index], -1.0))
                    lower.append(0.0)
        shape = (len(lower), len(self.running) + len(self.values))
        rows, columns, values = zip(*entries, strict=True) if entries else ((), (), ())
        self.matrix = csr_array(coo_array((values, (rows, columns)), shape=shape))
        self.lower = np.array(lower)
        # Running for the first time in the backward costs nothing more.
        again = [operators[index].cost if index in joint.of_forward else 0.0 for index in self.running]
        self.cost = np.array([0.0 if math.isinf(cost) else cost for cost in again])
        self.most = np.append([0.0 if math.isinf(cost) else 1.0 for cost in again], np.ones(len(self.values)))
        self.bytes = np.array([float(joint.size_bytes[value]) for value in self.values])

    def solve(self, price: float) -> frozenset[int]:
        """Return what is saved at a price per byte."""
        if not self.values:
            return frozenset()
        objective = np.append(self.cost, self.bytes * price + 1e-6 * price)
        objective /= max(float(objective.max()), 1e-300)
        solved = milp(  # without integers: all vertices of a minimum cut are integral
            objective,
            constraints=LinearConstraint(self.matrix, self.lower, np.inf),
            bounds=Bounds(0, self.most),
        )
        if solved.x is None:
            return self.joint.asked
        saved = np.flatnonzero(solved.x[len(self.running) :] > 0.5)
        return split(self.joint, (self.values[index] for index in saved)).saved

    def figures(self, saved: frozenset[int]) -> tuple[float, int]:
        """Return the cost of what runs again, and the bytes that are saved."""
        return split(self.joint, saved).cost, sum(self.joint.size_bytes[value] for value in saved)
