"""The tree for a shape, in milliseconds: trees are searched for at one shape, and judged at another.

A search builds tables, which takes as long as some steps. What it finds depends on the ratios of bytes and costs, and
those change slowly with the shape. So the trees of a ladder of limits are found at the largest shape that was learned,
each when it is first needed; at any other shape the fitted profile says exactly which of them fits, and regions that
the limit leaves room for are dissolved.
"""

from __future__ import annotations

from dataclasses import dataclass

from torchremat.planning.chains import Cost
from torchremat.planning.families import Family
from torchremat.planning.fits import Cover
from torchremat.planning.profiling import Grains
from torchremat.planning.solving import Candidate, Search, Solver
from torchremat.schedules.chain import Tree

# The limits of the ladder: this ratio apart, from the plain step down to the floor.
_RUNG = 0.9
# For so many rungs all mixtures of units are tried, and so many of the best at each are for the others.
_WITH_ALL = 2
_PROMISING = 3
# Trees that are judged to polish one.
_JUDGED = 16


@dataclass(frozen=True, kw_only=True)
class Found:
    """A tree, and the calls whose units it takes apart."""

    split: frozenset[int]
    tree: Tree


class Chooser:
    """Chooses trees for the shapes of a family."""

    def __init__(self, family: Family, cost: Cost) -> None:
        self.family = family
        self.cost_unit: Cost = cost
        self._search: Search | None = None
        self._rungs: dict[int, Found | None] = {}
        self._promising: set[Solver] = set()

    def choose(self, cover: Cover, limit_bytes: int) -> tuple[Candidate, frozenset[int]] | None:
        """Return the cheapest tree found whose peak at a shape is at most the limit, and the calls that it splits.

        Args:
            cover: The shape.
            limit_bytes: Over the bytes at the start of the step; what the prediction may be off by is left free.
        """
        solvers: dict[frozenset[int], Solver] = {}

        def judged(found: Found) -> Candidate:
            if found.split not in solvers:
                solvers[found.split] = Solver(self.family.profile(cover, found.split), self.cost_unit)
            return solvers[found.split].judged(found.tree)

        def fits(one: Candidate) -> bool:
            peak = one.prediction.peak_bytes
            return peak + self.family.spare_bytes(cover, peak) <= limit_bytes

        whole = frozenset[int]()
        plain = Solver(self.family.profile(cover), self.cost_unit).plain
        if fits(plain):
            return plain, whole
        best: tuple[Candidate, frozenset[int]] | None = None
        for rung in self._down_from(plain, limit_bytes):
            found = self.rung(rung)
            if found is None:
                break
            candidate = judged(found)
            if fits(candidate):
                best = candidate, found.split
                break
        if best is None:
            found = self.floor
            candidate = judged(found)
            return (candidate, found.split) if fits(candidate) else None
        candidate, split = best
        spare = self.family.spare_bytes(cover, candidate.prediction.peak_bytes)
        polished = solvers[split].polished(candidate, limit_bytes - spare, most_judged=_JUDGED)
        return (polished if fits(polished) else candidate), split

    def lowest(self, cover: Cover) -> tuple[Candidate, frozenset[int]]:
        """Return the tree that needs least, at a shape."""
        found = self.floor
        return Solver(self.family.profile(cover, found.split), self.cost_unit).judged(found.tree), found.split

    @property
    def search(self) -> Search:
        """The search at the largest shape learned."""
        grains = self.family.largest
        if self._search is None or self._search.grains is not grains:
            self._search = Search(grains, self.cost_unit, operators=False)  # options are of one shape
            self._rungs.clear()
            self._promising.clear()
        return self._search

    @property
    def _solvers(self) -> list[Solver]:
        """Those to ask for a rung: all for the first ones, later those that were good at them."""
        solvers = list(self.search.solvers)
        return solvers if len(self._rungs) < _WITH_ALL else [one for one in solvers if one in self._promising]

    @property
    def floor(self) -> Found:
        """The lowest tree found."""
        return _found(self.search.grains, self.search.floor)

    def _down_from(self, plain: Candidate, limit_bytes: int) -> range:
        """The rungs to try: from a little more than this limit is of the plain step, down to nothing."""
        if limit_bytes <= 0:
            return range(0)
        share, first = limit_bytes / max(1, plain.prediction.peak_bytes), 0
        while _RUNG ** (first + 1) >= share:
            first += 1
        return range(max(0, first - 1), first + 60)

    def rung(self, number: int) -> Found | None:
        """Return the tree of one limit of the ladder; None if it is below the floor."""
        search = self.search
        if number not in self._rungs:
            limit_bytes = int(search.plain.prediction.peak_bytes * _RUNG**number)
            trees = [(one, solver) for solver in self._solvers if (one := solver.unpolished(limit_bytes)) is not None]
            trees.sort(key=lambda pair: (pair[0].cost, pair[0].prediction.peak_bytes))
            if trees and len(self._rungs) < _WITH_ALL:
                self._promising.update(solver for _, solver in trees[:_PROMISING])
            self._rungs[number] = _found(search.grains, trees[0][0]) if trees else None
        return self._rungs[number]


def _found(grains: Grains, candidate: Candidate) -> Found:
    kept = {unit.calls for unit in candidate.profile.units.units}
    split = frozenset(unit.calls[0] for unit in grains.coarse.units.units if unit.calls not in kept)
    return Found(split=split, tree=candidate.tree)
