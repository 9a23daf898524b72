"""The best tree for a profile and a limit: candidates from the solvers, judged by the exact interpreter.

    candidates    the optimal persistent schedules for a range of limits (one table has them all), the uniform trees,
                  and of a short chain all placements by hand
    judge         `predict`: exact bytes by storage, the executor's own cost
    polish        regions of the best tree are dissolved as long as the limit allows

The chain's scalars err to both sides, so the solver's limit is itself searched for: the highest whose tree fits.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import cast

import numpy as np

from torchremat.planning.profiles.reading import Profile
from torchremat.planning.roots import fitted
from torchremat.planning.searches.chains import ChainTables, Cost, amount, chain_of
from torchremat.planning.searches.loops import FoundLoop, are_long, expanded, loops_in, stages_of
from torchremat.planning.searches.loosening import PeakBounds, loosened
from torchremat.planning.searches.placements import Placements
from torchremat.planning.searches.search_budget import JUDGED_UNITS, SearchBudget
from torchremat.planning.simulator.prediction import Candidate, predict_within, rank_of_bytes
from torchremat.schedules.chain import Chain, KeepNode, Tree, bounded, kept, rebuilt, uniform_trees
from torchremat.schedules.persistent import Persistent

# The reported share before the polish of a tree, which takes about as long.
_JUDGING_SHARE = 0.5

# A chain of n stages has 3 n - 1 uniform trees. Of a longer chain only those with numbers up to the second are judged:
# few segments, and short strides.
_MOST_STAGES = 40
_MOST_SIMPLE = 12

# The first ones, which recompute nothing, and everything, are judged in any case. The chain's scalars may say that no
# tree fits anywhere; with these two a lowest tree always exists.
_ALWAYS = 2


class Solver:
    """Finds trees for one profile, under any limit; limits and peaks are bytes over those at the start of the step.

    Args:
        profile: The profile.
        cost: What to minimise.
        hand_made: Whether all trees as people write them by hand are tried: uniform ones, and placements. They gain
            nothing in mixtures except the finest, where a block is several stretches, each alike.
        over_steps: Whether stages are steps of loops, if there are any; those of a long chain are in any case.
        beside: A solver for the profile with other options: what a tree without any needs is the same there.
        search_budget: The time limit.
    """

    def __init__(
        self,
        profile: Profile,
        cost: Cost,
        *,
        hand_made: bool = True,
        over_steps: bool = False,
        beside: Solver | None = None,
        search_budget: SearchBudget | None = None,
    ) -> None:
        self.profile = profile
        self.cost_unit: Cost = cost
        self.hand_made = hand_made
        self.over_steps = over_steps
        self.search_budget = SearchBudget() if search_budget is None else search_budget
        self._beside = beside
        self._known = _Judged()
        self._shared: _Judged = _Judged() if beside is None else beside._shared
        self._judgements = 0
        self._peaks: dict[Persistent, dict[int, int]] = {}  # by level of a table: the exact peaks of its judged trees

    @cached_property
    def loops(self) -> tuple[FoundLoop, ...]:
        """The loops whose steps are stages of the chain."""
        units, found = self.profile.units, loops_in(self.profile.units)
        return found if self.over_steps or are_long(units, found) else ()

    @cached_property
    def chain(self) -> Chain:
        """The profile as scalars."""
        return chain_of(self.profile, self.cost_unit, self.loops)

    @cached_property
    def stages(self) -> tuple[range, ...]:
        """The units of each stage of the chain."""
        return stages_of(self.profile.units, self.loops)

    @cached_property
    def option_costs(self) -> list[list[float]]:
        """The cost of each unit under each of its options, including that of keeping everything."""
        profile, cost = self.profile, self.cost_unit
        known = profile.options or [()] * len(profile.sizes)
        return [[0.0, *(amount(profile, cost, one) for one in own)] for own in known]

    @cached_property
    def plain(self) -> Candidate:
        """The tree that keeps everything."""
        return self.judged(tuple(KeepNode(unit) for unit in range(len(self.profile.units.units))))

    @cached_property
    def tables(self) -> ChainTables:
        """The optimal persistent schedules of the chain."""
        return self._tables_of(self.chain)

    def _lowest_table(self) -> Persistent:
        """Return the schedules for the lowest limits of a chain in which no clock has a say.

        Its costs are flops, and its options those that were chosen for their bytes alone.
        """
        known = zip(self.profile.options, self._for_bytes, strict=True)
        options = tuple(tuple(own[number - 1] for number in numbers) for own, numbers in known)
        return self._tables_of(chain_of(replace(self.profile, options=options), "flops", self.loops)).lowest

    @cached_property
    def _for_bytes(self) -> list[list[int]]:
        """The numbers of the options of each unit that were chosen for their bytes alone."""
        return [[n for n, one in enumerate(own, 1) if one.is_lowest or one.cuts] for own in self.profile.options]

    def _tables_of(self, chain: Chain) -> ChainTables:
        return ChainTables(chain, max(1, int(1.1 * self.plain.prediction.peak_bytes)), self.search_budget)

    @property
    def most_judged(self) -> int:
        """How many trees may be judged for polish; a third of that for the floor."""
        return max(12, JUDGED_UNITS // len(self.profile.units.units))

    @property
    def uniform(self) -> Iterator[Tree]:
        """The uniform trees: all of them for few stages, those with small numbers for many."""
        # Judging a long loop takes long, and of equal steps the tables have most of these trees too.
        stages = len(self.chain.stages)
        trees = uniform_trees(stages, most=_MOST_SIMPLE if stages > _MOST_STAGES or self.loops else None)
        for number, tree in enumerate(trees if self.hand_made else trees[:_ALWAYS]):
            if number < _ALWAYS or not self.search_budget.is_over:
                self.search_budget.tell("judging")
                yield expanded(tree, self.stages)

    @cached_property
    def placements(self) -> Placements | None:
        """All placements by hand, if the chain is short and they are tried."""
        if self._beside is not None:
            return self._beside.placements
        if not self.hand_made or self.loops or not self._is_local:
            return None
        return Placements(
            self.profile,
            self.plain,
            self.judged,
            self.judged_within,
            most_judged=self.most_judged,
            search_budget=self.search_budget,
        )

    @property
    def _is_local(self) -> bool:
        """Whether a change of one call changes no other: else the other calls of its root change as well."""
        return len(self.profile.units.roots) == 1 and not self.profile.units.trace.sharded

    def judged(self, tree: Tree) -> Candidate:
        """Return a tree with its prediction, adapted so that it can run and suits the roots."""
        return cast("Candidate", self.judged_within(tree, sys.maxsize))

    def judged_within(self, tree: Tree, limit_bytes: int) -> Candidate | None:
        """Return the same if its peak is at most a limit: far above it, a judgement takes a part of the time."""
        tree = fitted(self.profile.units, bounded(tree))  # See NOTE [ How deep regions may nest ]
        known = self._known if any(keep.option for keep in kept(tree)) else self._shared
        found = known.candidates.get(tree)
        if found is None and limit_bytes > known.above.get(tree, -1):
            self._judgements += 1
            prediction = predict_within(self.profile, tree, limit_bytes)
            if prediction is None:
                known.above[tree] = limit_bytes
                return None
            cost = amount(self.profile, self.cost_unit, prediction)
            found = Candidate(profile=self.profile, tree=tree, prediction=prediction, cost=cost)
            known.candidates[tree] = found
        return found if found is not None and found.prediction.peak_bytes <= limit_bytes else None

    def scheduled(self, table: Persistent, slots: int) -> Candidate:
        """Return the tree of a table for a number of slots, with its prediction."""
        return self.judged(expanded(table.tree_at(slots), self.stages))

    def solve(self, limit_bytes: int) -> Candidate | None:
        """Return the cheapest tree found whose predicted peak is at most the limit; None if none fits, see `floor`."""
        found = self.unpolished(limit_bytes)
        return None if found is None else self.polished(found, limit_bytes)

    def unpolished(self, limit_bytes: int) -> Candidate | None:
        """Return the candidate that `solve` polishes."""
        if self.plain.prediction.peak_bytes <= limit_bytes:
            return self.plain
        found = [one for one in self.persistent(limit_bytes) if one.prediction.peak_bytes <= limit_bytes]
        found += self._fitting(self.uniform, limit_bytes)
        if self.placements is not None and (placed := self.placements.cheapest(limit_bytes)) is not None:
            found.append(placed)
        return min(found, key=lambda one: (one.cost, one.prediction.peak_bytes), default=None)

    def _fitting(self, trees: Iterable[Tree], limit_bytes: int) -> list[Candidate]:
        """Return those of some trees whose predicted peak is at most a limit."""
        return [one for tree in trees if (one := self.judged_within(tree, limit_bytes)) is not None]

    def persistent(self, limit_bytes: int) -> Iterator[Candidate]:
        """Yield optimal trees of the chain, closing in on the cheapest whose exact peak fits.

        Results for earlier limits are reused.
        """
        table = self.tables.within(limit_bytes)
        levels, peaks = table.levels, self._peaks.setdefault(table, {})
        fits = max((one for one, peak in peaks.items() if peak <= limit_bytes), default=-1)
        above = min((one for one, peak in peaks.items() if peak > limit_bytes and one > fits), default=len(levels))
        if fits >= 0:
            yield self.scheduled(table, int(levels[fits]))
        # Begin at the limit by the chain's own scalars: mostly the answer is there or nearby.
        slots = limit_bytes // table.slot_bytes
        asked, reach = int(np.searchsorted(levels, slots, side="right")) - 1, 1
        while above - fits > 1 and not self.search_budget.is_over:
            self.search_budget.tell("judging")
            asked = min(max(asked, fits + 1), above - 1)
            one = self.scheduled(table, int(levels[asked]))
            peaks[asked] = one.prediction.peak_bytes
            yield one
            if peaks[asked] <= limit_bytes:
                fits = asked
                asked = min(asked + reach, (asked + above) // 2)
            else:
                above = asked
                asked = max(asked - reach, (fits + asked) // 2)
            reach *= 4

    def polished(self, best: Candidate, limit_bytes: int, *, most_judged: int | None = None) -> Candidate:
        """Return a tree with regions dissolved, or shortened at their ends, where the limit allows; one pass."""
        units = len(self.profile.units.units)
        if best.prediction.calls > 20 * units:
            return best  # nested so deeply that the limit leaves no room
        place, judged, most = 0, self._judgements, self.most_judged if most_judged is None else most_judged
        peak_bounds = PeakBounds(self.profile, best.tree)
        is_local = self._is_local
        while place < len(best.tree) and self._judgements - judged < most and not self.search_budget.is_over:
            self.search_budget.tell("polishing", _JUDGING_SHARE + (1 - _JUDGING_SHARE) * place / len(best.tree))
            before, after = best.tree[:place], best.tree[place + 1 :]
            looser = [
                (*before, *nodes, *after)
                for nodes in loosened(best.tree[place], self.option_costs)
                if not is_local or peak_bounds.least_bytes(place, nodes) <= limit_bytes
            ]
            fitting = [one for one in self._fitting(looser, limit_bytes) if one.cost < best.cost]
            if fitting:
                best = min(fitting, key=lambda one: one.cost)
                peak_bounds = PeakBounds(self.profile, best.tree)
            else:
                place += 1
        return best

    @cached_property
    def floor(self) -> Candidate:
        """The tree with the lowest predicted peak that was found."""
        return cast("Candidate", self.lowest_within(sys.maxsize))

    def lowest_within(self, limit_bytes: int) -> Candidate | None:
        """Return the tree with the lowest predicted peak that was found, if that is at most a limit."""
        found = self.lowest(self._trees_of_low_peaks(), limit_bytes)
        if self.placements is not None:
            placed = self.placements.lowest_within(found[0].prediction.peak_bytes if found else limit_bytes)
            found += [] if placed is None else [placed]
        return min(found, key=rank_of_bytes, default=None)

    def lowest(self, trees: Iterable[Tree], limit_bytes: int = sys.maxsize, *, count: int = 1) -> list[Candidate]:
        """Return those of some trees with the lowest predicted peaks, the lowest first; none above a limit."""
        found: list[Candidate] = []
        for tree in trees:
            one = self.judged_within(tree, limit_bytes)
            if one is not None and all(one is not other for other in found):
                found = sorted([*found, one], key=rank_of_bytes)[:count]
                limit_bytes = found[-1].prediction.peak_bytes if len(found) == count else limit_bytes
        return found

    def _trees_of_low_peaks(self) -> Iterator[Tree]:
        """Yield the trees of the lowest limits that there are some for, and the uniform ones."""

        def numbered(keep: KeepNode) -> Iterator[KeepNode]:
            """Yield the same with the number that its option has among all of its unit."""
            yield replace(keep, option=self._for_bytes[keep.stage][keep.option - 1]) if keep.option else keep

        table = self._lowest_table()
        lowest, most = table.lowest_slots, table.most_slots
        steps = min(16, self.most_judged // 3)
        for asked in self.search_budget.parts(
            sorted({min(most, lowest + lowest * i // (2 * steps)) for i in range(steps)})
        ):
            self.search_budget.tell("judging")
            if asked >= lowest and not self.search_budget.is_over:
                yield rebuilt(expanded(table.tree_at(asked), self.stages), stage=numbered)
        yield from self.uniform


@dataclass(frozen=True, eq=False)
class _Judged:
    """Trees with their predictions, and trees with peaks above a limit."""

    candidates: dict[Tree, Candidate] = field(default_factory=dict[Tree, Candidate])
    above: dict[Tree, int] = field(default_factory=dict[Tree, int])
