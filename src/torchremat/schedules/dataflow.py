"""The operators of a forward as data: the values that each reads and makes, its cost, and what backward needs.

A value is the content of a storage between two writes: a view of it is the same value, a write in place makes a new
one. So bytes count once, and overwritten values cannot be held.

`walk` has the live bytes while operators run one after the other, where a compiler fuses some of them into kernels.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from torchremat.errors import ScheduleError


@dataclass(frozen=True, kw_only=True)
class Value:
    """A storage between two writes to it.

    Attributes:
        size_bytes: Of the whole storage.
        needed: Whether backward asks for it.
        holdable: Whether it can be held until then; False if it is written to later, or cannot be given back.
        saved_after: If it is needed, how many operators have run when autograd saves it for the last time.
    """

    size_bytes: int
    needed: bool = False
    holdable: bool = True
    saved_after: int = 0


@dataclass(frozen=True, kw_only=True)
class Operator:
    """An operator, or several that can only run together.

    Attributes:
        name: For messages.
        inputs: Values that it reads.
        outputs: Values that it makes; each value is made by one operator at most.
        cost: Of running it again, in any one unit, seconds or flops; infinite if it must not run again.
        replaceable: Whether holding its outputs spares it. If not, it runs whenever an operator after it runs: a view,
            or a write in place.
        workspace_bytes: Its workspace: bytes that it needs while it runs, in addition to its inputs and outputs.
            Simulations of a list's live bytes count it; selections of outputs to hold have no program points inside
            operators.
        fuses: Whether a compiler makes one kernel of it and the only reader of its outputs, if that reader fuses too.
            Counted like a workspace.
    """

    name: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    cost: float
    replaceable: bool = True
    workspace_bytes: int = 0
    fuses: bool = False


@dataclass(frozen=True, kw_only=True)
class Dataflow:
    """The operators of a forward in their order. Values that no operator makes are live under any choice.

    Attributes:
        operators: In the order of the forward.
        values: By number.

    Raises:
        ScheduleError: Lists every problem: a value that does not exist, is made twice, or is read before it is made; a
            negative size or cost.
    """

    operators: tuple[Operator, ...]
    values: tuple[Value, ...]

    def __post_init__(self) -> None:
        problems = list(self._problems())
        if problems:
            raise ScheduleError("not a dataflow: " + "; ".join(problems))

    @cached_property
    def maker(self) -> dict[int, int]:
        """The operator that makes each value."""
        return {value: index for index, operator in enumerate(self.operators) for value in operator.outputs}

    def _problems(self) -> Iterator[str]:
        for number, value in enumerate(self.values):
            if value.size_bytes < 0:
                yield f"value {number}: size_bytes={value.size_bytes} is negative"
        made_by = {value: i for i, operator in reversed(list(enumerate(self.operators))) for value in operator.outputs}
        made: set[int] = set()
        for index, operator in enumerate(self.operators):
            where = f"operator {index} ({operator.name})"
            if math.isnan(operator.cost) or operator.cost < 0:
                yield f"{where}: cost={operator.cost} is negative or not a number"
            for value in (*operator.inputs, *operator.outputs):
                if not 0 <= value < len(self.values):
                    yield f"{where}: value {value} of {len(self.values)} does not exist"
            for value in operator.inputs:
                if made_by.get(value, -1) >= index:
                    yield f"{where}: reads value {value}, which operator {made_by[value]} makes later"
            for value in operator.outputs:
                if value in made:
                    yield f"{where}: value {value} is made twice"
                made.add(value)


class FusedKernel(NamedTuple):
    """Operators that run as one.

    Attributes:
        last: The last of them.
        place: Where that is in the list.
        inputs: Values that they read and that none of them makes.
    """

    last: Operator
    place: int
    inputs: tuple[int, ...]


def walk(
    operators: Sequence[Operator],
    size_bytes: Sequence[int],
    *,
    begin: Iterable[int],
    keep: Iterable[int],
    other_bytes: int,
    other_each: Sequence[int] = (),
) -> Iterator[tuple[int, str]]:
    """Yield the live bytes while each kernel runs, with its name. A value is freed after its last reader.

    Args:
        operators: In the order in which they run.
        size_bytes: By value.
        begin: Values that are live at first and are freed like values that operators make.
        keep: Values that stay.
        other_bytes: All else that is live.
        other_each: Further live bytes while each operator runs; for a kernel the entry of its last operator counts.
    """
    stays = set(keep)
    kernels = fused(operators, stays)
    last = {value: at for at, kernel in enumerate(kernels) for value in (*kernel.last.outputs, *kernel.inputs)}
    there = set(begin)
    live = other_bytes + sum(size_bytes[value] for value in there)
    for at, (operator, place, inputs) in enumerate(kernels):
        for value in operator.outputs:
            if value not in there:
                there.add(value)
                live += size_bytes[value]
        yield live + operator.workspace_bytes + (other_each[place] if other_each else 0), operator.name
        for value in (*operator.outputs, *inputs):
            if last[value] == at and value in there and value not in stays:
                there.remove(value)
                live -= size_bytes[value]


def fused(operators: Sequence[Operator], keep: set[int]) -> list[FusedKernel]:
    """Return the kernels of a list: an operator, and with it the ones whose values only it reads, if all of them fuse.

    Such a value is never in memory. Its inputs are, until its reader has run.

    Args:
        operators: In the order in which they run.
        keep: Values that are read after the list.
    """
    kernels = {place: FusedKernel(operator, place, operator.inputs) for place, operator in enumerate(operators)}
    readers: dict[int, set[int]] = {}
    for place, operator in enumerate(operators):
        for value in operator.inputs:
            readers.setdefault(value, set()).add(place)
    for place, operator in enumerate(operators):
        if not operator.fuses or not keep.isdisjoint(operator.outputs):
            continue
        reading = {reader for value in operator.outputs for reader in readers.get(value, ())}
        if len(reading) != 1:
            continue
        reader = kernels[reading.pop()]
        if reader.last.fuses:
            others = (value for value in reader.inputs if value not in operator.outputs)
            inputs = tuple(dict.fromkeys((*kernels.pop(place).inputs, *others)))
            kernels[reader.place] = reader._replace(inputs=inputs)
    return list(kernels.values())
