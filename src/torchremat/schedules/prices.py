"""What is worth saving between a forward and its backward at a price for each byte.

A value is worth it if the operators that would make it again cost more than its bytes. All values at once are a minimum
cut, so that a linear program without integers gives the best choice for a price. Over all prices, these choices are
the lower hull of what can be had: recompute against bytes that are there when the backward begins.

Source: "Rematerialization using min-cut" (MLSys 2023), with a price for each byte.
"""

from __future__ import annotations

import math
from functools import cached_property

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array, csr_array

from torchremat.schedules.joint import Joint, split

_MOST_PRICES = 7


class Prices:
    """The choices of one joint list.

    Args:
        joint: The list; what is there beside its values does not matter.
    """

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

    @cached_property
    def hull(self) -> list[frozenset[int]]:
        """What is saved at each of some prices per byte, from cheap to dear."""
        cheap, dear = self.solve(1e-9), self.solve(1e9)
        found = {cheap: self.figures(cheap), dear: self.figures(dear)}
        spans = [(cheap, dear)]
        while spans and len(found) < _MOST_PRICES:
            # The widest gap first, so that the prices that there is room for spread over the whole curve.
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
        """Return a cost below which nothing has a peak within a limit, whatever it makes again, and however often.

        When the backward begins, what is saved is there beside what is there all the time. So for each price of a
        byte the least of cost and price, less the price of what room there is, is a bound. The best price is where
        what is saved begins to fit.
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
