"""Units taken apart into the calls that they make, some of them: a third choice beside keep and recompute.

Two watched steps are enough for every mixture. In the coarse one each unit is a region; in the fine one each call
inside of the units that can be split is. What a unit's own code between those calls saves is no choice once the unit
is split; see `glue`.

    extra(moment of a whole unit)      = coarse extra + what the split units before it save in their own code
    extra(moment of a call inside)     = fine extra - what the units before it that are not split would save in theirs
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from torchremat.planning.profiles.grain import find_units, splittable
from torchremat.planning.profiles.profiling import Grains
from torchremat.planning.profiles.reading import Profile
from torchremat.planning.profiles.units import Units
from torchremat.planning.profiles.watching import every_unit
from torchremat.planning.searches.glue import glue_of
from torchremat.planning.walks.memory import Walk
from torchremat.planning.walks.moments import Key, Lifetimes, Live, Moment
from torchremat.planning.walks.parts import PartsWalk

_BACKWARD_MOMENTS = (Moment.RECOMPUTE, Moment.BACKWARD, Moment.RELEASED)
_UNIT_MOMENTS = (Moment.FORWARD, Moment.LEFT, *_BACKWARD_MOMENTS)


def divisible(grains: Grains) -> frozenset[int]:
    """Return the calls of coarse units that can be split: those of which the fine profile has all parts."""
    if grains.fine is None:
        return frozenset()
    trace = grains.coarse.units.trace
    parts = [set(unit.calls) for unit in grains.fine.units.units]
    result: set[int] = set()
    for call in splittable(grains.coarse.units):
        inside = set(trace.descendants(call))
        touching = [part for part in parts if part & inside]
        if touching and {call} not in touching and all(part <= inside for part in touching):
            result.add(call)
    calls = trace.calls
    whole = {calls[call].name for unit in grains.coarse.units.units for call in unit.calls if call not in result}
    return frozenset(call for call in result if calls[call].name not in whole)


def units_of(grains: Grains, split: frozenset[int]) -> Units | None:
    """Return the units that there are if some calls are split; None if the profiles have not seen all of them.

    Args:
        grains: The profiles.
        split: Calls among `divisible(grains)`.
    """
    seen = {unit.calls for profile in (grains.coarse, grains.fine) if profile for unit in profile.units.units}
    units = _units(grains.coarse, split)
    return units if all(unit.calls in seen for unit in units.units) else None


def _units(coarse: Profile, split: frozenset[int]) -> Units:
    return find_units(coarse.units.trace, split, coarse.units.unlike, coarse.units.grain)


def mixed(grains: Grains, split: frozenset[int], *, stays: bool = False) -> Profile:
    """Return the profile in which the units of some calls are split.

    Args:
        grains: The profiles that it is made of.
        split: Calls among `divisible(grains)` of which `units_of` has the units.
        stays: Whether they are of a backward in two parts, in whose first one the graph stays.
    """
    grains = aligned(grains, stays=stays) if split else grains
    if not split or grains.fine is None:
        return grains.coarse
    return _Mixture(grains.coarse, grains.fine, split, stays=stays).profile()


def aligned(grains: Grains, *, stays: bool = False) -> Grains:
    """Return grains of which any number of mixtures can be made without making the same beginning for each."""
    if grains.fine is None:
        return grains
    # What is a boundary storage in one of the two has to be one in both, and in the mixture: else a variable that
    # is alive for a while, or what a unit's own code saves, would count beside the plan here and in it there.
    boundary = grains.coarse.lifetimes.boundary | grains.fine.lifetimes.boundary
    kind = PartsWalk if stays else Walk
    return Grains(
        coarse=_with_boundary(grains.coarse, boundary, kind), fine=_with_boundary(grains.fine, boundary, kind)
    )


def _with_boundary(profile: Profile, boundary: set[int], kind: type[Walk]) -> Profile:
    """Return the profile with more boundary storages, which are then no longer in what is live beside the plan."""
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
    def __init__(self, coarse: Profile, fine: Profile, split: frozenset[int], *, stays: bool) -> None:
        self.stays = stays
        self.boundary = coarse.lifetimes.boundary
        self.coarse = coarse
        self.fine = fine
        self.units = _units(coarse, split)
        self.coarse_index = {unit.calls: index for index, unit in enumerate(coarse.units.units)}
        self.fine_index = {unit.calls: index for index, unit in enumerate(fine.units.units)}
        trace = coarse.units.trace
        inside = {inner: call for call in split for inner in trace.descendants(call)}
        # For each unit of the mixture: its profile, its index there, and the coarse unit that it is or lies in.
        self.origin: list[tuple[Profile, int, int]] = []
        for unit in self.units.units:
            whole = inside.get(unit.calls[0])
            if whole is None:
                place = self.coarse_index[unit.calls]
                self.origin.append((coarse, place, place))
            else:
                self.origin.append((fine, self.fine_index[unit.calls], self.coarse_index[whole,]))
        self.split = {self.coarse_index[call,] for call in split}
        # For each coarse unit the first and the last unit of the fine profile that it is or contains.
        within = [self._fine_units(unit.calls) for unit in coarse.units.units]
        self.first = [inside[0] for inside in within]
        self.last = [inside[-1] for inside in within]
        self.glue = glue_of(coarse, fine, list(zip(self.first, self.last, strict=True)))
        self.counted = self.glue.counted(self.split)

    def _fine_units(self, calls: tuple[int, ...]) -> list[int]:
        trace = self.coarse.units.trace
        inside = {inner for call in calls for inner in trace.descendants(call)}
        return [i for i, unit in enumerate(self.fine.units.units) if unit.calls[0] in inside]

    def _saved_before(self, unit: int, *, whole: bool) -> int:
        """What own code has saved when a coarse unit begins, over what the profile of its moments says."""
        within = sum(size for i, size in enumerate(self.glue.within[:unit]) if (i in self.split) is whole)
        counted = sum(self.counted[: unit + 1])
        return within + counted if whole else counted - sum(self.glue.between[: unit + 1]) - within

    def profile(self) -> Profile:
        extra: dict[Key, int] = {}
        after: dict[Key, int] = {}
        for index, (source, place, whole) in enumerate(self.origin):
            for moment in _UNIT_MOMENTS:
                until = len(self.glue.within) if self.stays and moment in _BACKWARD_MOMENTS else whole
                beside = self._saved_before(until, whole=source is self.coarse)
                if (moment, place) in source.extra_bytes:
                    extra[moment, index] = source.extra_bytes[moment, place] + beside
                    after[moment, index] = source.after_bytes[moment, place]
        order = self._order()
        extra[Moment.END, 0] = self.coarse.extra_bytes[Moment.END, 0] + self._saved_before(
            len(self.glue.within), whole=True
        )
        after[Moment.END, 0] = self.origin[order[0] if order else 0][0].after_bytes[Moment.END, 0]
        # What runs between two units belongs to a split one if either is: its own code before and after the calls
        # inside.
        for moment, fine_unit, neighbours in (
            (Moment.LEFT, self.last, pairwise(range(len(self.origin)))),
            (Moment.RELEASED, self.first, pairwise(order)),
        ):
            for unit, following in neighbours:
                source, _, whole = self.origin[unit]
                between = self.fine.after_bytes.get((moment, fine_unit[whole]))
                if source is self.coarse and self.origin[following][0] is self.fine and between is not None:
                    after[moment, unit] = max(between, after[moment, unit])
        sizes = tuple(source.sizes[place] for source, place, _ in self.origin)
        return replace(
            self.coarse,
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
        """Units of the mixture in the order of backward: the coarse step's, inside a split unit the fine one's."""
        rank = {unit: place for place, unit in enumerate(self.coarse.order)}
        inner = {unit: place for place, unit in enumerate(self.fine.order)}
        ranked: list[tuple[int, int, int]] = []
        for index, (source, place, whole) in enumerate(self.origin):
            if source is self.coarse:
                if place in rank:
                    ranked.append((rank[place], 0, index))
            elif whole in rank and place in inner:
                ranked.append((rank[whole], inner[place], index))
        return [index for _, _, index in sorted(ranked)]
