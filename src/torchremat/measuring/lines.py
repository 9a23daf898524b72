"""The running operator and its line of user code at each event of a step, to read next to the bytes.

`OperatorLines` notes them in the counted run, whose events are storages, told by their tracker. The bytes that users
see are the allocator's, from another run that must not intercept operators. `matched` joins both: between two changes
of the running module the same operators run, so allocations of the same size in the same order are the same ones. The
allocator's other events (temporaries inside kernels) belong to the operator before.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from itertools import pairwise

import numpy as np
import torch

from torchremat._compat.autograd import current_node
from torchremat._compat.dynamo import runs_compiled_code
from torchremat._compat.modes import sequence_number
from torchremat.measuring.callers import line_of_user, shown_line
from torchremat.measuring.step import run_backward
from torchremat.measuring.timeline import UNKNOWN, MemoryTimeline, OperatorLine

# An allocator of a device rounds sizes up to this.
_ROUNDED_BYTES = 512

# Between two changes of the module are a handful of events, and each is compared with each. A step without modules has
# all events in one stretch: in a longer stretch than this, each is sought only among the next few.
_MOST_EVENTS = 1000
_NEXT_FEW = 8


@dataclass(frozen=True, slots=True)
class OperatorStart:
    """From the event with this index on, an operator runs."""

    position: int
    what: OperatorLine


class OperatorLines:
    """Notes operators and their lines, told of each before it runs.

    Args:
        is_recomputing: Returns whether backward runs a piece of forward.

    Attributes:
        ran: The operators in order.
        is_compiled: Whether compiled code ran, eagerly here: its operators differ from other runs'.
    """

    def __init__(self, is_recomputing: Callable[[], bool]) -> None:
        self.ran: list[OperatorStart] = []
        self.is_compiled = False
        self._is_recomputing = is_recomputing
        self._by_node: dict[int, str] = {}
        self._shown: dict[tuple[str, int], str] = {}

    def see(self, func: Callable[..., object], position: int) -> None:
        """Note an operator that runs from the event with this index on."""
        # The operators of `backward` before its first node are not a recompute.
        recomputes = self._is_recomputing() and current_node() is not None
        self.ran.append(OperatorStart(position, OperatorLine(str(func), self._line(recomputes), recomputes)))

    def _line(self, recomputes: bool) -> str:
        node = current_node()
        of_node = "" if node is None else self._by_node.get(node._sequence_nr(), "")
        if node is not None and not recomputes:
            return of_node
        found = line_of_user(run_backward.__code__)
        if found is None:  # a recompute of torch's own modules has no lines of user code
            return of_node
        if found not in self._shown:
            self._shown[found] = shown_line(*found)
            self.is_compiled = self.is_compiled or runs_compiled_code()
        line = self._shown[found]
        if torch.is_grad_enabled():
            # The node of an operator is made before the operator is seen, by its number.
            self._by_node.setdefault(sequence_number() - 1, line)
        return line


def noted(timeline: MemoryTimeline, ran: Sequence[OperatorStart]) -> MemoryTimeline:
    """Return the timeline with the operators noted in the same run."""
    if not ran:
        return timeline
    names, starts = {UNKNOWN: 0}, [one.position for one in ran]
    places = (bisect_right(starts, event) - 1 for event in range(len(timeline)))
    numbers = [names.setdefault(ran[place].what if place >= 0 else UNKNOWN, len(names)) for place in places]
    return replace(timeline, operator=np.array(numbers, np.int64), operators=tuple(names))


def matched(timeline: MemoryTimeline, other: MemoryTimeline) -> MemoryTimeline:
    """Return the timeline of a run with the operators noted in another run of the same step.

    Without operators where the two runs call modules differently, as where compiled code ran.
    """
    if not len(other.operator) or [one.label for one in timeline.changes] != [one.label for one in other.changes]:
        return timeline
    sizes, other_sizes = (_rounded(one.trace.delta_bytes.tolist()) for one in (timeline, other))
    operators, found = other.operator.tolist(), list[int]()
    for (first, last), (other_first, other_last) in zip(_stretches(timeline), _stretches(other), strict=True):
        theirs = slice(other_first, other_last)
        found += _matched(sizes[first:last], other_sizes[theirs], operators[theirs])
    return replace(timeline, operator=np.array(found, np.int64), operators=other.operators)


def _stretches(timeline: MemoryTimeline) -> list[tuple[int, int]]:
    count = len(timeline)
    return list(pairwise([0, *(min(one.position, count) for one in timeline.changes), count]))


def _rounded(deltas: list[int]) -> list[int]:
    return [delta if delta <= 0 else -(-delta // _ROUNDED_BYTES) * _ROUNDED_BYTES for delta in deltas]


def _matched(sizes: list[int], other_sizes: list[int], operators: list[int]) -> list[int]:
    """Return an operator for each event of a stretch, 0 before the first operator."""
    mine = [place for place, size in enumerate(sizes) if size > 0]
    theirs = [place for place, size in enumerate(other_sizes) if size > 0]
    pairs = _pairs([sizes[place] for place in mine], [other_sizes[place] for place in theirs])
    known = {mine[own]: operators[theirs[other]] for own, other in pairs}
    now = operators[0] if operators else 0
    found: list[int] = []
    for place in range(len(sizes)):
        now = known.get(place, now)
        found.append(now)
    return found


def _pairs(sizes: list[int], others: list[int]) -> Iterator[tuple[int, int]]:
    """Yield index pairs of equal sizes in two lists, both increasing."""
    if max(len(sizes), len(others)) <= _MOST_EVENTS:
        for own, other, length in SequenceMatcher(None, sizes, others, autojunk=False).get_matching_blocks():
            yield from zip(range(own, own + length), range(other, other + length), strict=True)
        return
    begin = 0
    for own, size in enumerate(sizes):
        found = next(
            (place for place in range(begin, min(begin + _NEXT_FEW, len(others))) if others[place] == size), -1
        )
        if found >= 0:
            yield own, found
            begin = found + 1
