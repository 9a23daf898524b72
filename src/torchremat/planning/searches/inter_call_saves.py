"""Inter-call saves: tensors that a unit's own code saves between the calls inside it. They stay if it is split.

The profiles show the bytes live outside the plan, in the coarse watched step around each unit and in the fine one
around each call inside. The difference grows by the inter-call saves. Between the last call inside one unit and the
first call inside the next, these are saves of both units' code. The trace tells which unit saves which tensor.

Variables of own code are live outside the plan too, but only until it returns. The trace keeps no saved tensors: all
live tensors in it are variables.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from torchremat.planning.profiles.reading import Profile
from torchremat.planning.profiles.watching import every_unit
from torchremat.planning.simulator.points import ProgramPoint
from torchremat.planning.simulator.simulator import MemorySimulator


@dataclass(frozen=True, kw_only=True)
class InterCallSaves:
    """Bytes saved by own code, without boundary storages; 0 for a unit that is whole in the fine profile.

    Attributes:
        within: By coarse unit, the bytes saved between the first call inside and the last.
        between: The bytes saved before the first call inside each unit, since the last call inside the previous unit;
            one more entry for the code after all units.
        first: The part of `between` that the unit itself saves, by the trace.
        last: The part of `between` that the previous unit saves, by the trace.
    """

    within: Sequence[int]
    between: Sequence[int]
    first: Sequence[int]
    last: Sequence[int]

    def counted(self, split: set[int]) -> list[int]:
        """Return the part of `between` that split units save.

        Args:
            split: The split units. Where the code belongs to two units and one is split, saves unknown to the trace
                count for the split unit.
        """
        found: list[int] = []
        for unit, (size, first, last) in enumerate(zip(self.between, self.first, self.last, strict=True)):
            match unit - 1 in split, unit in split:
                case True, True:
                    found.append(size)
                case True, False:
                    found.append(max(last, size - first))
                case False, True:
                    found.append(max(first, size - last))
                case _:
                    found.append(0)
        return found


def inter_call_saves_of(blocks: Profile, leaves: Profile, inside: Sequence[tuple[int, int]]) -> InterCallSaves:
    """Return the inter-call saves.

    Args:
        blocks: The profile in which each unit is a region.
        leaves: The profile in which each call inside is a region, with the same boundary storages.
        inside: For each coarse unit the first and the last unit of the fine profile that it is or contains.
    """
    saves = _OwnSaves(blocks, leaves)
    entered, left, first, last = list[int](), list[int](), list[int](), [0]
    held, held_in = _held_after(blocks), _held_after(leaves)
    for unit, (begin, end) in enumerate(inside):
        own, inner = blocks.units, leaves.units
        calls, begins, ends = own.units[unit].calls, inner.units[begin].calls[0], inner.units[end].calls[-1]
        more = saves.variables_before(begins) - saves.variables_before(calls[0])
        entered.append(_more(blocks, leaves, ProgramPoint.FORWARD, unit, begin) - more)
        more = saves.variables_after(ends, held_in[end]) - saves.variables_after(calls[-1], held[unit])
        left.append(_more(blocks, leaves, ProgramPoint.LEFT, unit, end) - more)
        first.append(saves.between(own.entered(unit), inner.entered(begin)))
        last.append(saves.between(inner.left(end), own.left(unit)))
    after = leaves.extra_bytes[ProgramPoint.END, 0] - blocks.extra_bytes[ProgramPoint.END, 0]
    return InterCallSaves(
        within=_differences(entered, left),
        between=_differences((0, *left), (*entered, after)),
        first=(*first, 0),
        last=last,
    )


def _more(blocks: Profile, leaves: Profile, point: ProgramPoint, unit: int, place: int) -> int:
    """Bytes live outside the plan at a fine unit, minus those at the coarse unit that it belongs to."""
    return leaves.extra_bytes[point, place] - blocks.extra_bytes[point, unit]


def _held_after(profile: Profile) -> list[set[int]]:
    """For each unit, the storages held when it has returned, as a region, that are freed by then in the trace."""
    units, lasting = profile.units, profile.units.trace.lasting
    simulator = MemorySimulator(units, profile.sizes, profile.order, profile.lifetimes, every_unit(units))
    return [
        lasting.keys() & simulator.live.held.keys()
        for state in simulator.forward()
        if state.key[0] is ProgramPoint.LEFT
    ]


def _differences(before: Iterable[int], after: Iterable[int]) -> tuple[int, ...]:
    return tuple(b - a for a, b in zip(before, after, strict=True))


class _OwnSaves:
    """The storages that own code saves in a trace, each at its first save."""

    def __init__(self, blocks: Profile, leaves: Profile) -> None:
        self.trace = trace = blocks.units.trace
        self.boundary = boundary = blocks.lifetimes.boundary
        time_of: dict[int, int] = {}
        for one in sorted(leaves.units.saves_between(), key=lambda one: one.time):
            for storage in one.storages if one.dropped is None else ():
                if storage not in boundary and storage not in trace.fixed:
                    time_of.setdefault(storage, one.time)
        self.times = list(time_of.values())
        self.bytes = [0, *accumulate(trace.storage_bytes[storage] for storage in time_of)]
        # Live bytes in the trace by time: of storages that the plan counts, and of these inter-call saves.
        change = np.zeros(trace.end + 2, np.int64)
        begins = {storage: trace.born[storage] for storage in boundary}
        begins.update((storage, time + 1) for storage, time in time_of.items())
        for storage, begin in begins.items():
            end = trace.died.get(storage, trace.end) + 1
            if begin < end:
                change[[begin, end]] += (trace.storage_bytes[storage], -trace.storage_bytes[storage])
        self.counted = np.cumsum(change)
        # By the time at which a call returned: storages freed by the trace, and still live at the call's last mark.
        self.lasting: dict[int, list[int]] = {}
        for storage in begins.keys() & trace.lasting.keys():
            if begins[storage] <= trace.died[storage]:
                for time in range(trace.died[storage] + 1, trace.lasting[storage] + 1):
                    self.lasting.setdefault(time, []).append(storage)

    def between(self, begin: int, end: int) -> int:
        """Return the bytes saved from one time until another."""
        return self.bytes[bisect_left(self.times, end)] - self.bytes[bisect_left(self.times, begin)]

    def variables_before(self, call: int) -> int:
        """Return the bytes, unknown to the plan, that are live when a call begins, up to a constant."""
        own, allocations = self.trace.calls[call], self.trace.allocations
        return 0 if allocations is None else allocations.live_bytes_at(own.begins) - int(self.counted[own.entered])

    def variables_after(self, call: int, held: Container[int]) -> int:
        """Return the same when the call ends, with `held` storages held."""
        own, allocations = self.trace.calls[call], self.trace.allocations
        if allocations is None:
            return 0
        # The arguments of a call are still live at its last mark, even if nothing else references them, and so are
        # variables of the surrounding code that die with its return. The plan counts those that are held by then.
        lasting = (one for one in self.lasting.get(own.left, ()) if one in held or one not in self.boundary)
        counted = int(self.counted[own.left]) + sum(self.trace.storage_bytes[one] for one in lasting)
        return allocations.live_bytes_at(own.ends) - counted
