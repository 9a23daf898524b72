"""The cheapest way back through a loop of equal steps in bytes that may hold carries or recorded steps, by a table.

The closed forms of `binomial.py` have slots for carries, and one recorded step apart. Here the same bytes hold either
kind: after the first forward some steps are recorded as they are, and carries are held for the others. With 31 units,
of which a carry and a recorded step take one each, a loop of 1,000 steps runs 1,522 steps again. With 30 of them for
carries alone it is 2,472.

    7 steps, 4 units       0     1     2     3     4     5     6
    after the forward      c ---------------------- s     s     s        c: a carry is held, s: a step is recorded

Source: H. Zhang, E. Constantinescu, "Optimal checkpointing for adjoint multistage time-stepping schemes", J. Comput.
Sci. 66, 2023, whose slots hold either kind if both are of a size. We add bytes of each kind.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from torchremat.schedules.binomial import Marks

# NOTE [ Mixtures ]
#
# Let f be the free units, c those of a carry, s of a recorded step, and o of a step that is recorded while its carry is
# held. The fewest runs of k steps that begin with a carry that is
#
#     held     R(f, k) = min(1 + U(f - o, k - 1),                          the first step is recorded
#                            min over j < k of j + R(f, j) + U(f, k - j))  j steps are passed, and wait
#     passing  U(f, k) = min(1 + U(f - s, k - 1),                          the first step is recorded
#                            R(f - c, k))                                  the carry is held
#
# A loop begins with U, of whose runs the first of each step is the first forward.

_NEVER = 1 << 29


@dataclass(frozen=True, slots=True)
class Most:
    """The most that is in memory at a time while steps are taken back.

    Attributes:
        carries: How many carries are held.
        units: The units of these and of recorded steps.
    """

    carries: int
    units: int


class MixtureTable:
    """The cheapest divisions of up to `units` units between carries and recorded steps, for up to `steps` steps.

    See NOTE [ Mixtures ].

    Args:
        steps: The most steps.
        units: The most units.
        carry: Of a carry, at least 1.
        step: Of a recorded step, at least 1.
        own: Of a recorded step whose carry is held, beyond the carry.
    """

    def __init__(self, steps: int, units: int, carry: int, step: int, own: int) -> None:
        self.units = units
        self.carry, self.step, self.own = [min(size, units + 1) for size in (carry, step, own)]
        carry, step, own = self.carry, self.step, self.own
        shape = units + 1, steps + 1
        self._held = held = np.full(shape, _NEVER, dtype=np.int32)
        self._passing = passing = np.full(shape, _NEVER, dtype=np.int32)
        passed = np.full(shape, _NEVER, dtype=np.int32)  # j + R(f, j)
        held[:, 0] = passing[:, 0] = 0
        sums = np.empty(shape, dtype=np.int32)
        for k in range(1, steps + 1):
            # A row of a table has the steps, so both windows are read along memory; one of them backwards.
            if k > 1:
                window = sums[:, 1:k]
                np.add(passed[:, 1:k], passing[:, k - 1 : 0 : -1], out=window)
                held[:, k] = np.minimum(window.min(axis=1), _NEVER)
            np.minimum(held[own:, k], 1 + passing[: units + 1 - own, k - 1], out=held[own:, k])
            passed[:, k] = np.minimum(held[:, k] + k, _NEVER)
            passing[carry:, k] = held[: units + 1 - carry, k]
            np.minimum(passing[step:, k], 1 + passing[: units + 1 - step, k - 1], out=passing[step:, k])
            np.minimum(passing[:, k], _NEVER, out=passing[:, k])
        self._most: dict[tuple[int, int, bool], Most] = {}

    def runs(self, steps: int) -> int | None:
        """Return how many runs of steps a loop takes, the first forward included; None if the units are too few."""
        found = int(self._passing[self.units, steps])
        return None if found >= _NEVER else found

    def first_marks(self, steps: int) -> Marks:
        """Return what the first forward of a loop leaves."""
        return self._walk(self.units, steps, is_held=False).marks()

    def marks(self, free: int, steps: int, first: int = 0) -> Marks:
        """Return what steps leave when they run again from a carry that is held.

        Args:
            free: The free units, beyond that carry.
            steps: How many steps, the last of which is recorded in any case.
            first: The number of the first step, in whose place the marks begin with 0.
        """
        free = min(max(free, 0), self.units)
        if self._held[free, steps] >= _NEVER:
            return Marks((), (steps - 1,))
        return self._walk(free, steps, is_held=True).marks()

    def most(self, steps: int) -> Most:
        """Return the most that a loop of so many steps holds at a time."""
        wanted = self.units, steps, False
        pending = [wanted]
        while pending:  # with few units the spans of a loop nest deeper than Python's stack
            free, count, is_held = key = pending[-1]
            walk = self._walk(free, count, is_held=is_held)
            inner = [(left, span, True) for _, left, span in walk.spans]
            missing = [one for one in inner if one not in self._most]
            if missing:
                pending += missing
                continue
            carries, units = len(walk.held), free - walk.free
            for (first, left, _), one in zip(walk.spans, inner, strict=True):
                inside = self._most[one]
                carries = max(carries, sum(step <= first for step in walk.held) + inside.carries)
                units = max(units, free - left + inside.units)
            self._most[key] = Most(carries, units)
            pending.pop()
        return self._most[wanted]

    def _walk(self, free: int, steps: int, *, is_held: bool) -> _Walk:
        walk, first = _Walk(free), 0
        while first < steps:
            left, free, units = steps - first, walk.free, self.step  # units of this step, if it is recorded
            if not is_held:
                is_held = free < units or self._passing[free, left] != 1 + self._passing[free - units, left - 1]
                if is_held:
                    walk.held.append(first)
                    walk.free = free = free - self.carry
            if is_held:
                units = self.own
                if free < units or self._held[free, left] != 1 + self._passing[free - units, left - 1]:
                    spans = self._held[free, 1:left] + np.arange(1, left) + self._passing[free, left - 1 : 0 : -1]
                    span = 1 + int(np.argmin(spans))
                    walk.spans.append((first, free, span))
                    first, is_held = first + span, False
                    continue
            walk.recorded.append(first)
            walk.free, first, is_held = free - units, first + 1, False
        return walk


@dataclass(slots=True)
class _Walk:
    """A way through some steps.

    Attributes:
        free: The free units so far.
        held: The steps whose carries are held.
        recorded: The recorded steps.
        spans: The steps that wait: the first, the units that are free when it is their turn, and how many.
    """

    free: int
    held: list[int] = field(default_factory=list[int])
    recorded: list[int] = field(default_factory=list[int])
    spans: list[tuple[int, int, int]] = field(default_factory=list[tuple[int, int, int]])

    def marks(self) -> Marks:
        """Return what it leaves."""
        return Marks(tuple(self.held), tuple(self.recorded))
