"""The knapsack problem: choose things of the greatest worth within a limit of weight.

Take the things of the greatest worth for their weight while there is room. At the price of a unit of weight where that
ends, no choice is worth more than this one plus the remaining room sold at that price, and each change, a thing left or
taken, loses a known amount against that. So the best choice is a few changes away:

    order     the changes that lose least come first; a change is skipped if it alone loses more than the best choice
              found so far does in all
    states    the results of the changes tried so far; a state that weighs no less than another and is worth no
              more is dropped

Source: G. L. Nemhauser and Z. Ullmann, "Discrete dynamic programming and capital allocation", Management Science 15(9),
1969, for the states; D. Pisinger, "A minimal algorithm for the 0-1 knapsack problem", Operations Research 45(5), 1997,
for beginning at the price.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Floats: TypeAlias = NDArray[np.float64]

# Of more states the ones that have lost least are kept, and the bound covers the rest.
_MOST_STATES = 20_000


@dataclass(frozen=True, kw_only=True)
class Packing:
    """The things that are taken.

    Attributes:
        taken: Indices of the things.
        worth: Of all of them.
        missed: Upper bound on the worth of choices not searched; None if all that could be worth more were.
    """

    taken: tuple[int, ...]
    worth: float
    missed: float | None


class Knapsack:
    """Things with worths and weights, and the room for them.

    Args:
        worths: Of each thing, positive; in decreasing order of worth for weight.
        weights: Of each, at least 0.
        room: Limit on their total weight, at least 0.

    Attributes:
        bound: No choice is worth more.
    """

    def __init__(self, worths: Floats, weights: Floats, room: float) -> None:
        self._worths = worths
        self._weights = weights
        self._room = room
        total = np.cumsum(weights)
        self._begun = begun = int(np.searchsorted(total, room, side="right"))
        self._price = float(worths[begun] / weights[begun]) if begun < len(worths) else 0.0
        self._weight = float(total[begun - 1]) if begun else 0.0
        self.bound = float(worths[:begun].sum()) + self._price * (room - self._weight)

    def pack(self, *, above: float = -math.inf, ends_s: float = math.inf) -> Packing:
        """Return the choice of the greatest worth.

        Args:
            above: Choices that are worth no more are not searched.
            ends_s: On the clock of `time.perf_counter`: the best choice found by then is returned.
        """
        taken = self._greedy()
        worth = float(self._worths[taken].sum())
        search = _ChangeSearch(self._worths, self._weights, self._room, self._price, self._begun)
        changes = search.run(self.bound - max(worth, above), ends_s)
        if changes is not None:
            taken = np.arange(len(self._worths)) < self._begun
            taken[changes] ^= True
            worth = float(self._worths[taken].sum())
        missed = None if search.least_missed is None else self.bound - search.least_missed
        return Packing(taken=tuple(np.flatnonzero(taken).tolist()), worth=worth, missed=missed)

    def _greedy(self) -> NDArray[np.bool_]:
        """Return which things are taken if each is taken in turn while it fits."""
        taken, weight = np.arange(len(self._worths)) < self._begun, self._weight
        for place in range(self._begun, len(taken)):
            if weight + self._weights[place] <= self._room:
                taken[place] = True
                weight += float(self._weights[place])
        return taken


class _ChangeSearch:
    """The changes to the greedy choice of the first things that lose least.

    Attributes:
        least_missed: Lower bound on the loss of choices not searched; None if all that could be better were.
    """

    def __init__(self, worths: Floats, weights: Floats, room: float, price: float, begun: int) -> None:
        self._losses = np.abs(worths - price * weights)
        self._added = np.where(np.arange(len(weights)) < begun, -weights, weights)
        self._room = room
        self._price = price
        self._weight = np.array([weights[:begun].sum()])
        self._lost = np.zeros(1)
        self._trail: list[NDArray[np.int64]] = []  # for each change the states that it was or was not applied to
        self.least_missed: float | None = None

    def run(self, most_lost: float, ends_s: float) -> list[int] | None:
        """Return the changes that lose least; None if none lose less than `most_lost`."""
        changes, best = np.argsort(self._losses, kind="stable").tolist(), None
        for number, change in enumerate(changes):
            if self._losses[change] >= most_lost:
                break
            if time.perf_counter() >= ends_s:
                self._miss(0.0)
                break
            self._make(change, most_lost)
            if not len(self._lost):
                break
            # Of states that fit, the heaviest is worth most.
            place = int(np.searchsorted(self._weight, self._room, side="right")) - 1
            if place >= 0:
                lost = float(self._lost[place] + self._price * (self._room - self._weight[place]))
                if lost < most_lost:
                    most_lost, best = lost, (number, place)
        return None if best is None else self._changes(changes, *best)

    def _miss(self, lost: float) -> None:
        self.least_missed = lost if self.least_missed is None else min(lost, self.least_missed)

    def _make(self, change: int, most_lost: float) -> None:
        """Replace the states by the states with and without a change."""
        count = len(self._lost)
        lost = np.concatenate([self._lost, self._lost + self._losses[change]])
        weight = np.concatenate([self._weight, self._weight + self._added[change]])
        chosen = np.flatnonzero(lost < most_lost)
        chosen = chosen[np.argsort(weight[chosen], kind="stable")]
        worth = self._price * weight[chosen] - lost[chosen]
        before = np.concatenate([[-math.inf], np.maximum.accumulate(worth)[:-1]]) if len(chosen) else worth
        chosen = chosen[worth > before]
        if len(chosen) > _MOST_STATES:
            by_loss = np.argsort(lost[chosen], kind="stable")
            self._miss(float(lost[chosen[by_loss[_MOST_STATES]]]))
            chosen = chosen[np.sort(by_loss[:_MOST_STATES])]
        self._lost, self._weight = lost[chosen], weight[chosen]
        self._trail.append(np.where(chosen < count, chosen, count - 1 - chosen))

    def _changes(self, changes: list[int], number: int, place: int) -> list[int]:
        """Return the changes that lead to a state."""
        made: list[int] = []
        for stage in range(number, -1, -1):
            state = int(self._trail[stage][place])
            if state < 0:
                made.append(changes[stage])
            place = state if state >= 0 else -1 - state
        return made
