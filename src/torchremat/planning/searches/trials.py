"""The search for trees of a step that takes gradients itself: each candidate is a run of the step, so few are tried.

    order      units by the bytes that they save per second of their forward: the first are recomputed first
    smallest   how many of them have to be recomputed for a limit, by bisection
    polish     regions that the limit does not need after all are dissolved, the dearest first
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property, partial

from torchremat.planning.plan_options import PlanOptions
from torchremat.planning.profiles.profiling import ProfilePair
from torchremat.planning.profiles.reading import Profile
from torchremat.planning.searches.chains import Cost, amount
from torchremat.planning.searches.search_budget import SearchBudget
from torchremat.planning.simulator.offload_choices import StoreProfile
from torchremat.planning.simulator.prediction import Candidate, predict, rank_of_bytes
from torchremat.schedules.chain import KeepNode, RegionNode, Tree


class RunSearch:
    """Finds trees under any limit, by runs of the step. As `Search`, for a step that takes gradients itself.

    Attributes:
        cost_unit: What is minimised.
        search_budget: The time limit.
        store_profiles: None: with stores such a step is not planned.
        pair: The profiles.
    """

    def __init__(self, pair: ProfilePair, options: PlanOptions, *, search_budget: SearchBudget) -> None:
        self.cost_unit: Cost = options.cost
        self.search_budget = search_budget
        self.store_profiles: Sequence[StoreProfile] = ()
        self.pair = pair

    @cached_property
    def plain(self) -> Candidate:
        """The tree that keeps everything."""
        return self._judged(self.pair.blocks, ())

    def solve(self, limit_bytes: int) -> Candidate | None:
        """Return the cheapest tree found whose peak is at most the limit; None if none fits."""
        if self.plain.prediction.peak_bytes <= limit_bytes:
            return self.plain
        self.search_budget.found(None)
        found: list[Candidate] = []
        with self.search_budget.running():
            for own in self.search_budget.parts(self.pair.all):
                if not (found and self.search_budget.is_over):
                    found += self._solved(own, limit_bytes)
                if found:
                    self.search_budget.found(min(one.slowdown for one in found))
        return min(found, key=lambda one: (one.cost, one.prediction.peak_bytes), default=None)

    @cached_property
    def floor(self) -> Candidate:
        """The tree with the lowest peak that was found."""
        with self.search_budget.running():
            whole = [self._judged(own, range(len(own.units.units))) for own in self.pair.all]
        return min([self.plain, *whole], key=rank_of_bytes)

    def _solved(self, own: Profile, limit_bytes: int) -> Iterator[Candidate]:
        """Yield the cheapest tree over some units that fits, if one does."""
        order = sorted(range(len(own.units.units)), key=partial(_gain, own), reverse=True)
        least, most = 0, len(order)  # so many do not suffice, and so many do
        if not self._fits(own, order, limit_bytes):
            return
        while most - least > 1 and not self.search_budget.is_over:
            self.search_budget.tell("judging")
            middle = (least + most) // 2
            least, most = (least, middle) if self._fits(own, order[:middle], limit_bytes) else (middle, most)
        again = order[:most]
        for unit in reversed(order[:most]):
            if self.search_budget.is_over:
                break
            self.search_budget.tell("polishing")
            fewer = [one for one in again if one != unit]
            again = fewer if self._fits(own, fewer, limit_bytes) else again
        yield self._judged(own, again)

    def _fits(self, own: Profile, again: Sequence[int], limit_bytes: int) -> bool:
        assert own.runs is not None
        return own.runs.under(_tree(own, again)).peak_bytes <= limit_bytes

    def _judged(self, own: Profile, again: Sequence[int]) -> Candidate:
        tree = _tree(own, again)
        prediction = predict(own, tree)
        return Candidate(
            profile=own, tree=tree, prediction=prediction, cost=amount(own, self.cost_unit, prediction)
        )


def _tree(own: Profile, again: Sequence[int]) -> Tree:
    """Return the tree in which some units are regions."""
    units = range(len(own.units.units))
    return tuple(RegionNode((KeepNode(unit),)) if unit in again else KeepNode(unit) for unit in units)


def _gain(own: Profile, unit: int) -> float:
    return own.sizes[unit].inside_bytes / max(own.costs[unit].seconds, 1e-9)
