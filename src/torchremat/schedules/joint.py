"""A forward and its backward as one list of operators, split by the values that are saved between them.

A compiler that has both in one graph splits it into two: the forward returns the *saved* values, and the backward
recomputes all other values that it needs from them, each value once and as late as possible. The saved values decide
everything, including the peak of the step.

    forward    the operators that the outputs and the saved values need, in order
    backward   the operators from the first that reads an incoming gradient on; before each of them, in order, the
               operators that make the missing values it needs

A compiler makes copies to other layouts, keeps a parameter's copy until the backward has read it, and never
materializes fused values. All of that changes little when a little more or less is saved. So the difference between the
known bytes and the list's, operator by operator, makes the list exact for this split and better for splits near it.

Missing on purpose: a value that is made more than twice.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cached_property

from torchremat.errors import ScheduleError
from torchremat.schedules.dataflow import Operator, walk


@dataclass(frozen=True, kw_only=True)
class Adjustments:
    """Bytes live in addition to values while operators run, by the index of the operator; they may be negative.

    Attributes:
        first: Where the operator runs in its own place: in the forward if the outputs need it, else in the backward.
        again: Where the backward runs it again. An operator without an entry has the bytes of the operator that it runs
            for.
    """

    first: Mapping[int, int] = field(default_factory=dict[int, int])
    again: Mapping[int, int] = field(default_factory=dict[int, int])

    def of(self, indices: Sequence[int], late: Set[int]) -> list[int]:
        """Return the bytes for each operator of a forward or a backward; only these have operators that are `late`."""
        if late.isdisjoint(indices):
            return [self.first.get(index, 0) for index in indices]
        found: list[int] = []
        reader = 0
        for index in reversed(indices):
            reader = self.first.get(index, 0) if index in late else reader
            found.append(reader if index in late else self.again.get(index, reader))
        return found[::-1]


NO_ADJUSTMENTS = Adjustments()


@dataclass(frozen=True, kw_only=True)
class Joint:
    """A forward and its backward. Values that no operator makes are live all the time: parameters and inputs.

    Attributes:
        operators: In order; views do not count as operators, a view of a value is the value.
        size_bytes: By value.
        outputs: Values that the forward returns; the caller may hold them until the end.
        gradients: Values that the backward returns.
        incoming: The gradients that the backward receives.
        begins: The first operator that reads one of these.
        adjustments: Bytes live in addition to these, where known.
    """

    operators: tuple[Operator, ...]
    size_bytes: tuple[int, ...]
    outputs: tuple[int, ...]
    gradients: tuple[int, ...]
    incoming: tuple[int, ...]
    begins: int
    adjustments: Adjustments = NO_ADJUSTMENTS

    @cached_property
    def maker(self) -> dict[int, int]:
        """The operator that makes each value."""
        return {value: index for index, operator in enumerate(self.operators) for value in operator.outputs}

    @cached_property
    def of_backward(self) -> frozenset[int]:
        """The operators that need an incoming gradient, and therefore cannot run in the forward."""
        tainted = set(self.incoming)
        found: set[int] = set()
        for index, operator in enumerate(self.operators):
            if not tainted.isdisjoint(operator.inputs):
                found.add(index)
                tainted.update(operator.outputs)
        return frozenset(found)

    @cached_property
    def of_forward(self) -> frozenset[int]:
        """The operators that the outputs need."""
        return frozenset(self.needed_for(self.outputs))

    @cached_property
    def asked(self) -> frozenset[int]:
        """The values made without gradients that operators with gradients read, or that the backward returns."""
        read = {value for index in self.of_backward for value in self.operators[index].inputs} | set(self.gradients)
        return frozenset(value for value in read if self.maker.get(value, -1) not in {-1, *self.of_backward})

    @cached_property
    def fixed_bytes(self) -> int:
        """Bytes of the values that are live all the time, and read or returned."""
        used = {value for operator in self.operators for value in operator.inputs} | {*self.outputs, *self.gradients}
        return sum(self.size_bytes[value] for value in used if value not in self.maker and value not in self.incoming)

    def needed_for(self, values: Iterable[int], there: Iterable[int] = ()) -> set[int]:
        """Return the operators that must run for some values if others are available."""
        known = set(there)
        waiting = [value for value in values if value not in known]
        found: set[int] = set()
        while waiting:
            maker = self.maker.get(waiting.pop())
            if maker is None or maker in found:
                continue
            found.add(maker)
            waiting += [value for value in self.operators[maker].inputs if value not in known]
        return found


@dataclass(frozen=True, kw_only=True)
class Split:
    """A forward and a backward that a joint list was split into.

    Attributes:
        saved: The values between them that have their own bytes.
        forward: The operators of the forward.
        backward: The operators of the backward, in the order in which they run.
        peak_bytes: The most that is live at once.
        where: The name of the operator that runs at the peak.
        kept_bytes: Bytes live between the two, including outputs and values that are live all the time.
        cost: Of the operators that run in both.
    """

    saved: frozenset[int]
    forward: tuple[int, ...]
    backward: tuple[int, ...]
    peak_bytes: int
    where: str
    kept_bytes: int
    cost: float


def split(joint: Joint, saved: Iterable[int]) -> Split:
    """Return the split of a joint list that saves some values; values that the backward does not need are left out.

    Raises:
        ScheduleError: A saved value needs an incoming gradient.
    """
    chosen = {value for value in saved if value in joint.maker}
    late = sorted(value for value in chosen if joint.maker[value] in joint.of_backward)
    if late:
        raise ScheduleError(f"values {late} need an incoming gradient, so the forward cannot save them.")
    backward = tuple(_backward(joint, chosen))
    read = {value for index in backward for value in joint.operators[index].inputs} | set(joint.gradients)
    chosen &= read
    forward = tuple(sorted(joint.needed_for([*joint.outputs, *chosen])))
    again = set(forward) & set(backward)
    first, second = live(joint, chosen, forward, backward)
    kept = _kept_bytes(joint, chosen)
    peak, where = max((*first, *second, (kept, "the end of the forward")), key=lambda one: one[0])
    return Split(
        saved=frozenset(chosen),
        forward=forward,
        backward=backward,
        peak_bytes=peak,
        where=where,
        kept_bytes=kept,
        cost=sum(joint.operators[index].cost for index in again),
    )


def live(
    joint: Joint, saved: Set[int], forward: Sequence[int], backward: Sequence[int]
) -> tuple[list[tuple[int, str]], list[tuple[int, str]]]:
    """Return the live bytes while each kernel of a split's forward runs, with its name; likewise for its backward."""
    outputs = joint.maker.keys() & joint.outputs
    begin = saved - outputs
    later = _kept_bytes(joint, saved) - sum(joint.size_bytes[value] for value in begin)
    later += sum(joint.size_bytes[value] for value in joint.incoming)

    def lives(indices: Sequence[int], begin: Set[int], keep: Iterable[int], others: int) -> list[tuple[int, str]]:
        operators = [joint.operators[index] for index in indices]
        each = joint.adjustments.of(indices, joint.of_backward)
        return list(walk(operators, joint.size_bytes, begin=begin, keep=keep, other_bytes=others, other_each=each))

    return (
        lives(forward, frozenset(), saved | outputs, joint.fixed_bytes),
        lives(backward, begin, joint.gradients, later),
    )


