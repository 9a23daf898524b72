"""What to take of some things, so that it is worth most within a limit of weight.

Take what is worth most for its weight, as far as there is room. At the price that a unit of weight has where that ends,
no choice is worth more than this one with the room that is left sold, and each thing that is changed, left or taken,
loses a known amount against that. So the best choice is a few changes away:

    order     the changes that lose least come first; none is looked at that loses more by itself than the best choice
              found so far does in all
    states    what the changes looked at so far can lead to; a state that weighs no less than another and is worth no
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

# Of more states those that have lost least are kept, and the bound says what may have been missed.
_MOST_STATES = 20_000


@dataclass(frozen=True, kw_only=True)
class Packing:
    """What is taken.

    Attributes:
        taken: Places of the things.
        worth: Of all of them.
        missed: What was not looked at is worth at most this; None if all was that could be worth more.
    """

    taken: tuple[int, ...]
    worth: float
    missed: float | None


class Knapsack:
    """Things, and how much of them there is room for.

    Args:
        worths: Of each thing, positive; those that are worth most for their weight come first.
        weights: Of each, at least 0.
        room: What they may weigh together, at least 0.

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
        """Return the choice that is worth most.

        Args:
            above: What is worth no more is not looked for.
            ends_s: On the clock of `time.perf_counter`: the best choice found by then is returned.
        """
        taken = self._greedy()
        worth = float(self._worths[taken].sum())
        search = _Search(self._worths, self._weights, self._room, self._price, self._begun)
        changes = search.run(self.bound - max(worth, above), ends_s)
        if changes is not None:
            taken = np.arange(len(self._worths)) < self._begun
            taken[changes] ^= True
            worth = float(self._worths[taken].sum())
        missed = None if search.least_missed is None else self.bound - search.least_missed
        return Packing(taken=tuple(np.flatnonzero(taken).tolist()), worth=worth, missed=missed)

    def _greedy(self) -> NDArray[np.bool_]:
        """Return which things are taken if each is that there is room for when its turn comes."""
        taken, weight = np.arange(len(self._worths)) < self._begun, self._weight
        for place in range(self._begun, len(taken)):
            if weight + self._weights[place] <= self._room:
                taken[place] = True
                weight += float(self._weights[place])
        return taken


class _Search:
    """The changes to a choice of the first things that lose least.

    Attributes:
        least_missed: What was not looked at loses at least this; None if all was that could have been better.
    """

    def __init__(self, worths: Floats, weights: Floats, room: float, price: float, begun: int) -> None:
        self._losses = np.abs(worths - price * weights)
        self._added = np.where(np.arange(len(weights)) < begun, -weights, weights)
        self._room = room
        self._price = price
        self._weight = np.array([weights[:begun].sum()])
        self._lost = np.zeros(1)
        self._trail: list[NDArray[np.int64]] = []  # for each change the states that it was made or not made to
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
            # Of states that fit the heaviest is worth most.
            place = int(np.searchsorted(self._weight, self._room, side="right")) - 1
            if place >= 0:
                lost = float(self._lost[place] + self._price * (self._room - self._weight[place]))
                if lost < most_lost:
                    most_lost, best = lost, (number, place)
        return None if best is None else self._changes(changes, *best)

    def _miss(self, lost: float) -> None:
        self.least_missed = lost if self.least_missed is None else min(lost, self.least_missed)

    def _make(self, change: int, most_lost: float) -> None:
        """Go from the states there are to those with a change made and without it."""
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
