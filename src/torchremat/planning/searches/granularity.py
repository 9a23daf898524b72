"""Some units split into the calls inside them: a third choice in addition to keep and recompute.

Two watched steps are enough for every mixture. In the coarse one each unit is a region; in the fine one each call
inside a divisible unit is. The tensors that a unit's own code saves between those calls always stay once the unit is
split: the *inter-call saves*.

    extra(point of a whole unit)       = coarse extra + what the split units before it save in their own code
    extra(point of a call inside)      = fine extra - what the units before it that are not split would save in theirs

The profiles show the bytes live outside the plan, in the coarse watched step around each unit and in the fine one
around each call inside. The difference grows by the inter-call saves. Between the last call inside one unit and the
first call inside the next, these are saves of both units' code. The trace tells which unit saves which tensor.

Variables of own code are live outside the plan too, but only until it returns. The trace keeps no saved tensors: all
live tensors in it are variables.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import numpy as np

from torchremat.planning.profiles.grain import find_units, splittable
from torchremat.planning.profiles.profile_pair import ProfilePair
from torchremat.planning.profiles.reading import Profile
from torchremat.planning.profiles.units import Units
from torchremat.planning.profiles.watching import every_unit
from torchremat.planning.simulator.points import Key, Lifetimes, Live, ProgramPoint
from torchremat.planning.simulator.simulator import MemorySimulator
from torchremat.planning.simulator.split_backward import InputPassSimulator

_BACKWARD_MOMENTS = (ProgramPoint.RECOMPUTE, ProgramPoint.BACKWARD, ProgramPoint.RELEASED)
_UNIT_POINTS = (ProgramPoint.FORWARD, ProgramPoint.LEFT, *_BACKWARD_MOMENTS)


def divisible(pair: ProfilePair) -> frozenset[int]:
    """Return the calls of coarse units that can be split: the fine profile has all parts of each."""
    if pair.leaves is None:
        return frozenset()
    trace = pair.blocks.units.trace
    parts = [set(unit.calls) for unit in pair.leaves.units.units]
    result: set[int] = set()
    for call in splittable(pair.blocks.units):
        inside = set(trace.descendants(call))
        touching = [part for part in parts if part & inside]
        if touching and {call} not in touching and all(part <= inside for part in touching):
            result.add(call)
    calls = trace.calls
    whole = {calls[call].name for unit in pair.blocks.units.units for call in unit.calls if call not in result}
    return frozenset(call for call in result if calls[call].name not in whole)


def units_of(pair: ProfilePair, split: frozenset[int]) -> Units | None:
    """Return the units that result if some calls are split; None if the profiles have not seen all of them."""
    seen = {unit.calls for profile in (pair.blocks, pair.leaves) if profile for unit in profile.units.units}
    units = _units(pair.blocks, split)
    return units if all(unit.calls in seen for unit in units.units) else None


def _units(blocks: Profile, split: frozenset[int]) -> Units:
    return find_units(blocks.units.trace, split, blocks.units.unlike, blocks.units.grain)


class Mixtures:
    """The mixtures of a step that was profiled in several ways, with the units of any other mixture of it.

    Args:
        pairs: The profiles in each way.
        stays: See `mix`.
    """

    def __init__(self, pairs: Iterable[ProfilePair], *, stays: bool = False) -> None:
        self._stays = stays
        given = [*pairs]
        self._pairs = [align(pair, stays=stays) for pair in given]
        self._around = [pair.around for pair in given if pair.around is not None]
        self._known: dict[frozenset[int], list[Profile]] = {}

    def like(self, units: Units) -> list[Profile]:
        """Return the profile in each way that has some units, mixed or around those of the blocks."""
        calls = [unit.calls for unit in units.units]
        if self._around and [unit.calls for unit in self._around[0].units.units] == calls:
            return self._around
        split = split_in(self._pairs[0].blocks.units, units)
        if split not in self._known:
            self._known[split] = [mix(pair, split, stays=self._stays) for pair in self._pairs]
        return self._known[split]


def split_in(blocks: Units, units: Units) -> frozenset[int]:
    """Return the calls of coarse units that are split in other units of the same step."""
    whole = {call for unit in units.units for call in unit.calls}
    return frozenset(call for unit in blocks.units for call in unit.calls if call not in whole)


def mix(pair: ProfilePair, split: frozenset[int], *, stays: bool = False) -> Profile:
    """Return the profile in which the units of some calls are split.

    Args:
        pair: The profiles to mix.
        split: Calls among `divisible(pair)` for which `units_of` returns units.
        stays: Whether the profiles are of a split backward, whose graph stays after the input pass.
    """
    pair = align(pair, stays=stays) if split else pair
    if not split or pair.leaves is None:
        return pair.blocks
    return _Mixture(pair.blocks, pair.leaves, split, stays=stays).profile()


def align(pair: ProfilePair, *, stays: bool = False) -> ProfilePair:
    """Return a pair of profiles with the common work of all mixtures done once."""
    if pair.leaves is None:
        return pair
    # A boundary storage of one profile must be one in both, and in the mixture: otherwise a variable that is alive for
    # a while, or a tensor that a unit's own code saves, would count outside the plan in one and inside it in the other.
    boundary = pair.blocks.lifetimes.boundary | pair.leaves.lifetimes.boundary
    kind = InputPassSimulator if stays else MemorySimulator
    return ProfilePair(
        blocks=_with_boundary(pair.blocks, boundary, kind), leaves=_with_boundary(pair.leaves, boundary, kind)
    )


def _with_boundary(profile: Profile, boundary: set[int], kind: type[MemorySimulator]) -> Profile:
    """Return the profile with more boundary storages, which no longer count as live outside the plan."""
    if profile.lifetimes.boundary == boundary:
        return profile
    lifetimes = Lifetimes(profile.units, profile.sizes, boundary)
    now, before = (
        kind(profile.units, profile.sizes, profile.order, one, every_unit(profile.units))
        for one in (lifetimes, profile.lifetimes)
    )
    extra = dict(profile.extra_bytes)
    for a, b in zip(now, before, strict=True):
        if isinstance(a, Live) and isinstance(b, Live) and a.key in extra:
            extra[a.key] = profile.extra_bytes[a.key] + b.held_bytes - a.held_bytes
    return replace(profile, lifetimes=lifetimes, extra_bytes=extra)


class _Mixture:
    def __init__(self, blocks: Profile, leaves: Profile, split: frozenset[int], *, stays: bool) -> None:
        self.stays = stays
        self.boundary = blocks.lifetimes.boundary
        self.blocks = blocks
        self.leaves = leaves
        self.units = _units(blocks, split)
        self.coarse_index = {unit.calls: index for index, unit in enumerate(blocks.units.units)}
        self.fine_index = {unit.calls: index for index, unit in enumerate(leaves.units.units)}
        trace = blocks.units.trace
        inside = {inner: call for call in split for inner in trace.descendants(call)}
        # For each unit of the mixture: its profile, its index there, and the coarse unit that it is or belongs to.
        self.origin: list[tuple[Profile, int, int]] = []
        for unit in self.units.units:
            whole = inside.get(unit.calls[0])
            if whole is None:
                place = self.coarse_index[unit.calls]
                self.origin.append((blocks, place, place))
            else:
                self.origin.append((leaves, self.fine_index[unit.calls], self.coarse_index[whole,]))
        self.split = {self.coarse_index[call,] for call in split}
        # For each coarse unit the first and the last unit of the fine profile that it is or contains.
        within = [
            [place for place, unit in enumerate(leaves.units.units) if unit.calls[0] in calls]
            for calls in map(set, blocks.units.inside)
        ]
        self.first = [inside[0] for inside in within]
        self.last = [inside[-1] for inside in within]
        self.inter_call = inter_call_saves_of(blocks, leaves, list(zip(self.first, self.last, strict=True)))
        self.counted = self.inter_call.counted(self.split)

    def _saved_before(self, unit: int, *, whole: bool) -> int:
        """Bytes that own code has saved when a coarse unit begins, beyond those in the profile of its points."""
        within = sum(size for i, size in enumerate(self.inter_call.within[:unit]) if (i in self.split) is whole)
        counted = sum(self.counted[: unit + 1])
        return within + counted if whole else counted - sum(self.inter_call.between[: unit + 1]) - within

    def profile(self) -> Profile:
        extra: dict[Key, int] = {}
        after: dict[Key, int] = {}
        for index, (source, place, whole) in enumerate(self.origin):
            for point in _UNIT_POINTS:
                until = len(self.inter_call.within) if self.stays and point in _BACKWARD_MOMENTS else whole
                before = self._saved_before(until, whole=source is self.blocks)
                if (point, place) in source.extra_bytes:
                    extra[point, index] = source.extra_bytes[point, place] + before
                    after[point, index] = source.after_bytes[point, place]
        order = self._order()
        extra[ProgramPoint.END, 0] = self.blocks.extra_bytes[ProgramPoint.END, 0] + self._saved_before(
            len(self.inter_call.within), whole=True
        )
        after[ProgramPoint.END, 0] = self.origin[order[0] if order else 0][0].after_bytes[ProgramPoint.END, 0]
        # Code between two units belongs to a split unit if either is split: its own code before and after the calls
        # inside.
        for point, fine_unit, neighbours in (
            (ProgramPoint.LEFT, self.last, pairwise(range(len(self.origin)))),
            (ProgramPoint.RELEASED, self.first, pairwise(order)),
        ):
            for unit, following in neighbours:
                source, _, whole = self.origin[unit]
                between = self.leaves.after_bytes.get((point, fine_unit[whole]))
                if source is self.blocks and self.origin[following][0] is self.leaves and between is not None:
                    after[point, unit] = max(between, after[point, unit])
        sizes = tuple(source.sizes[place] for source, place, _ in self.origin)
        return replace(
            self.blocks,
            units=self.units,
            sizes=sizes,
            lifetimes=Lifetimes(self.units, sizes, self.boundary),
            costs=tuple(source.costs[place] for source, place, _ in self.origin),
            options=tuple(source.options[place] if source.options else () for source, place, _ in self.origin),
            backwards={
                index: source.backwards[place]
                for index, (source, place, _) in enumerate(self.origin)
                if place in source.backwards
            },
            order=tuple(order),
            extra_bytes=extra,
            after_bytes=after,
        )

    def _order(self) -> list[int]:
        """Units of the mixture in the order of backward: the coarse step's, and inside a split unit the fine step's."""
        rank = {unit: place for place, unit in enumerate(self.blocks.order)}
        inner = {unit: place for place, unit in enumerate(self.leaves.order)}
        ranked: list[tuple[int, int, int]] = []
        for index, (source, place, whole) in enumerate(self.origin):
            if source is self.blocks:
                if place in rank:
                    ranked.append((rank[place], 0, index))
            elif whole in rank and place in inner:
                ranked.append((rank[whole], inner[place], index))
        return [index for _, _, index in sorted(ranked)]


# ----------------------------------------------------------------------------------------------------- inter-call saves


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
