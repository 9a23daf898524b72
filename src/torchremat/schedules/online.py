"""Which states of a loop to keep as it goes on, when its length is not known before it ends.

A state that was dropped is not in memory again before the backward, so after each step there is one choice: which of
the kept states to drop for the new one, or not to keep the new one. Two stretches whose border is dropped are one.

    slots=3     0              after step 0
                0 1            1
                0 1 2          2
                0   2 3        3: carry 1 is dropped for carry 3
                0     3 4      4
"""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate
from math import inf

from torchremat.schedules.binomial import advances

# Returns for known arguments are looked up: neighbours in a loop ask for nearly the same.
_advances = lru_cache(1 << 16)(advances)


class OnlineBorders:
    """The borders of a loop that goes on: after each step the choice that is cheapest if the loop ended there.

    Source: the problem is that of P. Stumm and A. Walther, "New algorithms for optimal online checkpointing", SIAM J.
    Sci. Comput. 32(2), 2010, and Q. Wang, P. Moin, G. Iaccarino, "Minimal repetition dynamic checkpointing algorithm
    for unsteady adjoint calculation", SIAM J. Sci. Comput. 31(4), 2009. We differ: theirs bound the repeats, so that
    just before a further repeat begins they run up to 1.3 times as many steps as a schedule that knows the length; with
    the exact cost of all choices it is 1.12 at most, from three slots on. With two slots there is one border, and a
    rule of its own moves it no sooner than it has to: that is 41/35 = 1.171 times as many steps at most, and no rule
    does better: each costs as much for some length up to 15.

    Args:
        slots: How many carries are kept at a time, at least 1.

    Attributes:
        lengths: Of the stretches so far, in order; their sum is the number of steps.
    """

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.lengths = [1]

    def next(self) -> int | None:
        """Count one more step, which begins with a new carry; return which kept carry makes room for it.

        Returns:
            The number of a carry among the kept ones in order, never 0; as many as there are for the new carry itself;
            None if there is room for all.
        """
        lengths, slots = self.lengths, self.slots
        if len(lengths) < slots:
            lengths.append(1)
            return None
        if slots == 2:
            return self._next_of_two()
        count = len(lengths)
        costs = [_advances(length, slots - place) for place, length in enumerate(lengths)]
        # Behind a dropped border each stretch has one more slot.
        moved = [_advances(length, slots + 1 - place) for place, length in enumerate(lengths) if place]
        before = [0, *accumulate(costs)]
        behind = sum(moved)
        least, dropped = inf, count
        for place in range(1, count):
            behind -= moved[place - 1]
            merged = lengths[place - 1] + lengths[place]
            cost = before[place - 1] + _advances(merged, slots + 1 - place) + behind
            if cost < least:
                least, dropped = cost, place
        # Of the last stretch, the first forward has made all advances once.
        if before[-2] + _advances(lengths[-1] + 1, slots + 1 - count) - lengths[-1] < least:
            dropped = count
        if dropped == count:
            lengths[-1] += 1
        else:
            lengths[dropped - 1 : dropped + 1] = [lengths[dropped - 1] + lengths[dropped]]
            lengths.append(1)
        return dropped

    def _next_of_two(self) -> int:
        first, last = self.lengths[0], self.lengths[1] + 1
        steps = first + last
        runs = 2 * steps - 1 + _advances(first, 2) + _advances(last, 1) - (last - 1)
        if steps not in _EARLY_MOVES and 35 * runs <= 41 * (_advances(steps, 2) + steps):
            self.lengths = [first, last]
            return 2
        self.lengths = [steps - 1, 1]
        return 1


# The lengths at which the only border has to move while it still costs less than 41/35, so that it never costs more.
_EARLY_MOVES = (4, 7, 11)
