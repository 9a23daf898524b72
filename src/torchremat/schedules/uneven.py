"""The cheapest way back through a loop whose steps take different times, with slots for carries: a table.

    costs                  1   1   1   1   8   1   1
    2 slots                c ------------- - - c           carry 5 is in a slot: the long step is passed once

The recurrence is that of `binomial.py` with the time of a step in place of one: T(i, j, s), the time to pass steps i to
j - 1 for a carry as often as s slots require, is the least over b of P(i, b) + T(i, b, s) + T(b, j, s - 1), where
P(i, b) is the time of steps i to b - 1. So the table has all schedules, and its best is the best there is.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate
from typing import ClassVar

import numpy as np

from torchremat.errors import ScheduleError
from torchremat.schedules.binomial import Marks, advances, first_borders

# A table of so many parts is made in about 50 ms. The steps of a longer loop are joined to parts of a few, in which
# they count as equal; if they are all better counted as equal, they are.
_MOST_PARTS = 100
_MOST_SLOTS = 32


class UnevenSlots:
    """Slots for carries alone, in a loop whose steps take different times.

    Args:
        units: The number of slots.
        costs: The times of the steps, in any unit.

    Attributes:
        stride: How many steps are one part.
        time: That of all steps that run again, in that unit.
        runs: How many steps run again.
    """

    carry: ClassVar[int] = 1
    step: ClassVar[int] = 0
    own: ClassVar[int] = 0

    def __init__(self, units: int, costs: tuple[float, ...]) -> None:
        if units < 1 or not costs or not all(0 <= one < float("inf") for one in costs):
            raise ScheduleError(f"units={units} and {len(costs)} costs: at least 1 of each, and costs from 0 on")
        self.units = units
        self.steps = steps = len(costs)
        self.stride = stride = -(-steps // _MOST_PARTS)
        self.parts = parts = -(-steps // stride)
        self._slots = most = min(units, parts if stride == 1 else units, _MOST_SLOTS)
        self._until = until = np.array([0.0, *accumulate(costs)])
        starts = np.minimum(np.arange(parts + 1) * stride, steps)
        self._at = at = until[starts]
        sums = np.array([0.0, *accumulate(until)])
        # By the number of parts, slots and the first part: T. See the recurrence above.
        self._table = table = [np.zeros((most + 1, parts + 1))]
        for length in range(1, parts + 1):
            count = parts - length + 1
            found = np.full((most + 1, parts + 1), np.inf)
            begin, end = starts[:count], starts[length : length + count]
            found[1, :count] = sums[end] - sums[begin] - (end - begin) * at[:count]
            if length == 1:
                sizes = np.diff(starts)
                for slots in range(2, most + 1):
                    passes = {int(size): advances(int(size), slots) for size in set(sizes)}
                    found[slots, :parts] = [
                        passes[int(size)] * (at[one + 1] - at[one]) / size for one, size in enumerate(sizes)
                    ]
            for left in range(1, length):
                passing = at[left : left + count] - at[:count]
                cost = passing + table[left][2:, :count] + table[length - left][1:-1, left : left + count]
                np.minimum(found[2:, :count], cost, out=found[2:, :count])
            table.append(found)
        self._counts_as_equal = False
        self.time, self.runs = self._walk()
        if stride > 1:
            self._counts_as_equal = True
            time, runs = self._walk()
            if time < self.time:
                self.time, self.runs = time, runs
            else:
                self._counts_as_equal = False

    @property
    def is_best(self) -> bool:
        """Whether the table has all schedules."""
        return self.stride == 1 and self._slots == min(self.units, self.parts)

    def _walk(self) -> tuple[float, int]:
        """Return the time and the number of the steps that run again."""
        time, runs, until, pending = 0.0, 0, self._until, [(0, self.steps, self.units)]
        while pending:
            first, steps, slots = pending.pop()
            borders = [0, *self.marks(slots - 1, steps, first).held]
            time += float(until[first + borders[-1]] - until[first])
            runs += borders[-1]
            if len(borders) == 1:
                time += float(until[first : first + steps].sum() - steps * until[first])
                runs += steps * (steps - 1) // 2
                continue
            for number, (begin, end) in enumerate(zip(borders, [*borders[1:], steps], strict=True)):
                pending.append((first + begin, end - begin, slots - number))
        return time, runs

    def marks(self, free: int, steps: int, first: int = 0) -> Marks:
        """Return what steps leave when they run again from a carry in a slot. See `CarrySlots.marks`."""
        slots, stride = max(free, 0) + 1, self.stride
        end = first + steps
        if self._counts_as_equal or first % stride or (end % stride and end != self.steps) or steps <= stride:
            return Marks(tuple(first_borders(steps, slots)[1:]), (steps - 1,))
        part, parts, held = first // stride, -(-steps // stride), list[int]()
        while parts > 1 and slots > 1:
            known = min(slots, self._slots)
            sums = [
                self._at[part + left] - self._at[part]
                + self._table[left][known, part]
                + self._table[parts - left][max(known - 1, 1), part + left]
                for left in range(1, parts)
            ]  # fmt: skip
            left = 1 + int(np.argmin(sums))
            part, parts, slots = part + left, parts - left, slots - 1
            held.append(part * stride - first)
        if parts == 1 and slots > 1:
            last = part * stride - first
            held += [last + one for one in first_borders(steps - last, slots)[1:]]
        return Marks(tuple(held), (steps - 1,))


@lru_cache(16)
def uneven_slots(units: int, costs: tuple[float, ...]) -> UnevenSlots:
    """Return the table for these times, as made before if it was."""
    return UnevenSlots(units, costs)
