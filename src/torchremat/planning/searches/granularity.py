"""Some units split into the calls inside them: a third choice in addition to keep and recompute.

Two watched steps are enough for every mixture. In the coarse one each unit is a region; in the fine one each call
inside a divisible unit is. The tensors that a unit's own code saves between those calls always stay once the unit is
split; see `inter_call_saves`.

    extra(point of a whole unit)       = coarse extra + what the split units before it save in their own code
    extra(point of a call inside)      = fine extra - what the units before it that are not split would save in theirs
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise

from torchremat.planning.profiles.grain import find_units, splittable
from torchremat.planning.profiles.profile_pair import ProfilePair
from torchremat.planning.profiles.reading import Profile
from torchremat.planning.profiles.units import Units
from torchremat.planning.profiles.watching import every_unit
from torchremat.planning.searches.inter_call_saves import inter_call_saves_of
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
        stays: See `mixed`.
    """

    def __init__(self, pairs: Iterable[ProfilePair], *, stays: bool = False) -> None:
        self._stays = stays
        given = [*pairs]
        self._pairs = [aligned(pair, stays=stays) for pair in given]
        self._around = [pair.around for pair in given if pair.around is not None]
        self._known: dict[frozenset[int], list[Profile]] = {}

    def like(self, units: Units) -> list[Profile]:
        """Return the profile in each way that has some units, mixed or around those of the blocks."""
        calls = [unit.calls for unit in units.units]
        if self._around and [unit.calls for unit in self._around[0].units.units] == calls:
            return self._around
        split = split_in(self._pairs[0].blocks.units, units)
        if split not in self._known:
            self._known[split] = [mixed(pair, split, stays=self._stays) for pair in self._pairs]
        return self._known[split]


def split_in(blocks: Units, units: Units) -> frozenset[int]:
    """Return the calls of coarse units that are split in other units of the same step."""
    whole = {call for unit in units.units for call in unit.calls}
    return frozenset(call for unit in blocks.units for call in unit.calls if call not in whole)


def mixed(pair: ProfilePair, split: frozenset[int], *, stays: bool = False) -> Profile:
    """Return the profile in which the units of some calls are split.

    Args:
        pair: The profiles to mix.
        split: Calls among `divisible(pair)` for which `units_of` returns units.
        stays: Whether the profiles are of a split backward, whose graph stays after the input pass.
    """
    pair = aligned(pair, stays=stays) if split else pair
    if not split or pair.leaves is None:
        return pair.blocks
    return _Mixture(pair.blocks, pair.leaves, split, stays=stays).profile()


def aligned(pair: ProfilePair, *, stays: bool = False) -> ProfilePair:
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
