"""Loops in a trace: the same units many times in a row, as recurrent cells, unrolled solvers or tied layers are called.

A loop is observed in the trace, not declared: units with equal signatures and equal links recur with a period. One
period is a *step*. The units of a step become one stage of the solver's chain, and all steps become equal stages:

    units     embed  cell head  cell head  cell head  ...  norm           links of cell: 2 units back; of head: 1 back
    stages    embed  step       step       step            norm           linked input of a step: the state, and no more

So the optimal persistent schedules of such a chain are the multistage ones, of any number of steps. Beside that, a
long chain of unequal stages would leave the solver's tables with few, coarse slots; equal stages share their tables.

The step in the middle stands for all. The first one has no earlier step to link to, and mostly saves less; it is found
by its modules alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from torchremat.planning.profiles.units import Units
from torchremat.schedules.chain import KeepNode, Tree, rebuilt

# The fewest steps of a loop.
_FEWEST = 16

# The most units of a step. A link from further back counts as one from outside of the loop.
_MOST_UNITS = 32

# Up to so many units the tables of a chain of units have fine slots, and up to so many they take half a minute. In such
# a chain a region may begin and end anywhere; between, that matters only where steps have several units.
MOST_FINE = 160
_MOST = 500


@dataclass(frozen=True, kw_only=True)
class FoundLoop:
    """The same units many times in a row.

    Attributes:
        first: The first unit.
        period: The units of a step.
        steps: The number of steps.
    """

    first: int
    period: int
    steps: int

    @property
    def stop(self) -> int:
        """The unit after its last one."""
        return self.first + self.period * self.steps

    def step(self, number: int) -> range:
        """Return the units of a step."""
        begin = self.first + self.period * number
        return range(begin, begin + self.period)


def loops_in(units: Units) -> tuple[FoundLoop, ...]:
    """Return the loops of a trace, in order."""
    kinds = _kinds(units)
    return tuple(loop for row in units.rows for loop in _loops(units, kinds, row.start, row.stop))


def have_several_units(loops: Sequence[FoundLoop]) -> bool:
    """Whether steps have several units, which then are kept or recomputed together."""
    return any(loop.period > 1 for loop in loops)


def are_long(units: Units, loops: Sequence[FoundLoop]) -> bool:
    """Whether a chain of steps takes the place of the chain of units: that would take too long, or is no better."""
    return bool(loops) and len(units.units) > (_MOST if have_several_units(loops) else MOST_FINE)


def stages_of(units: Units, loops: Sequence[FoundLoop]) -> tuple[range, ...]:
    """Return the units of each stage: one unit, or a step of a loop."""
    found, unit = list[range](), 0
    for loop in loops:
        found += [range(one, one + 1) for one in range(unit, loop.first)]
        found += map(loop.step, range(loop.steps))
        unit = loop.stop
    return (*found, *(range(one, one + 1) for one in range(unit, len(units.units))))


def expanded(tree: Tree, stages: Sequence[range]) -> Tree:
    """Return a tree over stages as a tree over their units."""
    if len(stages) == stages[-1].stop:
        return tree
    return rebuilt(tree, stage=lambda keep: (KeepNode(unit, keep.option) for unit in stages[keep.stage]))


def _kinds(units: Units) -> list[int]:
    """Return a number for each unit, the same for units of equal signatures and links."""
    numbers: dict[object, int] = {}
    return [numbers.setdefault(_kind(units, unit), len(numbers)) for unit in range(len(units.units))]


def _kind(units: Units, unit: int) -> object:
    own, trace = units.units[unit], units.trace
    links = dict(own.links)
    inputs = [
        (
            min(unit - links[storage], _MOST_UNITS + 1) if storage in links else 0,
            trace.storage_bytes[storage] if storage in trace.died else 0,
        )
        for storage in own.inputs
    ]
    return units.signature(unit), tuple(inputs), own.carried


def _loops(units: Units, kinds: Sequence[int], begin: int, end: int) -> Iterator[FoundLoop]:
    """Yield the loops among some consecutive units: the longest, and the ones before and after it."""
    own, best, period = np.array(kinds[begin:end]), range(0), 0
    for every in range(1, min(_MOST_UNITS, len(own) // _FEWEST) + 1):
        # Runs of units that equal the unit one period later.
        edges = np.flatnonzero(np.diff(own[:-every] == own[every:], prepend=False, append=False))
        starts, stops = edges[::2], edges[1::2] + every
        for start, stop in zip(starts.tolist(), stops.tolist(), strict=True):
            if stop - start >= max(_FEWEST * every, len(best) + every):
                best, period = range(begin + start, begin + stop), every
    if best:
        found = _with_first_step(units, best, period, begin)
        yield from _loops(units, kinds, begin, found.first)
        yield found
        yield from _loops(units, kinds, found.stop, end)


def _with_first_step(units: Units, periodic: range, period: int, begin: int) -> FoundLoop:
    """Return the loop of units that recur with a period, with the step before them, from unit `begin` on, if any."""

    def names(first: int) -> list[list[str]]:
        return [[name for name, _ in unit.keys] for unit in units.units[first : first + period]]

    for second in periodic[:period]:
        if second - period >= begin and names(second - period) == names(second):
            return FoundLoop(first=second - period, period=period, steps=(periodic.stop - second) // period + 1)
    return FoundLoop(first=periodic.start, period=period, steps=len(periodic) // period)
