"""Stretches of a joint list that the backward can recompute by themselves, and the live bytes that each adds.

Time is one axis: the operators of the forward, then of the backward. The `base` has the bytes live under any saving; a
stretch under one way to save adds its *curve*. Where the backward recomputes a stretch before an operator, the curve
has the peak of that recompute.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from torchremat.schedules.dataflow import walk
from torchremat.schedules.joint import Joint

_MOST_CUTS = 14


@dataclass(frozen=True, kw_only=True, eq=False)
class SpanChoice:
    """A stretch from one cut to another, and one way to save in it.

    Attributes:
        first: The cut where it begins.
        last: The cut where it ends.
        saved: The values made in it that are saved.
        cost: Of its operators that run again.
        curve: Bytes that it adds, by time.
    """

    first: int
    last: int
    saved: frozenset[int]
    cost: float
    curve: np.ndarray


class RecomputeSpans:
    """The choices of a joint list.

    Each of the `ways` is a set of saved values that suffices for the backward; a choice takes its part of one.

    Attributes:
        cuts: Numbers of operators; a stretch is from one to before another.
        base: Bytes that are live under any saving, by time.
        choices: The possible choices.
    """

    def __init__(self, joint: Joint, ways: Sequence[frozenset[int]]) -> None:
        self.joint = joint
        self.order = sorted(joint.of_forward)
        self.time = {index: time for time, index in enumerate(self.order)}
        self.early = [(index, one) for index, one in enumerate(joint.operators) if index not in joint.of_backward]
        self.late = [index for index in range(joint.begins, len(joint.operators)) if index in joint.of_backward]
        self.place = self._places()
        self.readers = self._readers()
        self.last_reads = self._last_reads()
        self.forward_reads = {
            value: time for time, index in enumerate(self.order) for value in joint.operators[index].inputs
        }
        self.consumers = self._consumers()
        self.latest = self._latest()
        self.cuts = self._cuts()
        self.base = self._base()
        self.choices = [
            choice for first, last in combinations(range(len(self.cuts)), 2) for choice in self._of(first, last, ways)
        ]

    def _places(self) -> dict[int, int]:
        """The time of the forward at which each value is made, or could be."""
        place: dict[int, int] = {}
        for index, operator in self.early:
            after = max((place[value] for value in operator.inputs if value in place), default=0)
            place.update(dict.fromkeys(operator.outputs, self.time.get(index, after)))
        return place

    def _readers(self) -> dict[int, list[int]]:
        """The times at which the backward reads each value by itself."""
        readers: dict[int, list[int]] = {}
        for time, index in enumerate(self.late, len(self.order)):
            for value in self.joint.operators[index].inputs:
                if value in self.place:
                    readers.setdefault(value, []).append(time)
        for value in self.joint.gradients:
            if value in self.place:
                readers.setdefault(value, []).append(len(self.order) + len(self.late) - 1)
        return readers

    def _cuts(self) -> list[int]:
        """Times with few live bytes across them, spread evenly over the bytes that the backward asks for."""
        joint, steps = self.joint, len(self.order)
        crossing = np.zeros(steps + 1)
        for value, until in self.last_reads.items():
            crossing[self.place[value] + 1 : until + 1] += joint.size_bytes[value]
        asked = np.zeros(steps)
        for value in joint.asked:
            asked[self.place[value]] += joint.size_bytes[value]
        sums = np.cumsum(asked) / max(asked.sum(), 1.0)
        edges = np.searchsorted(sums, np.linspace(0, 1, _MOST_CUTS)[1:-1])
        inner: set[int] = set()
        for low, high in zip([1, *edges], [*edges, steps], strict=True):
            if low < high:
                inner.add(int(low + np.argmin(crossing[low:high])))
        return [0, *sorted(inner - {0, steps}), steps]

    def _last_reads(self) -> dict[int, int]:
        """The last time at which an operator without gradients reads each value."""
        last: dict[int, int] = {}
        for index, operator in self.early:
            at = max((self.place[value] for value in operator.outputs), default=self.time.get(index, 0))
            for value in operator.inputs:
                if value in self.place:
                    last[value] = max(last.get(value, 0), at)
        return last

    def _consumers(self) -> dict[int, list[int]]:
        """The operators without gradients that read each value."""
        found: dict[int, list[int]] = {}
        for index, operator in self.early:
            for value in operator.inputs:
                found.setdefault(value, []).append(index)
        return found

    def _latest(self) -> dict[int, int]:
        """The last time at which the backward may run each operator again."""
        latest: dict[int, int] = {}
        for index, operator in reversed(self.early):
            direct = [min(self.readers[value]) for value in operator.outputs if value in self.readers]
            others = [latest[reader] for value in operator.outputs for reader in self.consumers.get(value, ())]
            latest[index] = min(direct) if direct else max(others, default=-1)
        return latest

    def _base(self) -> np.ndarray:
        joint, steps, end = self.joint, len(self.order), len(self.order) + len(self.late)
        sizes = joint.size_bytes
        deltas = np.zeros(end + 1)
        deltas[0] += joint.fixed_bytes
        deltas[steps] += sum(sizes[value] for value in joint.incoming)
        outputs = set(joint.outputs)
        for time, index in enumerate(self.order):
            for value in joint.operators[index].outputs:
                deltas[time] += sizes[value]
                deltas[end if value in outputs else self.forward_reads.get(value, time) + 1] -= sizes[value]
        gradients = set(joint.gradients)
        at = {index: time for time, index in enumerate(self.late, steps)}
        reads = {value: at[index] for index in self.late for value in joint.operators[index].inputs}
        for index in self.late:
            for value in joint.operators[index].outputs:
                deltas[at[index]] += sizes[value]
                deltas[end if value in gradients else reads.get(value, at[index]) + 1] -= sizes[value]
        base = np.cumsum(deltas)[:end]
        for time, index in enumerate([*self.order, *self.late]):
            base[time] += joint.operators[index].workspace_bytes + joint.adjustments.first.get(index, 0)
        return base

    def _of(self, first: int, last: int, ways: Sequence[frozenset[int]]) -> list[SpanChoice]:
        begin, end = self.cuts[first], self.cuts[last]
        inside = {value for value, time in self.place.items() if begin <= time < end}
        crossing = {value for value in inside if self.last_reads.get(value, -1) >= end and end < len(self.order)}
        found: dict[frozenset[int], SpanChoice] = {}
        for way in ways:
            choice = self._choice(first, last, inside, crossing, way)
            found.setdefault(choice.saved, choice)
        # A choice that costs at least as much as another and is nowhere lower is never taken.
        kept: list[SpanChoice] = []
        for choice in sorted(found.values(), key=lambda one: (one.cost, one.curve.sum())):
            if not any(bool(np.all(other.curve <= choice.curve)) for other in kept):
                kept.append(choice)
        return kept

    def _choice(self, first: int, last: int, inside: set[int], crossing: set[int], way: frozenset[int]) -> SpanChoice:
        again = _Again(self, inside, crossing | (way & inside))
        for time, read in sorted((time, value) for value in inside for time in self.readers.get(value, ())):
            again.read(read, time)
        for value in crossing:
            again.used[value] = max(again.used.get(value, -1), self._read_by_later(value, self.cuts[last]))
        saved = frozenset(value for value in again.saved if again.used.get(value, -1) >= 0)
        operators = self.joint.operators
        cost = sum(operators[index].cost for index in again.made_at if index in self.joint.of_forward)
        return SpanChoice(first=first, last=last, saved=saved, cost=cost, curve=self._curve(again, saved))

    def _read_by_later(self, value: int, after: int) -> int:
        """The last time at which the backward may read a value to rerun operators after a cut."""
        times = [self.latest[index] for index in self.consumers.get(value, ()) if self._at(index) >= after]
        return max(times, default=-1)

    def _at(self, index: int) -> int:
        return max((self.place[value] for value in self.joint.operators[index].outputs), default=-1)

    def _curve(self, again: _Again, saved: frozenset[int]) -> np.ndarray:
        sizes, steps = self.joint.size_bytes, len(self.order)
        outputs = set(self.joint.outputs)
        deltas = np.zeros(len(self.base) + 1)
        for value in saved - outputs:
            runs_first = self.joint.maker[value] in self.time
            begins = self.forward_reads.get(value, self.place[value]) + 1 if runs_first else steps - 1
            deltas[begins] += sizes[value]
            deltas[again.used[value] + 1] -= sizes[value]
        at: dict[int, list[int]] = {}
        for index, time in again.made_at.items():
            at.setdefault(time, []).append(index)
        extra: dict[int, int] = {}
        for time, indices in at.items():
            stays = {
                value
                for index in indices
                for value in self.joint.operators[index].outputs
                if again.used.get(value, -1) > time or time in self.readers.get(value, ())
            }
            for value in stays:
                deltas[time] += sizes[value]
                deltas[again.used[value] + 1] -= sizes[value]
            made = [self.joint.operators[index] for index in sorted(indices)]
            most = max(live for live, _ in walk(made, sizes, begin=(), keep=stays, other_bytes=0))
            then = self.joint.operators[self.late[time - steps]]
            result = sum(sizes[value] for value in then.outputs) + then.workspace_bytes
            extra[time] = max(0, most - result - sum(sizes[value] for value in stays))
        curve = np.cumsum(deltas)[:-1]
        for time, size in extra.items():
            curve[time] += size
        return curve


class _Again:
    """The recompute of a stretch in the backward.

    Attributes:
        saved: Values that it finds saved.
        made_at: The time at which each operator runs again.
        used: The last time at which each value is read.
    """

    def __init__(self, stretches: RecomputeSpans, inside: set[int], saved: set[int]) -> None:
        self.joint = stretches.joint
        self.inside = inside
        self.saved = set(saved)
        self.made_at: dict[int, int] = {}
        self.used: dict[int, int] = {}

    def read(self, value: int, time: int) -> None:
        """Let a value be read at a time, no earlier than all reads so far."""
        waiting = [value]
        while waiting:
            value = waiting.pop()
            if value not in self.inside:
                continue
            self.used[value] = max(self.used.get(value, -1), time)
            maker = self.joint.maker[value]
            if value in self.saved or maker in self.made_at:
                continue
            if np.isinf(self.joint.operators[maker].cost):
                self.saved.add(value)
                continue
            self.made_at[maker] = time
            waiting += self.joint.operators[maker].inputs
