"""The cheapest way back through a loop whose steps take different times, with slots for carries: a table.

    costs                  1   1   1   1   8   1   1
    2 slots                c ------------- - - c           carry 5 is in a slot: the long step is passed once

The recurrence is that of `binomial.py` with the time of a step in place of one: T(i, j, s), the time to pass steps i to
j - 1 for a carry as often as s slots require, is the least over b of P(i, b) + T(i, b, s) + T(b, j, s - 1), where
P(i, b) is the time of steps i to b - 1. So the table has all schedules, and its best is the best there is.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import accumulate, pairwise
from typing import ClassVar, TypeAlias

import numpy as np
from numpy.typing import NDArray

from torchremat.errors import ScheduleError
from torchremat.schedules.binomial import Marks, advances, first_borders

# A table of so many parts is made in about 50 ms. The steps of a longer loop are joined to parts of a few, in which
# they count as equal; if they are all better counted as equal, they are.
_MOST_PARTS = 100
_MOST_SLOTS = 32

Steps: TypeAlias = NDArray[np.int64]
Times: TypeAlias = NDArray[np.float64]


class UnevenSlots:
    """Slots for carries alone, in a loop whose steps take different times.

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
        self._until: Times = np.array([0.0, *accumulate(costs)])
        self._sums: Times = np.array([0.0, *accumulate(self._until)])
        starts = np.minimum(np.arange(parts + 1) * stride, steps)
        self._at = at = self._until[starts]
        # By slots, the part after the last one, and the number of parts counted down: T. See the recurrence above.
        self._table = table = np.zeros((most + 1, parts + 1, parts + 1))
        waiting = np.empty_like(
            table
        )  # by slots, the first part, and the number of parts: T with the time to pass them
        size = np.diff(starts)
        for slots in range(2, most + 1):
            passes = np.array([advances(one, slots) for one in range(1, stride + 1)])
            table[slots, 1:, parts - 1] = passes[size - 1] * np.diff(at) / size
        buffer = np.empty((max(most - 1, 0), (parts + 1) ** 2 // 4))
        for length in range(1, parts + 1):
            count = parts - length + 1
            end, column = slice(length, parts + 1), parts - length
            table[1, end, column] = self._again(starts[:count], starts[end] - starts[:count])
            if length > 1 and most > 1:
                # Both windows are read along memory, and what they are summed into is one block.
                sums = buffer[:, : count * (length - 1)].reshape(most - 1, count, length - 1)
                np.add(waiting[2:, :count, 1:length], table[1:-1, end, column + 1 : parts], out=sums)
                table[2:, end, column] = sums.min(axis=2)
            waiting[:, :count, length] = at[end] - at[:count] + table[:, end, column]
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

    def _again(self, first: Steps, steps: Steps) -> Times:
        """Return the time that stretches take to be passed up to each of their steps."""
        return self._sums[first + steps] - self._sums[first] - steps * self._until[first]

    def _walk(self) -> tuple[float, int]:
        """Return the time and the number of the steps that run again."""
        time, runs, until, pending = 0.0, 0, self._until, [(0, self.steps, self.units)]
        equal = defaultdict[tuple[int, int], list[Steps]](list)  # by steps and slots: where such stretches begin
        while pending:
            first, steps, slots = pending.pop()
            if slots == 1 or self._is_equal(first, steps):
                equal[steps, min(slots, steps)].append(np.array([first]))
                continue
            borders = [0, *self.marks(slots - 1, steps, first).held, steps]
            time += float(until[first + borders[-2]] - until[first])
            runs += borders[-2]
            pending += [
                (first + begin, end - begin, slots - number) for number, (begin, end) in enumerate(pairwise(borders))
            ]
        # A long loop has many stretches of few kinds; the parts of a stretch are shorter than it.
        while equal:
            steps, slots = kind = max(equal)
            first = np.concatenate(equal.pop(kind))
            borders = range(steps + 1) if slots == steps else [*first_borders(steps, slots), steps]
            runs += len(first) * borders[-2]
            if len(borders) == 2:
                time += float(self._again(first, np.full_like(first, steps)).sum())
                runs += len(first) * (steps * (steps - 1) // 2)
                continue
            time += float((until[first + borders[-2]] - until[first]).sum())
            for number, (begin, end) in enumerate(pairwise(borders if slots < steps else ())):
                equal[end - begin, min(slots - number, end - begin)].append(first + begin)
        return time, runs

    def _is_equal(self, first: int, steps: int) -> bool:
        """Return whether the table has nothing about a stretch, whose steps then count as equal."""
        end, stride = first + steps, self.stride
        cuts = first % stride or (end % stride and end != self.steps)
        return self._counts_as_equal or bool(cuts) or steps <= stride

    def marks(self, free: int, steps: int, first: int = 0) -> Marks:
        """Return what steps leave when they run again from a carry in a slot. See `CarrySlots.marks`."""
        slots, stride = max(free, 0) + 1, self.stride
        if self._is_equal(first, steps):
            return Marks(tuple(first_borders(steps, slots)[1:]), (steps - 1,))
        part, parts, held = first // stride, -(-steps // stride), list[int]()
        while parts > 1 and slots > 1:
            known, left = min(slots, self._slots), np.arange(1, parts)
            waiting = self._at[part + left] - self._at[part] + self._table[known, part + left, self.parts - left]
            rest = self._table[max(known - 1, 1), part + parts, self.parts - parts + left]
            part_of_it = 1 + int(np.argmin(waiting + rest))
            part, parts, slots = part + part_of_it, parts - part_of_it, slots - 1
            held.append(part * stride - first)
        if parts == 1 and slots > 1:
            last = part * stride - first
            held += [last + one for one in first_borders(steps - last, slots)[1:]]
        return Marks(tuple(held), (steps - 1,))
