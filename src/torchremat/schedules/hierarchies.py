"""The cheapest way back through a loop of equal steps whose carries may wait in stores beyond the slots in memory.

    2 slots, one store     0     1     2     3     4     5     6     7     8
    after the forward      w --------------- c --------------- c               w: a carry is in the store, c: in a slot

Sources: G. Aupy, J. Herrmann, P. Hovland, Y. Robert, "Optimal multistage algorithm for adjoint computation", SIAM J.
Sci. Comput. 38(3), 2016, for a store without a limit; J. Herrmann, G. Pallez, "H-Revolve: a framework for adjoint
computation on synchronous hierarchical platforms", ACM TOMS 46(2), 2020, for several stores with limits. As there, a
carry goes to a slower store only while none is in a faster one since, and transfers do not overlap with steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import isqrt
from typing import NamedTuple

import numpy as np

from torchremat.errors import ScheduleError
from torchremat.schedules.binomial import advances, first_borders

# NOTE [ Hierarchies ]
#
# Let B(k) be what k steps cost with slots and faster stores, w and r what it takes to write a carry to the store and to
# read it, and d the room that is left in it. Then k steps cost that begin with a carry that is
#
#     passing    F(d, k) = min(B(k), w + W(d - 1, k))        it goes to the store, or all is left to faster ones
#     in there   S(d, k) = r + min(B(k), W(d, k))            it is read, and its place kept or not
#                W(d, k) = min over j < k of j + F(d, k - j) + S(d, j)
#
# and F with all room is the B of the next store. The B of the first one is the closed form for slots.

# A table is made in about 50 ms with so many entries times its steps. Of a longer loop every few steps are a place for
# a carry in a store; slots may be anywhere.
_MOST_WORK = 20_000_000
_MOST_PLACES = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreCost:
    """What a store for carries has and takes.

    Attributes:
        room: How many carries it can have, None without a limit.
        write_steps: How long it takes to write a carry, in steps.
        read_steps: How long it takes to read one.
    """

    room: int | None
    write_steps: float
    read_steps: float

    def __post_init__(self) -> None:
        if (self.room is not None and self.room < 0) or not (self.write_steps >= 0 and self.read_steps >= 0):
            raise ScheduleError(f"{self}: room and costs must be at least 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """What it takes to take steps back.

    Attributes:
        runs: Runs of steps, the first forward included.
        writes: Carries written to stores.
        reads: Carries read from there.
    """

    runs: int = 0
    writes: int = 0
    reads: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(runs=self.runs + other.runs, writes=self.writes + other.writes, reads=self.reads + other.reads)


class _Level:
    """The table of one store. See NOTE [ Hierarchies ].

    Args:
        below: What steps cost without it, by the number of places.
        store: The store.
        stride: How many steps lie between two places.
    """

    def __init__(self, below: np.ndarray, store: StoreCost, stride: int) -> None:
        most = len(below) - 1
        self.below = below
        self.is_limited = store.room is not None
        self.room = min(store.room, most) if store.room is not None else 0
        self.stride = stride
        rooms = self.room + 1
        # F(d, k), with k counted down from the most: so both windows are read along memory, and summed into one block.
        self._passing = passing = np.zeros((rooms, most + 1))
        self._waiting = waiting = np.zeros_like(passing)  # j + S(d, j)
        buffer = np.empty(passing.size)
        for k in range(1, most + 1):
            best = np.full(rooms, np.inf)
            if k > 1:
                sums = buffer[: rooms * (k - 1)].reshape(rooms, k - 1)
                best = np.add(waiting[:, 1:k], passing[:, most + 1 - k : most], out=sums).min(axis=1)
            waiting[:, k] = stride * k + store.read_steps + np.minimum(below[k], best)
            stores = np.append(np.inf, best[:-1]) if self.is_limited else best
            passing[:, most - k] = np.minimum(below[k], store.write_steps + stores)

    def cost(self) -> np.ndarray:
        """Return what steps cost with all its room, by the number of places."""
        return self._passing[-1, ::-1]

    def after(self, room: int) -> int:
        """Return the room that is left when one more carry is in the store."""
        return room - 1 if self.is_limited else room

    def part(self, room: int, steps: int) -> int:
        """Return how many steps of a carry that is in the store wait for it, all of them with 0 for slots and below.

        Args:
            room: Beyond that carry.
            steps: From the carry to the end.
        """
        places = self._places_in(steps)
        if places < 2:
            return 0
        most = len(self.below) - 1
        sums = self._waiting[room, 1:places] + self._passing[room, most + 1 - places : most]
        best = int(np.argmin(sums))
        return (1 + best) * self.stride if sums[best] < self.below[places] else 0

    def takes(self, room: int, steps: int) -> bool:
        """Return whether a carry that passes by goes to the store."""
        places = self._places_in(steps)
        return bool(self._passing[room, len(self.below) - 1 - places] < self.below[places])

    def _places_in(self, steps: int) -> int:
        return -(-steps // self.stride)


class _LoopPart(NamedTuple):
    """Steps of which the first carry is in a store, or the last ones, all of whose carries are in slots."""

    steps: int
    store: int  # its number, 0 for slots
    room: int  # left there


class Hierarchy:
    """Places for carries in slots and stores, with the least cost.

    The fastest store comes first.
    """

    def __init__(self, steps: int, slots: int, stores: tuple[StoreCost, ...]) -> None:
        self.steps, self.slots = steps, slots
        rooms = max([1, *(one.room + 1 for one in stores if one.room is not None)])
        most = min(_MOST_PLACES, max(isqrt(_MOST_WORK // min(rooms, steps)), 2))
        self.stride = -(-steps // most)
        lengths = [self.stride * count for count in range(-(-steps // self.stride) + 1)]
        below = np.array([0.0, *(length + advances(length, slots) for length in lengths[1:])])
        self.levels: list[_Level] = []
        for store in stores:
            level = _Level(below, store, self.stride)
            self.levels.append(level)
            below = level.cost()
        self._known: dict[tuple[int, int, int], Traffic] = {}

    def first_places(self) -> dict[int, int]:
        """Return where the first forward leaves carries, by step: 0 for a slot, n for the n-th store."""
        store = len(self.levels)
        return self._places(0, self.steps, store, self._room(store))

    def places(self, steps: int, store: int, used: int) -> dict[int, int]:
        """Return where steps leave carries that run again from a carry in a store; as `first_places`.

        Args:
            steps: How many steps.
            store: The number of the store, from 1 on.
            used: How many carries are in it, up to that one.
        """
        room = max(self._room(store) - used, 0)
        part = self.levels[store - 1].part(room, steps)
        if part:
            return self._places(part, steps - part, store, room)
        return self._places(0, steps, store - 1, self._room(store - 1))

    def cost(self) -> float:
        """Return what it takes in all, in steps."""
        return float(self.levels[-1].cost()[-1])

    def traffic(self) -> Traffic:
        """Return what that is."""
        store = len(self.levels)
        return self._traffic(self.steps, store, self._room(store))

    def _room(self, store: int) -> int:
        return self.levels[store - 1].room if store else 0

    def _parts(self, steps: int, store: int, room: int) -> Iterator[_LoopPart]:
        """Yield the parts of steps whose first carry passes by, in order."""
        while store:
            level = self.levels[store - 1]
            if level.takes(room, steps):
                room = level.after(room)
                part = level.part(room, steps)
                yield _LoopPart(part, store, room)
                steps -= part
            else:
                store -= 1
                room = self._room(store)
        yield _LoopPart(steps, 0, 0)

    def _places(self, first: int, steps: int, store: int, room: int) -> dict[int, int]:
        """Return where steps leave carries, given that the first carry passes by."""
        places: dict[int, int] = {}
        for part in self._parts(steps, store, room):
            borders = [0] if part.store else first_borders(part.steps, self.slots)
            places |= {first + border: part.store for border in borders}
            first += part.steps
        return places

    def _traffic(self, steps: int, store: int, room: int) -> Traffic:
        """Return what steps take whose first carry passes by."""
        key = steps, store, room
        if key not in self._known:
            self._known[key] = sum(map(self._traffic_of, self._parts(*key)), Traffic())
        return self._known[key]

    def _traffic_of(self, part: _LoopPart) -> Traffic:
        """Return what a part takes."""
        steps, store, room = part
        if not store:
            return Traffic(runs=steps + advances(steps, self.slots))
        level, total = self.levels[store - 1], Traffic(runs=steps, writes=1, reads=1)
        while waiting := level.part(room, steps):
            total += Traffic(runs=waiting, reads=1) + self._traffic(steps - waiting, store, room)
            steps = waiting
        return total + self._traffic(steps, store - 1, self._room(store - 1))
