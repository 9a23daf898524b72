"""The values worth saving between a forward and its backward at a price for each byte.

A value is worth it if the operators that recompute it cost more than its bytes. All values together form a minimum cut,
so a linear program without integers gives the best choice for a price. Over all prices, these choices are the lower
hull of the possible trade-offs: recompute against bytes live when the backward begins.

Source: "Rematerialization using min-cut" (MLSys 2023), with a price for each byte.
"""

from __future__ import annotations

import math
from functools import cached_property

import numpy as np

from torchremat.schedules.joint import Joint, split
from torchremat.schedules.linear_programs import Entries, Rows, minimize

_MOST_PRICES = 7


class Prices:
    """The choices of one joint list.

    Args:
        joint: The list; bytes in addition to its values do not matter.
    """

    def __init__(self, joint: Joint) -> None:
        self.joint = joint
        operators = joint.operators
        # Only ancestors of the asked values can matter.
        self.running = sorted(joint.needed_for(joint.asked))
        row_of = {index: place for place, index in enumerate(self.running)}
        self.values = [value for index in self.running for value in operators[index].outputs]
        place = {value: len(self.running) + number for number, value in enumerate(self.values)}
        # What the backward asks for is saved or its maker runs, and so is what an operator reads that runs.
        reads: list[tuple[int, int | None]] = [(value, None) for value in sorted(joint.asked)]
        reads += [(value, index) for index in self.running for value in operators[index].inputs if value in joint.maker]
        entries: list[tuple[int, int, float]] = []
        for number, (value, reader) in enumerate(reads):
            entries += [(number, place[value], 1.0), (number, row_of[joint.maker[value]], 1.0)]
            entries += [] if reader is None else [(number, row_of[reader], -1.0)]
        shape = (len(reads), len(self.running) + len(self.values))
        rows, columns, values = zip(*entries, strict=True) if entries else ((), (), ())
        self.matrix = Entries(values, rows, columns, shape)
        self.lower = np.array([float(reader is None) for _, reader in reads])
        # A first run in the backward costs nothing extra.
        again = [operators[index].cost if index in joint.of_forward else 0.0 for index in self.running]
        self.cost = np.array([0.0 if math.isinf(cost) else cost for cost in again])
        self.most = np.append([0.0 if math.isinf(cost) else 1.0 for cost in again], np.ones(len(self.values)))
        self.bytes = np.array([float(joint.size_bytes[value]) for value in self.values])

    @cached_property
    def hull(self) -> list[frozenset[int]]:
        """The saved values at several prices per byte, from low to high."""
        cheap, dear = self.solve(1e-9), self.solve(1e9)
        found = {cheap: self.figures(cheap), dear: self.figures(dear)}
        spans = [(cheap, dear)]
        while spans and len(found) < _MOST_PRICES:
            # The widest gap first, so that the limited number of prices spreads over the whole curve.
            low, high = max(spans, key=lambda span: found[span[0]][1] - found[span[1]][1])
            spans.remove((low, high))
            (cost_low, bytes_low), (cost_high, bytes_high) = found[low], found[high]
            if bytes_low <= bytes_high:
                continue
            middle = self.solve((cost_high - cost_low) / (bytes_low - bytes_high))
            if middle not in found:
                found[middle] = self.figures(middle)
                spans += [(low, middle), (middle, high)]
        return sorted(found, key=lambda one: -found[one][1])

    def bound(self, limit_bytes: int) -> float:
        """Return a lower bound on the cost of any split with a peak within a limit, even with values made many times.

        When the backward begins, the saved values are live in addition to the values that always are. So for each price
        per byte, the least sum of cost and price, minus the price of the room, is a bound. The best price is the one
        where the saved values begin to fit.
        """
        room = limit_bytes - self.joint.fixed_bytes
        saved = [self.figures(one) for one in self.hull]
        above = min((one for one in saved if one[1] > room), key=lambda one: one[1], default=None)
        below = max((one for one in saved if one[1] <= room), key=lambda one: one[1], default=None)
        best = 0.0
        for _ in range(_MOST_PRICES):
            if above is None or below is None or above[0] >= below[0]:
                break
            price = (below[0] - above[0]) / (above[1] - below[1])
            cost, size = self.figures(self.solve(price))
            best = max(best, cost + price * (size - room))
            if (cost, size) in (above, below):
                break
            above, below = ((cost, size), below) if size > room else (above, (cost, size))
        return best

    def solve(self, price: float) -> frozenset[int]:
        """Return the saved values at a price per byte."""
        if not self.values:
            return frozenset()
        objective = np.append(self.cost, self.bytes * price + 1e-6 * price)
        objective /= max(float(objective.max()), 1e-300)
        # Without integers: all vertices of a minimum cut are integral.
        solved = minimize(objective, Rows(self.matrix, self.lower), highest=self.most)
        if solved.x is None:
            return self.joint.asked
        saved = np.flatnonzero(solved.x[len(self.running) :] > 0.5)
        return split(self.joint, (self.values[index] for index in saved)).saved

    def figures(self, saved: frozenset[int]) -> tuple[float, int]:
        """Return the recompute cost and the saved bytes."""
        return split(self.joint, saved).cost, sum(self.joint.size_bytes[value] for value in saved)
