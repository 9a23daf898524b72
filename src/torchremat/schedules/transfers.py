"""Copies to and from a store, concurrent with a forward and a backward: their completion, and the waits for them.

A store is a queue: copies run in the order of their requests, one after the other. The forward is a sequence of
positions, and so is the backward, each with its seconds.

    forward    | 0 | 1 | 2 | 3 |                 write of 0: requested at the end of 0, done at the end of 2
    writes          [-- 0 --]                               at the latest, or the forward waits there
    backward   | 3 | 2 | 1 | 0 |                 read of 0: requested at the start of 2, done at the start of 0
    reads          [-- 0 --]                                at the latest, or the backward waits there

So the window of the copy engine is a constraint over backward positions: for each position, the copies due there must
fit into the seconds since their request, together with all copies before them in the queue. The rest is a wait.

Deliberately missing: several queues for one store. A disk with two threads is not twice as fast.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Write:
    """A copy into the store.

    Attributes:
        made: The forward position at whose end it is requested.
        due: The forward position at whose end it must be done, not before `made`.
        seconds: How long it takes.
    """

    made: int
    due: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """A copy back.

    Attributes:
        begun: The backward position at whose start it is requested.
        due: The backward position at whose start it must be done, not before `begun`.
        seconds: How long it takes.
    """

    begun: int
    due: int
    seconds: float


def writing_wait_s(forward_s: Sequence[float], writes: Iterable[Write]) -> float:
    """Return how long a forward waits for its writes, in seconds; they are in the order of the queue."""
    # The end of a position is the start of the next one.
    moved = [Read(begun=one.made + 1, due=one.due + 1, seconds=one.seconds) for one in writes]
    return reading_wait_s([*forward_s, 0.0], moved)


def reading_wait_s(backward_s: Sequence[float], reads: Iterable[Read]) -> float:
    """Return how long a backward waits for its reads, in seconds; they are in the order of the queue."""
    asked, due = _by(reads, lambda one: one.begun), _by(reads, lambda one: one.due)
    now_s, free_s, waited_s = 0.0, 0.0, 0.0
    done_s: dict[int, float] = {}
    for position, seconds in enumerate(backward_s):
        for read in asked.get(position, ()):
            free_s = done_s[id(read)] = max(free_s, now_s) + read.seconds
        for read in due.get(position, ()):
            late_s = max(0.0, done_s[id(read)] - now_s)
            now_s, waited_s = now_s + late_s, waited_s + late_s
        now_s += seconds
    return waited_s


def earliest_dues(forward_s: Sequence[float], writes: Sequence[tuple[int, float]]) -> list[int]:
    """Return for each write the first position at whose end it is done without a wait; the last position if none is.

    The writes are in the order of the queue: the position at whose end each is requested, and its seconds.
    """
    ends = list(accumulate(forward_s))
    free_s, dues = 0.0, list[int]()
    for made, seconds in writes:
        free_s = max(free_s, ends[made]) + seconds
        dues.append(next((place for place in range(made, len(ends)) if ends[place] >= free_s), len(ends) - 1))
    return dues


def latest_begins(backward_s: Sequence[float], reads: Sequence[tuple[int, float]]) -> list[int]:
    """Return for each read the last position at whose start it must be requested, so that the backward never waits.

    Where the backward is too short for all of them, the first ones are requested at its start.

    The reads are in the order of the queue: the position at whose start each must be done, and its seconds.
    """
    starts = [0.0, *accumulate(backward_s)]
    begins = [0] * len(reads)
    before_s = float("inf")
    for place in range(len(reads) - 1, -1, -1):
        due, seconds = reads[place]
        before_s = min(before_s, starts[due]) - seconds
        begins[place] = max((one for one in range(due + 1) if starts[one] <= before_s), default=0)
    return begins


def _by(moves: Iterable[T], position: Callable[[T], int]) -> dict[int, list[T]]:
    found: dict[int, list[T]] = {}
    for move in moves:
        found.setdefault(position(move), []).append(move)
    return found
