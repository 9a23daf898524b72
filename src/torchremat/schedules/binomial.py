"""The cheapest way back through a loop of equal steps, with a fixed number of slots for its states: closed forms.

A loop is a chain of equal stages, and the schedules here are the trees that `persistent.py` finds for such a chain,
without its tables. The state before step i is carry i. A slot holds one carry, and carry 0 takes a slot like any other.

    first_borders(10, 3)    0       4     7     9     the carries 0, 4 and 7 are in slots after the forward
    free slots in backward  |---2---|--1--|--0--|     steps 7 to 9 are taken back first, and free their slot

Source: A. Griewank and A. Walther, "Algorithm 799: revolve", ACM TOMS 26(1), 2000, equations 3 to 6. An advance is a
run of a step for its output alone. The run of a step right before its backward, which keeps the saved tensors, is not
counted: every schedule has it. Without any steps, or any slot, all of this raises a ScheduleError.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import comb
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