def is_possible(found: Split) -> bool:
    """Return whether every operator that runs twice may run twice."""
    return math.isfinite(found.cost)


def _kept_bytes(joint: Joint, saved: Set[int]) -> int:
    return joint.fixed_bytes + sum(joint.size_bytes[value] for value in saved | (joint.maker.keys() & joint.outputs))


def _backward(joint: Joint, saved: set[int]) -> Iterator[int]:
    needed = joint.needed_for(joint.gradients, saved)
    done: set[int] = set()
    for index in range(joint.begins, len(joint.operators)):
        if index not in needed or index in done:
            continue
        pulled = {index}
        waiting = [index]
        while waiting:
            for value in joint.operators[waiting.pop()].inputs:
                maker = joint.maker.get(value)
                if value not in saved and maker is not None and maker not in done and maker not in pulled:
                    pulled.add(maker)
                    waiting.append(maker)
        done |= pulled
        yield from sorted(pulled)
    # Operators that need no gradient at all come before the first that does.
    yield from sorted(needed - done)


def adjustments_of(joint: Joint, found: Split, forward: Mapping[str, int], backward: Mapping[str, int]) -> Adjustments:
    """Return the bytes live in addition to the values of a list.

    Args:
        joint: The list; its own adjustments do not count.
        found: A split of it.
        forward: By the names of operators, the bytes live while they run in the forward of this split. An operator
            without an entry takes the entry of the one before it.
        backward: The same for its backward.
    """
    first, second = live(replace(joint, adjustments=NO_ADJUSTMENTS), found.saved, found.forward, found.backward)
    late = dict(_differences(joint, found.backward, backward, second))
    again = {index: size for index, size in late.items() if index not in joint.of_backward}
    in_place = {index: size for index, size in late.items() if index in joint.of_backward}
    return Adjustments(first={**dict(_differences(joint, found.forward, forward, first)), **in_place}, again=again)


def _differences(
    joint: Joint, indices: Sequence[int], known: Mapping[str, int], said: Sequence[tuple[int, str]]
) -> Iterator[tuple[int, int]]:
    """Yield how far known bytes exceed the list's, for each operator, or else for the one before it."""
    more = {name: known[name] - size for size, name in said if name in known}
    last = 0
    for index in indices:
        last = more.get(joint.operators[index].name, last)
        yield index, last
