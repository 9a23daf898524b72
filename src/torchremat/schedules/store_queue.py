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

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuedCopy:
    """A copy into the store or back. Positions are of the forward for a write, and of the backward for a read.

    Attributes:
        asked: The position at whose end a write is requested, or at whose start a read is.
        due: The position where it must be done, likewise, not before `asked`.
        seconds: How long it takes.
    """

    asked: int
    due: int
    seconds: float


def writing_wait_s(forward_s: Sequence[float], writes: Iterable[QueuedCopy]) -> float:
    """Return how long a forward waits for its writes, in seconds; they are in the order of the queue."""
    # The end of a position is the start of the next one.
    moved = [replace(one, asked=one.asked + 1, due=one.due + 1) for one in writes]
    return reading_wait_s([*forward_s, 0.0], moved)


def reading_wait_s(backward_s: Sequence[float], reads: Iterable[QueuedCopy]) -> float:
    """Return how long a backward waits for its reads, in seconds; they are in the order of the queue."""
    asked, due = defaultdict[int, list[QueuedCopy]](list), defaultdict[int, list[QueuedCopy]](list)
    for read in reads:
        asked[read.asked].append(read)
        due[read.due].append(read)
    now_s, free_s, waited_s = 0.0, 0.0, 0.0
    done_s: dict[int, float] = {}
    for position, seconds in enumerate(backward_s):
        for read in asked[position]:
            free_s = done_s[id(read)] = max(free_s, now_s) + read.seconds
        for read in due[position]:
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
        dues.append(min(bisect_left(ends, free_s, lo=made), len(ends) - 1))
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
        begins[place] = max(0, bisect_right(starts, before_s, hi=due + 1) - 1)
    return begins
