"""The search for trees of a step that takes gradients itself: each candidate is a run of the step, so few are tried.

stretches    the units in rows of one, two, three or more, each a region or kept; with coarser and finer units
order        by the bytes that a stretch saves per second of its forward: the first are recomputed first
bisection    how many of them have to be recomputed for a limit
polish       of the fastest two, regions that the limit does not need after all are dissolved
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeAlias, TypeVar

from torchremat.planning.plan_options import PlanOptions
from torchremat.planning.profiles.profile_pair import ProfilePair
from torchremat.planning.profiles.reading import Profile
from torchremat.planning.searches.chains import Cost, amount
from torchremat.planning.searches.search_budget import SearchBudget
from torchremat.planning.simulator.offload_choices import StoreProfile
from torchremat.planning.simulator.prediction import Candidate, predict, rank_of_bytes
from torchremat.schedules.chain import KeepNode, RegionNode, Tree

T = TypeVar("T")

# The lengths of stretches, as far as there are two of them, and of those with regions inside.
_LENGTHS = (1, 2, 3, 4, 6, 8, 12)
_NESTED = (3, 6, 12)

_POLISHED = 2

# The limits of a ladder are this ratio apart.
_RUNG = 0.85


@dataclass(frozen=True, eq=False)
class _RunUnits:
    """The units of a profile in stretches.

    Attributes:
        profile: The profile.
        all: The stretches, in the order of the units.
        is_nested: Whether each unit of a region is a region inside of it.
    """

    profile: Profile
    all: tuple[range, ...]
    is_nested: bool = False

    def tree(self, again: Sequence[int]) -> Tree:
        """Return the tree in which some of the stretches are regions."""
        found: list[RegionNode | KeepNode] = []
        for place, stretch in enumerate(self.all):
            units = tuple(map(KeepNode, stretch))
            inside = tuple([RegionNode((unit,)) for unit in units]) if self.is_nested else units
            found += [RegionNode(inside)] if place in again else units
        return tuple(found)

    def peak_bytes(self, again: Sequence[int]) -> int:
        """Return the peak if some of them are regions: of a run."""
        assert self.profile.runs is not None
        return self.profile.runs.under(self.tree(again)).peak_bytes

    @cached_property
    def order(self) -> list[int]:
        """The stretches in the order in which they are recomputed."""
        return sorted(range(len(self.all)), key=self._gain, reverse=True)

    def _gain(self, place: int) -> float:
        own, stretch = self.profile, self.all[place]
        made = {one for unit in stretch for one in own.sizes[unit].saved - {*own.units.units[unit].inputs}}
        saved_bytes = sum(own.sizes[unit].inside_bytes for unit in stretch)
        saved_bytes += sum(own.units.trace.storage_bytes[one] for one in made)
        return saved_bytes / max(sum(own.costs[unit].seconds for unit in stretch), 1e-9)


class RunSearch:
    """Finds trees under any limit, by runs of the step: a `TreeSearch` for a step that takes gradients itself."""

    # The last percent takes regions in regions, and up to twice the time.
    spare_share = 0.02

    def __init__(self, pair: ProfilePair, options: PlanOptions, *, search_budget: SearchBudget) -> None:
        self.cost_unit: Cost = options.cost
        self.search_budget = search_budget
        self.store_profiles: Sequence[StoreProfile] = ()  # such a plan stores nothing
        self.pair = pair

    @cached_property
    def plain(self) -> Candidate:
        """The tree that keeps everything."""
        return self._judged(self._ways[0], ())

    def solve(self, limit_bytes: int) -> Candidate | None:
        """Return the cheapest tree found whose peak is at most the limit; None if none fits."""
        if self.plain.prediction.peak_bytes <= limit_bytes:
            return self.plain
        self.search_budget.found(None)
        found: list[tuple[Candidate, _RunUnits, list[int]]] = []
        with self.search_budget.running():
            for way in self.search_budget.parts(self._ways):
                self.search_budget.tell("judging")
                if (found and self._is_over) or way.peak_bytes(way.order) > limit_bytes:
                    continue
                again = self._fewest(way, limit_bytes)
                found.append((self._judged(way, again), way, again))
                found.sort(key=lambda one: one[0].cost)
                self.search_budget.found(found[0][0].slowdown)
            polished = [
                self._judged(way, self._polished(way, again, limit_bytes)) for _, way, again in found[:_POLISHED]
            ]
        return min(polished, key=lambda one: (one.cost, one.prediction.peak_bytes), default=None)

    @cached_property
    def floor(self) -> Candidate:
        """The tree with the lowest peak that was found."""
        with self.search_budget.running():
            lowest = self._ways[0]
            for way in self.search_budget.parts(self._ways):
                if not self._is_over:
                    lowest = min(lowest, way, key=lambda one: one.peak_bytes(one.order))
        return min(self.plain, self._judged(lowest, lowest.order), key=rank_of_bytes)

    @property
    def _is_over(self) -> bool:
        """Whether no time is left in some process: all of them stop at the same run."""
        return any(self._everywhere(lambda: self.search_budget.is_over))

    def _everywhere(self, work: Callable[[], T]) -> list[T]:
        runs = self.pair.blocks.runs
        assert runs is not None and runs.runner is not None
        return runs.runner.everywhere(work)

    @cached_property
    def _ways(self) -> list[_RunUnits]:
        found: list[_RunUnits] = []
        for own in self.pair.all:
            rows = own.units.rows
            for length in _LENGTHS:
                parts = [row[at : at + length] for row in rows for at in range(0, len(row), length)]
                if length == 1 or len(parts) > len(rows):
                    found.append(_RunUnits(own, tuple(parts)))
                    found += [_RunUnits(own, tuple(parts), is_nested=True)] if length in _NESTED else []
        return found

    def _fewest(self, way: _RunUnits, limit_bytes: int) -> list[int]:
        """Return the first stretches that suffice for a limit that all of them suffice for."""
        least, most = 0, len(way.order)  # so many do not suffice, and so many do
        while most - least > 1 and not self._is_over:
            middle = (least + most) // 2
            fits = way.peak_bytes(way.order[:middle]) <= limit_bytes
            least, most = (least, middle) if fits else (middle, most)
        return way.order[:most]

    def _polished(self, way: _RunUnits, again: list[int], limit_bytes: int) -> list[int]:
        """Return those of some stretches that are needed for a limit."""
        for place in reversed(again):
            if self._is_over:
                break
            self.search_budget.tell("polishing")
            fewer = [one for one in again if one != place]
            if way.peak_bytes(fewer) <= limit_bytes:
                again = fewer
        return again

    def _judged(self, way: _RunUnits, again: Sequence[int]) -> Candidate:
        found = judged(way.profile, way.tree(again), self.cost_unit)
        # Processes with other batches have other flops, and what differs must not decide which trees they run.
        return replace(found, cost=max(self._everywhere(lambda: found.cost)))


def judged(profile: Profile, tree: Tree, cost_unit: Cost) -> Candidate:
    """Return a tree of a step that takes gradients itself, with what its run has shown."""
    prediction = predict(profile, tree)
    return Candidate(profile=profile, tree=tree, prediction=prediction, cost=amount(profile, cost_unit, prediction))


Ladder: TypeAlias = tuple[tuple[str, ...], tuple[Tree, ...]]
"""Trees for limits from that of the plain step down to the floor, and the names of the units that they are over."""


def ladder_of(profile: Profile) -> Ladder:
    """Return the ladder that the runs of a profile were noted for."""
    assert profile.runs is not None
    return tuple(unit.name for unit in profile.units.units), profile.runs.trees


def with_ladder(pair: ProfilePair, options: PlanOptions, known: Sequence[Ladder]) -> ProfilePair:
    """Return the profile of a step that takes gradients itself with figures, what it needs under the trees of a ladder.

    Of any other step the profile is returned as it is.

    Args:
        pair: The profile, which can run the step.
        options: How the ladder is searched for.
        known: Ladders of the same step at other sizes; one over the same units is taken, so that figures can be fitted.
    """
    if pair.blocks.runs is None:
        return pair
    found = dict(known)
    for own in pair.all:
        trees = found.get(tuple(unit.name for unit in own.units.units))
        if trees is not None:
            break
    else:
        own, trees = _ladder(pair, options)
    assert own.runs is not None
    return ProfilePair(blocks=replace(own, runs=own.runs.noted(trees)), leaves=None)


def _ladder(pair: ProfilePair, options: PlanOptions) -> tuple[Profile, list[Tree]]:
    search_budget = SearchBudget()
    with search_budget.running():
        floor = RunSearch(pair, options, search_budget=search_budget).floor
        own = ProfilePair(blocks=floor.profile, leaves=None)
        search = RunSearch(own, options, search_budget=search_budget)
        limit_bytes, trees = search.plain.prediction.peak_bytes, list[Tree]()
        while (limit_bytes := int(_RUNG * limit_bytes)) > floor.prediction.peak_bytes:
            if (found := search.solve(limit_bytes)) is not None:
                trees.append(found.tree)
        return floor.profile, [*trees, floor.tree]
