"""The best tree for a profile and a limit: candidates from the solvers, judged by the exact interpreter.

    candidates    the optimal persistent schedules for a range of limits (one table has them all), the uniform trees
    judge         `predict`: exact bytes by storage, the executor's own cost
    polish        regions of the best tree are dissolved as long as the limit allows

The chain's scalars err to both sides, so the solver's limit is itself searched for: the highest whose tree fits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np

from torchremat.planning.profiles.profiling import ProfilePair
from torchremat.planning.profiles.reading import Profile
from torchremat.planning.profiles.roots import fitted
from torchremat.planning.searches.candidates import Candidate
from torchremat.planning.searches.chains import Cost, amount, chain_of
from torchremat.planning.searches.granularity import aligned, divisible, mixed, units_of
from torchremat.planning.searches.loosening import loosened
from torchremat.planning.searches.options import options_of
from torchremat.planning.searches.peak_bounds import PeakBounds
from torchremat.planning.searches.search_budget import SearchBudget
from torchremat.planning.searches.storing import Storing
from torchremat.planning.simulator.offload_choices import StoreProfile
from torchremat.planning.simulator.prediction import predict
from torchremat.schedules.chain import Chain, KeepNode, Tree
from torchremat.schedules.depths import bounded
from torchremat.schedules.persistent import Persistent
from torchremat.schedules.uniform import candidates

# The shares of the divisible units to split, the numbers to split at the end, and the limit on the number of units.
_SHARES = (0.25, 0.5, 0.75, 1.0)
_AT_THE_END = (1, 2, -1)
_MOST_UNITS = 61

# Shares of the remaining time for finding options, and for a table.
_OPTIONS_SHARE = 0.3
_TABLE_SHARE = 0.5

# Reported shares after candidates with stores, and before the polish of a tree: each part takes about as long as the
# rest after it.
_STORING_SHARE = 0.5
_JUDGING_SHARE = 0.5

# How many trees are judged in addition to those that the search for a limit visits: fewer with many units, since each
# judgement takes longer then.
_JUDGED_UNITS = 4000

# How many uniform trees are judged, and, if there are more, which by the number in their names: n stages have over n.
_MOST_UNIFORM = 120
_MOST_SIMPLE = 12

# The first ones, which recompute nothing, and everything, are judged in any case. The chain's scalars may say that no
# tree fits anywhere; with these two a lowest tree always exists.
_ALWAYS = 2


class Search:
    """Finds trees under any limit, with whole units and with some of them split.

    Blocks are mostly alike, so the number of split blocks matters more than which ones: the mixtures tried have a
    quarter, a half, three quarters and all of them split, evenly spread. The last ones are special, since everything
    kept is live together with their saved tensors: further mixtures split the last one, the last two and all but the
    first. All of this applies as long as the units stay few enough to plan in a second. One more mixture splits the
    units that are split in the step with the lowest peak, see `grain`, whatever the number of units. The modules around
    units are planned as they are, for tensors that can be kept in parts of them.

    Args:
        pair: The profile.
        cost: What to minimise.
        store_profiles: Stores, with the payload of each unit.
        operators: Whether units may be kept in part.
        search_budget: The time limit.
    """

    def __init__(
        self,
        pair: ProfilePair,
        cost: Cost,
        store_profiles: Sequence[StoreProfile] = (),
        *,
        operators: bool = True,
        search_budget: SearchBudget | None = None,
    ) -> None:
        self.search_budget = search_budget = SearchBudget() if search_budget is None else search_budget
        # Units kept in part are not stored, so with stores the search is over whole units.
        self.store_profiles = store_profiles
        self.whole = Solver(pair.blocks, cost, search_budget=search_budget)
        self.storing = Storing(self.whole, store_profiles)
        if operators:
            with search_budget.running(_OPTIONS_SHARE):
                pair = ProfilePair(
                    blocks=_with_options(pair.blocks, cost, search_budget),
                    leaves=pair.leaves and _with_options(pair.leaves, cost, search_budget),
                    around=pair.around and _with_options(pair.around, cost, search_budget),
                )
        self.pair = pair
        self.cost_unit: Cost = cost
        self.blocks = Solver(pair.blocks, cost, search_budget=search_budget) if pair.blocks.options else self.whole

    @property
    def plain(self) -> Candidate:
        """The tree that keeps everything."""
        return self.blocks.plain

    @cached_property
    def solvers(self) -> tuple[Solver, ...]:
        """One solver for each mixture, and one for the modules around the units."""
        units = self.pair.blocks.units
        # A module is split in all of its calls or in none, since its calls are mostly alike.
        by_name: dict[str, set[int]] = {}
        for call in sorted(divisible(self.pair)):
            by_name.setdefault(units.trace.calls[call].name, set()).add(call)
        whole = list(by_name.values())
        lowest = frozenset[int]().union(*(own for name, own in by_name.items() if name in units.grain.inside))
        splits: dict[frozenset[int], None] = {lowest: None}
        for share in _SHARES:
            count = round(share * len(whole))
            chosen = [whole[(2 * i + 1) * len(whole) // (2 * count)] for i in range(count)]
            splits[frozenset[int]().union(*chosen)] = None
        for count in _AT_THE_END:
            splits[frozenset[int]().union(*whole[-count:])] = None
        splits.pop(frozenset(), None)
        found = {split: units_of(self.pair, split) for split in splits}
        fitting = [
            split
            for split, own in found.items()
            if own is not None and (split == lowest or len(own.units) <= _MOST_UNITS)
        ]
        pair = aligned(self.pair)
        mixtures = [mixed(pair, split) for split in fitting]
        finest = max((len(mixture.units.units) for mixture in mixtures), default=0)
        return (
            self.blocks,
            *(
                Solver(
                    mixture,
                    self.cost_unit,
                    hand_made=len(mixture.units.units) == finest,
                    search_budget=self.search_budget,
                )
                for mixture in mixtures
            ),
            *(
                Solver(one, self.cost_unit, search_budget=self.search_budget)
                for one in (self.pair.around,)
                if one and one.options
            ),
        )

    @property
    def _all_solvers(self) -> tuple[Solver, ...]:
        """All solvers, including whole units: parts of units lead a search away from low peaks that whole ones have."""
        return tuple(dict.fromkeys((*self.solvers, self.whole)))

    @property
    def storings(self) -> Iterator[Storing]:
        """Yield the searches with stores: over whole units, then over the mixture with the most units."""
        if self.store_profiles:
            yield self.storing
            finest = max(self.solvers, key=lambda solver: len(solver.profile.units.units))
            if finest is not self.blocks:
                profile = replace(finest.profile, options=())
                yield Storing(
                    Solver(profile, self.cost_unit, hand_made=False, search_budget=self.search_budget),
                    self.store_profiles,
                )

    def solve(self, limit_bytes: int) -> Candidate | None:
        """Return the cheapest tree found whose predicted peak is at most the limit; None if none fits."""
        with self.search_budget.running():
            return self._solved(limit_bytes)

    def _solved(self, limit_bytes: int) -> Candidate | None:
        if self.plain.prediction.peak_bytes <= limit_bytes:
            return self.plain
        found: list[tuple[float, Candidate]] = []
        self.search_budget.found(None)
        for storing in self.storings:
            with self.search_budget.part(0.0, _STORING_SHARE):
                stored = storing.solve(limit_bytes)
            if stored is not None and not stored.cost:
                return stored
            found += [] if stored is None else [(storing.price(stored), stored)]
        with self.search_budget.part(_STORING_SHARE if self.store_profiles else 0.0, 1.0):
            for solver in self.search_budget.parts(self._all_solvers):
                one = None if found and self.search_budget.is_over else solver.solve(limit_bytes)
                found += [] if one is None else [(one.cost, one)]
                if found:
                    self.search_budget.found(_best(found).slowdown)
        if not found:
            return self.floor if self.floor.prediction.peak_bytes <= limit_bytes else None
        return _best(found)

    @cached_property
    def floor(self) -> Candidate:
        """The tree with the lowest predicted peak that was found."""
        with self.search_budget.running():
            lowest = [
                solver.floor
                for solver in self.search_budget.parts(self._all_solvers)
                if solver is self.blocks or not self.search_budget.is_over
            ]
            lowest += [one for storing in self.storings for one in storing.lowest]
        return min(lowest, key=lambda one: (one.prediction.peak_bytes, one.cost))


class Solver:
    """Finds trees for one profile, under any limit; limits and peaks are bytes over those at the start of the step.

    Args:
        profile: The profile.
        cost: What to minimise.
        hand_made: Whether all uniform trees, as people write them by hand, are tried. They gain nothing in mixtures
            except the finest, where a block is several stretches, each alike.
        search_budget: The time limit.
    """

    def __init__(
        self, profile: Profile, cost: Cost, *, hand_made: bool = True, search_budget: SearchBudget | None = None
    ) -> None:
        self.profile = profile
        self.cost_unit: Cost = cost
        self.hand_made = hand_made
        self.search_budget = SearchBudget() if search_budget is None else search_budget
        self._known: dict[Tree, Candidate] = {}
        self._peaks: dict[int, int] = {}  # of the trees judged so far, by level of the table

    @cached_property
    def chain(self) -> Chain:
        """The profile as scalars."""
        return chain_of(self.profile, self.cost_unit)

    @cached_property
    def option_costs(self) -> list[list[float]]:
        """The cost of each unit under each of its options, including that of keeping everything."""
        profile, cost = self.profile, self.cost_unit
        return [
            [
                0.0,
                *(amount(profile, cost, seconds=one.seconds, nominal_s=one.nominal_s, flops=one.flops) for one in own),
            ]
            for own in profile.options or [()] * len(profile.sizes)
        ]

    @cached_property
    def plain(self) -> Candidate:
        """The tree that keeps everything."""
        return self.judged(tuple(KeepNode(unit) for unit in range(len(self.profile.units.units))))

    @cached_property
    def table(self) -> Persistent:
        """The optimal persistent schedules of the chain."""
        self.search_budget.tell("tables")
        most_s = _TABLE_SHARE * self.search_budget.left_s
        found = Persistent(self.chain, max(1, int(1.1 * self.plain.prediction.peak_bytes)), most_seconds=most_s)
        self.search_budget.ran_out = self.search_budget.ran_out or not found.is_whole
        return found

    @property
    def most_judged(self) -> int:
        """How many trees may be judged for polish; a third of that for the floor."""
        return max(12, _JUDGED_UNITS // len(self.profile.units.units))

    @cached_property
    def uniform(self) -> tuple[Candidate, ...]:
        """The uniform trees: all of them for few units, those with few regions or long strides for many."""
        is_long = sum(stage.recomputable for stage in self.chain.stages) > _MOST_UNIFORM
        trees = candidates(self.chain, most=_MOST_SIMPLE if is_long or not self.hand_made else None)
        chosen = [tree for name, tree in trees.items() if len(trees) <= _MOST_UNIFORM or _is_simple(name)]
        chosen = chosen if self.hand_made else chosen[:_ALWAYS]
        self.search_budget.tell("judging")
        judged = (tree for number, tree in enumerate(chosen) if number < _ALWAYS or not self.search_budget.is_over)
        return tuple(map(self.judged, judged))

    def judged(self, tree: Tree) -> Candidate:
        """Return a tree with its prediction, adapted so that it can run and suits the roots."""
        tree = fitted(self.profile.units, bounded(tree))  # See NOTE [ How deep regions may nest ]
        if tree not in self._known:
            prediction = predict(self.profile, tree)
            cost = amount(
                self.profile,
                self.cost_unit,
                seconds=prediction.seconds,
                nominal_s=prediction.nominal_s,
                flops=prediction.flops,
            )
            self._known[tree] = Candidate(profile=self.profile, tree=tree, prediction=prediction, cost=cost)
        return self._known[tree]

    def solve(self, limit_bytes: int) -> Candidate | None:
        """Return the cheapest tree found whose predicted peak is at most the limit; None if none fits, see `floor`."""
        found = self.unpolished(limit_bytes)
        return None if found is None else self.polished(found, limit_bytes)

    def unpolished(self, limit_bytes: int) -> Candidate | None:
        """Return the candidate that `solve` polishes."""
        if self.plain.prediction.peak_bytes <= limit_bytes:
            return self.plain
        found = [*self.persistent(limit_bytes), *self.uniform]
        fitting = [one for one in found if one.prediction.peak_bytes <= limit_bytes]
        return min(fitting, key=lambda one: (one.cost, one.prediction.peak_bytes), default=None)

    def persistent(self, limit_bytes: int) -> Iterator[Candidate]:
        """Yield optimal trees of the chain, closing in on the cheapest whose exact peak fits.

        Results for earlier limits are reused.
        """
        levels, peaks = self.table.levels, self._peaks
        fits = max((one for one, peak in peaks.items() if peak <= limit_bytes), default=-1)
        above = min((one for one, peak in peaks.items() if peak > limit_bytes and one > fits), default=len(levels))
        if fits >= 0:
            yield self.judged(self.table.tree_at(int(levels[fits])))
        # Begin at the limit by the chain's own scalars: mostly the answer is there or nearby.
        slots = limit_bytes // self.table.slot_bytes
        asked, reach = int(np.searchsorted(levels, slots, side="right")) - 1, 1
        while above - fits > 1 and not self.search_budget.is_over:
            self.search_budget.tell("judging")
            asked = min(max(asked, fits + 1), above - 1)
            one = self.judged(self.table.tree_at(int(levels[asked])))
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
        place, judged, most = 0, len(self._known), self.most_judged if most_judged is None else most_judged
        peak_bounds = PeakBounds(self.profile, best.tree)
        # A change of one call of a root changes its other calls too.
        is_local = len(self.profile.units.roots) == 1 and not self.profile.units.trace.sharded
        while place < len(best.tree) and len(self._known) - judged < most and not self.search_budget.is_over:
            self.search_budget.tell("polishing", _JUDGING_SHARE + (1 - _JUDGING_SHARE) * place / len(best.tree))
            before, after = best.tree[:place], best.tree[place + 1 :]
            looser = [
                self.judged((*before, *nodes, *after))
                for nodes in loosened(best.tree[place], self.option_costs)
                if not is_local or peak_bounds.least_bytes(place, nodes) <= limit_bytes
            ]
            fitting = [one for one in looser if one.prediction.peak_bytes <= limit_bytes and one.cost < best.cost]
            if fitting:
                best = min(fitting, key=lambda one: one.cost)
                peak_bounds = PeakBounds(self.profile, best.tree)
            else:
                place += 1
        return best

    @cached_property
    def floor(self) -> Candidate:
        """The tree with the lowest predicted peak that was found."""
        found = list(self.uniform)
        lowest, most = self.table.lowest_slots, self.table.most_slots
        steps = min(16, self.most_judged // 3)
        for asked in self.search_budget.parts(
            sorted({min(most, lowest + lowest * i // (2 * steps)) for i in range(steps)})
        ):
            self.search_budget.tell("judging")
            if asked >= lowest and not (found and self.search_budget.is_over):
                found.append(self.judged(self.table.tree_at(asked)))
        return min(found, key=lambda one: (one.prediction.peak_bytes, one.cost))


def _with_options(profile: Profile, cost: Cost, search_budget: SearchBudget) -> Profile:
    return replace(profile, options=options_of(profile, cost, search_budget))


def _best(found: list[tuple[float, Candidate]]) -> Candidate:
    """Return the cheapest of the candidates by their prices."""
    return min(found, key=lambda one: (one[0], bool(one[1].offloads), one[1].prediction.peak_bytes))[1]


def _is_simple(name: str) -> bool:
    number = "".join(letter for letter in name if letter.isdigit())
    return not number or int(number) <= _MOST_SIMPLE
