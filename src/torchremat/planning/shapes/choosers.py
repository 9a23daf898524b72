"""Chooses the tree for a shape, in milliseconds.

Where units have options, only one table is built, and the search runs at the shape itself. Where units are split
instead, many tables are built, which takes as long as some steps. The result depends on the ratios of bytes and costs,
and these change slowly with the shape. So the trees of a ladder of limits are found at the largest learned shape, each
when it is first needed; at any other shape the fitted profile decides exactly which of them fits, and regions are
dissolved where the limit leaves room.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torchremat.planning.plan_options import PlanOptions
from torchremat.planning.profiles.profile_pair import ProfilePair
from torchremat.planning.searches.dividing import Dividing
from torchremat.planning.searches.granularity import divisible, split_in
from torchremat.planning.searches.options import selections_of
from torchremat.planning.searches.search import Search
from torchremat.planning.searches.solver import Solver
from torchremat.planning.searches.trials import judged
from torchremat.planning.shapes.families import Family
from torchremat.planning.shapes.fits import Cover
from torchremat.planning.simulator.prediction import Candidate, rank_of_bytes
from torchremat.schedules.chain import Tree

# The limits of the ladder: this ratio apart, from the plain step down to the floor.
_RUNG = 0.9
# For the first rungs, this many, all mixtures of units are tried; and this many of the best at each for the other
# rungs.
_WITH_ALL = 2
_PROMISING = 3
# Number of trees judged to polish one.
_JUDGED = 16
# A unit with at least this many options is not split as well: that would gain little, and tables are built for each
# shape.
_MANY_OPTIONS = 4


@dataclass(frozen=True, kw_only=True)
class FoundTree:
    """A tree, and the calls whose units it splits."""

    split: frozenset[int]
    tree: Tree


@dataclass(frozen=True, kw_only=True)
class ChosenTree:
    """A tree for a shape, the calls whose units it splits, and whether it fits the limit."""

    candidate: Candidate
    split: frozenset[int] = frozenset()
    fits: bool = True


class Chooser:
    """Chooses trees for the shapes of a family."""

    def __init__(self, family: Family, options: PlanOptions) -> None:
        self.family = family
        self.options = options
        self._search: Search | None = None
        self._searched = 0
        self._rungs: dict[int, FoundTree | None] = {}
        self._promising: set[Solver] = set()

    def choose(self, cover: Cover, limit_bytes: int) -> ChosenTree:
        """Return the cheapest tree found whose peak at a shape is at most the limit, or else the lowest one.

        The limit is over the bytes at the start of the step; the error bound of the prediction is left free.
        """
        if self.takes_gradients:
            return self._of_ladder(cover, limit_bytes)
        found = self._whole(cover, limit_bytes)
        if not self.options.operators or (found.fits and found.candidate.recomputes_once):
            return found
        # Trees with recomputes in parts.
        dividing = Dividing(Solver(self.family.profile(cover), self.options.cost), self.family.profile_in_parts(cover))
        divided = dividing.solve(limit_bytes - self.family.spare_bytes(cover, limit_bytes))
        if divided is not None:
            return found if found.fits and found.candidate.cost <= divided.cost else ChosenTree(candidate=divided)
        if found.fits:
            return found
        lowest = dividing.floor
        if lowest is None or lowest.prediction.peak_bytes >= found.candidate.prediction.peak_bytes:
            return found
        return ChosenTree(candidate=lowest, fits=self._fits(cover, lowest, limit_bytes))

    @property
    def takes_gradients(self) -> bool:
        """Whether the step takes gradients itself: its runs were noted for some trees, and one of them is chosen."""
        return self.family.largest.blocks.runs is not None

    def _of_ladder(self, cover: Cover, limit_bytes: int) -> ChosenTree:
        profile = self.family.profile(cover)
        assert profile.runs is not None
        found = [judged(profile, tree, self.options.cost) for tree in profile.runs.trees]
        fitting = [one for one in found if self._fits(cover, one, limit_bytes)]
        if fitting:
            return ChosenTree(candidate=min(fitting, key=lambda one: one.cost))
        return ChosenTree(candidate=min(found, key=rank_of_bytes), fits=False)

    def _fits(self, cover: Cover, one: Candidate, limit_bytes: int) -> bool:
        peak_bytes = one.prediction.peak_bytes
        return peak_bytes + self.family.spare_bytes(cover, peak_bytes) <= limit_bytes

    def _whole(self, cover: Cover, limit_bytes: int) -> ChosenTree:
        """Return the result of `choose` without recomputes in parts."""
        solvers: dict[frozenset[int], Solver] = {}

        def judged(found: FoundTree) -> Candidate:
            if found.split not in solvers:
                solvers[found.split] = Solver(self.family.profile(cover, found.split), self.options.cost)
            return solvers[found.split].judged(found.tree)

        plain = Solver(self.family.profile(cover), self.options.cost).plain
        if self._fits(cover, plain, limit_bytes):
            return ChosenTree(candidate=plain)
        if not self.takes_apart:
            # The search runs at the shape itself. To be asked has given the profile options.
            solver = Solver(self.family.profile(cover), self.options.cost)
            candidate = solver.solve(limit_bytes - self.family.spare_bytes(cover, limit_bytes)) or solver.floor
            return ChosenTree(candidate=candidate, fits=self._fits(cover, candidate, limit_bytes))
        for number in self._down_from(plain, limit_bytes):
            found = self.rung(number)
            if found is None:
                break
            candidate = judged(found)
            if self._fits(cover, candidate, limit_bytes):
                spare = self.family.spare_bytes(cover, candidate.prediction.peak_bytes)
                polished = solvers[found.split].polished(candidate, limit_bytes - spare, most_judged=_JUDGED)
                fits = self._fits(cover, polished, limit_bytes)
                return ChosenTree(candidate=polished if fits else candidate, split=found.split)
        found = self.floor
        candidate = judged(found)
        return ChosenTree(candidate=candidate, split=found.split, fits=self._fits(cover, candidate, limit_bytes))

    @property
    def takes_apart(self) -> bool:
        """Whether units are split; not if all divisible units have options instead: then one table suffices."""
        if self.takes_gradients:
            return True
        pair = self.search.pair
        own = zip(pair.blocks.units.units, pair.blocks.options, strict=False)
        return not divisible(pair) <= {unit.calls[0] for unit, options in own if len(options) >= _MANY_OPTIONS}

    @property
    def search(self) -> Search:
        """The search at the largest shape learned."""
        if self._search is None or self._searched != self.family.changes:
            pair = self.family.largest
            if self.options.operators:
                # For flops, whatever the cost is: the executor's overhead, which forbids options where steps are short,
                # is weighed at each shape.
                pair = self.family.offer(selections_of(pair.blocks, "flops"), self.options.cost)
            self._search = Search(pair, replace(self.options, operators=False))
            self._searched = self.family.changes
            self._rungs.clear()
            self._promising.clear()
        return self._search

    @property
    def _solvers(self) -> list[Solver]:
        """The solvers to ask for a rung: all for the first rungs, later those that were good at them."""
        solvers = list(self.search.solvers)
        return solvers if len(self._rungs) < _WITH_ALL else [one for one in solvers if one in self._promising]

    @property
    def floor(self) -> FoundTree:
        """The lowest tree found."""
        return _found(self.search.pair, self.search.floor)

    def _down_from(self, plain: Candidate, limit_bytes: int) -> range:
        """The rungs to try: from a little more than this limit as a share of the plain step, down to nothing."""
        if limit_bytes <= 0:
            return range(0)
        share, first = limit_bytes / max(1, plain.prediction.peak_bytes), 0
        while _RUNG ** (first + 1) >= share:
            first += 1
        return range(max(0, first - 1), first + 60)

    def rung(self, number: int) -> FoundTree | None:
        """Return the tree of one limit of the ladder; None if it is below the floor."""
        search = self.search
        if number not in self._rungs:
            limit_bytes = int(search.plain.prediction.peak_bytes * _RUNG**number)
            trees = [(one, solver) for solver in self._solvers if (one := solver.unpolished(limit_bytes)) is not None]
            trees.sort(key=lambda pair: (pair[0].cost, pair[0].prediction.peak_bytes))
            if trees and len(self._rungs) < _WITH_ALL:
                self._promising.update(solver for _, solver in trees[:_PROMISING])
            self._rungs[number] = _found(search.pair, trees[0][0]) if trees else None
        return self._rungs[number]


def _found(pair: ProfilePair, candidate: Candidate) -> FoundTree:
    return FoundTree(split=split_in(pair.blocks.units, candidate.profile.units), tree=candidate.tree)
