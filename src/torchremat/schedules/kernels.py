"""Live bytes while operators run one after the other, where a compiler fuses some of them into kernels."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from torchremat.schedules.dataflow import Operator


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
