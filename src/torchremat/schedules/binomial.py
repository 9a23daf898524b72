"""The cheapest way back through a loop of equal steps, with a fixed number of slots for its states.

A loop is a chain of equal stages, and the schedules here are the trees that `persistent.py` finds for such a chain,
without its tables. The state before step i is carry i. A slot holds one carry, and carry 0 takes a slot like any other.

If the number of steps is known there are closed forms:

    first_borders(10, 3)    0       4     7     9     the carries 0, 4 and 7 are in slots after the forward
    free slots in backward  |---2---|--1--|--0--|     steps 7 to 9 are taken back first, and free their slot

Source: A. Griewank and A. Walther, "Algorithm 799: revolve", ACM TOMS 26(1), 2000, equations 3 to 6. An advance is a
run of a step for its output alone. The run of a step right before its backward, which keeps the saved tensors, is not
counted: every schedule has it. Without any steps, or any slot, all of this raises a ScheduleError.

If it is not known before the loop ends, there is one choice after each step, since a carry that was dropped is not in
memory again before the backward: which of the kept carries to drop for the new one, or not to keep the new one. Two
stretches whose border is dropped are one.

    OnlineBorders(3)   0              after step 0
                       0 1            1
                       0 1 2          2
                       0   2 3        3: carry 1 is dropped for carry 3
                       0     3 4      4
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from math import comb, inf
from typing import ClassVar

from torchremat.errors import ScheduleError


def most_steps(slots: int, repeats: int) -> int:
    """Return how many steps can be taken back if each is advanced at most so many times: C(slots + repeats, slots)."""
    return comb(slots + repeats, slots) if repeats >= 0 and slots >= 0 else 0


def repeats_for(steps: int, slots: int) -> int:
    """Return how often the most repeated step is advanced, the first forward included."""
    _check(steps, slots)
    if slots == 1:
        return steps - 1
    repeats, reach = 0, 1
    while reach < steps:
        repeats += 1
        reach = reach * (slots + repeats) // repeats
    return repeats


def advances(steps: int, slots: int) -> int:
    """Return the fewest advances with which a loop can be taken back, those of the first forward included.

    With r repeats these are r n - C(s + r, s + 1) for n steps and s slots.

    >>> advances(1000, 30)
    2472
    >>> advances(4, 1)  # to carry 3, 2 and 1, from carry 0 each time
    6
    """
    repeats = repeats_for(steps, slots)
    return repeats * steps - most_steps(slots + 1, repeats - 1)


def next_border(steps: int, slots: int) -> int | None:
    """Return after how many steps the next carry is left in a slot, None if there is no slot for one.

    Args:
        steps: From a carry that is in a slot up to the end of the stretch.
        slots: That one's and the free ones.
    """
    _check(steps, slots)
    if steps == 1 or slots == 1:
        return None
    repeats = repeats_for(steps, slots)
    # The first part is advanced once more than its own schedule says, the rest is not and has one slot less. With
    # both parts within these bounds the repeats do not rise, and then the number of advances is least.
    return min(most_steps(slots, repeats - 1), steps - most_steps(slots - 1, repeats - 1))


def first_borders(steps: int, slots: int) -> list[int]:
    """Return the carries that the first forward leaves in slots, in order; the first is carry 0.

    >>> first_borders(10, 3)
    [0, 4, 7]
    """
    borders = [0]
    while (length := next_border(steps - borders[-1], slots + 1 - len(borders))) is not None:
        borders.append(borders[-1] + length)
    return borders


@dataclass(frozen=True, slots=True)
class Marks:
    """What a run of steps leaves.

    Attributes:
        held: The steps whose carries are held, in order.
        recorded: The steps whose saved tensors stay, in order; the last step is one.
    """

    held: tuple[int, ...]
    recorded: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CarrySlots:
    """Slots for carries alone: of a stretch the last step is recorded, in memory of its own.

    Attributes:
        units: The number of slots.
        carry: The slots that a carry takes.
        step: Those of a recorded step.
        own: Those of a recorded step whose carry is in a slot.
    """

    units: int
    carry: ClassVar[int] = 1
    step: ClassVar[int] = 0
    own: ClassVar[int] = 0

    def marks(self, free: int, steps: int, first: int = 0) -> Marks:
        """Return what steps leave when they run again from a carry in a slot.

        Args:
            free: The free slots, beyond that one.
            steps: How many steps.
            first: The number of the first step, in whose place the marks begin with 0.
        """
        return Marks(tuple(first_borders(steps, max(free, 0) + 1)[1:]), (steps - 1,))


def _check(steps: int, slots: int) -> None:
    if steps < 1 or slots < 1:
        raise ScheduleError(f"steps={steps} and slots={slots} must be at least 1")


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
