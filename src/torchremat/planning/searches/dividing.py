"""Finds trees in which units are recomputed in parts, where nothing else fits a limit.

The trees are those of a solver that knows a unit in parts as one of its options, and the uniform ones. A part costs
another forward, so these have no more of them than their limit asks for: at each program point above the limit the unit
there is recomputed in more parts, until none is above it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from itertools import product

from torchremat.planning.profiles.reading import Profile
from torchremat.planning.roots import fitted, same_calls
from torchremat.planning.searches.cuts import cut_options, with_cuts
from torchremat.planning.searches.loops import MOST_FINE
from torchremat.planning.searches.solver import Solver
from torchremat.planning.simulator.points import Live, ProgramPoint
from torchremat.planning.simulator.prediction import Candidate, live_bytes, over_bytes, rank_of_bytes, walk_of
from torchremat.schedules.chain import KeepNode, RegionNode, Tree, bounded, kept, rebuilt

# How many of the lowest trees of a solver are divided for the lowest peak.
_LOWEST = 4

_OF_UNITS = (ProgramPoint.RECOMPUTE, ProgramPoint.BACKWARD)


class Dividing:
    """Finds trees with recomputes in parts.

    Args:
        base: The solver whose trees are divided.
        profile: Its profile with options for that, see `cut_options`; None to find them when they are needed.
    """

    def __init__(self, base: Solver, profile: Profile | None = None) -> None:
        self._base = base
        if profile is not None:
            self.profile = profile
        self._search_budget = base.search_budget

    @cached_property
    def _numbers(self) -> dict[int, list[int]]:
        """By unit that can be recomputed in parts, the numbers of its options for that, with rising numbers of cuts."""
        found = ([number for number, one in enumerate(own, 1) if one.cuts] for own in self.profile.options)
        return {unit: numbers for unit, numbers in enumerate(found) if numbers}

    @cached_property
    def profile(self) -> Profile:
        """The profile whose units have options for that."""
        (cuts,) = cut_options([self._base.profile], self._search_budget)
        return with_cuts(self._base.profile, cuts)

    @cached_property
    def _solver(self) -> Solver:
        """Judges trees with these options."""
        return Solver(self.profile, self._base.cost_unit, beside=self._base, search_budget=self._search_budget)

    def solve(self, limit_bytes: int) -> Candidate | None:
        """Return the cheapest tree found whose predicted peak is at most the limit; None if none fits."""
        if not self._numbers:
            return None
        found = [*self._solver.persistent(limit_bytes), *self._uniform(limit_bytes)]
        fitting = [one for one in found if one.prediction.peak_bytes <= limit_bytes]
        best = min(fitting, key=lambda one: (one.cost, one.prediction.peak_bytes), default=None)
        return None if best is None else self._solver.polished(best, limit_bytes)

    def _uniform(self, limit_bytes: int) -> Iterator[Candidate]:
        for tree in self._search_budget.parts([*self._base.uniform]):
            divided = self._divided(tree, limit_bytes)
            if divided is not None:
                yield divided

    @cached_property
    def floor(self) -> Candidate | None:
        """The tree with the lowest predicted peak that was found, if there is any with parts."""
        if not self._numbers:
            return None
        uniform = self._base.lowest(self._base.uniform, count=_LOWEST)
        finest = {unit: numbers[-1] for unit, numbers in self._numbers.items()}
        trees = [self._base.floor.tree, *(one.tree for one in uniform)]
        found = [self._solver.judged(with_parts(tree, finest)) for tree in trees]
        if len(self._base.chain.stages) <= MOST_FINE:
            found.append(self._solver.floor)
        return min(found, key=rank_of_bytes)

    def finer(self, trees: Iterable[Tree]) -> Iterator[Candidate]:
        """Yield trees with all units that they recompute in two parts, then in three, and so on."""
        most = max(map(len, self._numbers.values()), default=0)
        for tree, count in product(trees, range(most)):
            inside = {keep.stage for node in tree if isinstance(node, RegionNode) for keep in kept((node,))}
            numbers = {unit: own[: count + 1][-1] for unit, own in self._numbers.items() if unit in inside}
            yield self._solver.judged(with_parts(tree, numbers))

    def _divided(self, tree: Tree, limit_bytes: int) -> Candidate | None:
        """Return the tree with as many recomputes in parts as it takes to fit a limit; None if it never does."""
        units, left = self._base.profile.units, {unit: iter(own) for unit, own in self._numbers.items()}
        numbers = dict[int, int]()
        divided = tree = fitted(units, bounded(tree))
        while above := self._above(divided, limit_bytes):
            alike = {call for calls in same_calls(units) if not above.isdisjoint(calls) for call in calls}
            more = {unit: number for unit in alike & left.keys() if (number := next(left[unit], None))}
            if not more:
                return None
            numbers |= more
            divided = fitted(units, with_parts(tree, numbers))
        return None if above is None else self._solver.judged(divided)

    def _above(self, tree: Tree, limit_bytes: int) -> set[int] | None:
        """Return the units at the program points above a limit; None if no part of a recompute lowers one of these."""
        found, profile = set[int](), self.profile
        for state in walk_of(profile, tree):
            if isinstance(state, Live) and live_bytes(profile, state) + over_bytes(profile, state) > limit_bytes:
                if state.key[0] not in _OF_UNITS:
                    return None
                found.update(unit for unit in (state.key[1], state.unit) if unit >= 0)
        return found


def with_parts(tree: Tree, numbers: Mapping[int, int]) -> Tree:
    """Return the tree in which some units are recomputed by these options, by unit."""

    def parted(inside: Tree) -> Tree:
        first = inside[0]
        is_alone = len(inside) == 1 and isinstance(first, KeepNode) and first.stage in numbers
        return inside if is_alone else (RegionNode(inside),)

    return rebuilt(
        tree,
        stage=lambda keep: (KeepNode(keep.stage, numbers.get(keep.stage, keep.option)),),
        region=lambda _, inside: parted(inside),
    )
