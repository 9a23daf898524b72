"""The search for trees under a limit: with whole units, with some of them split, and with stores."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Protocol

from torchremat.planning.plan_options import PlanOptions
from torchremat.planning.profiles.profile_pair import ProfilePair
from torchremat.planning.profiles.reading import Profile
from torchremat.planning.searches.chains import Cost
from torchremat.planning.searches.dividing import Dividing
from torchremat.planning.searches.granularity import align, divisible, mix, units_of
from torchremat.planning.searches.loops import are_long, have_several_units, loops_in
from torchremat.planning.searches.options import options_of
from torchremat.planning.searches.search_budget import SearchBudget
from torchremat.planning.searches.solver import Solver
from torchremat.planning.searches.storing import Storing
from torchremat.planning.simulator.offload_choices import StoreProfile
from torchremat.planning.simulator.prediction import Candidate, rank_of_bytes

# The shares of the divisible units to split, the numbers to split at the end, and the limit on the number of units.
_SHARES = (0.25, 0.5, 0.75, 1.0)
_AT_THE_END = (1, 2, -1)
_MOST_UNITS = 61

# The share of the remaining time for finding options.
_OPTIONS_SHARE = 0.3

# The reported share after candidates with stores: each part takes about as long as the rest after it.
_STORING_SHARE = 0.5


class TreeSearch(Protocol):
    """Finds trees under any limit.

    Attributes:
        cost_unit: What is minimised.
        search_budget: The time limit.
        store_profiles: The stores where saved tensors may wait.
        pair: The profiles.
        spare_share: The share by which the budget "min" is above the lowest peak.
    """

    cost_unit: Cost
    search_budget: SearchBudget
    store_profiles: Sequence[StoreProfile]
    pair: ProfilePair
    spare_share: float

    @cached_property
    def plain(self) -> Candidate:
        """The tree that keeps everything."""
        ...

    @cached_property
    def floor(self) -> Candidate:
        """The tree with the lowest predicted peak that was found."""
        ...

    def solve(self, limit_bytes: int) -> Candidate | None:
        """Return the cheapest tree found whose predicted peak is at most the limit; None if none fits."""
        ...


class Search:
    """Finds trees under any limit, with whole units and with some of them split.

    Blocks are mostly alike, so the number of split blocks matters more than which ones: the mixtures tried have a
    quarter, a half, three quarters and all of them split, evenly spread. The last ones are special, since everything
    kept is live together with their saved tensors: further mixtures split the last one, the last two and all but the
    first. All of this applies as long as the units stay few enough to plan in a second. One more mixture splits the
    units that are split in the step with the lowest peak, see `grain`, whatever the number of units. The modules around
    units are planned as they are, for tensors that can be kept in parts of them. Where the steps of loops have several
    units, one more search is over whole steps.
    """

    spare_share = 0.0

    def __init__(
        self,
        pair: ProfilePair,
        options: PlanOptions,
        store_profiles: Sequence[StoreProfile] = (),
        *,
        search_budget: SearchBudget | None = None,
    ) -> None:
        self.cost_unit: Cost = options.cost
        self.search_budget = search_budget = SearchBudget() if search_budget is None else search_budget
        # Units kept in part are not stored, so with stores the search is over whole units.
        self.store_profiles = store_profiles
        self.whole = self._solver(pair.blocks)
        self.storing = Storing(self.whole, store_profiles)
        if options.operators:
            with search_budget.running(_OPTIONS_SHARE):
                pair = pair.each(lambda own: replace(own, options=options_of(own, self.cost_unit, self.search_budget)))
        self.pair = pair
        self.blocks = self._solver(pair.blocks, beside=self.whole) if pair.blocks.options else self.whole
        self.dividing = Dividing(self.blocks) if options.operators else None

    def _solver(
        self, profile: Profile, *, hand_made: bool = True, over_steps: bool = False, beside: Solver | None = None
    ) -> Solver:
        return Solver(
            profile,
            self.cost_unit,
            hand_made=hand_made,
            over_steps=over_steps,
            beside=beside,
            search_budget=self.search_budget,
        )

    @property
    def pair_in_parts(self) -> ProfilePair:
        """The profile with the options of units that are recomputed in parts, if there may be any."""
        return self.pair if self.dividing is None else replace(self.pair, blocks=self.dividing.profile)

    @cached_property
    def plain(self) -> Candidate:
        """The tree that keeps everything."""
        return self.blocks.plain

    @cached_property
    def solvers(self) -> tuple[Solver, ...]:
        """One solver for each mixture, and one for the modules around the units."""
        units = self.pair.blocks.units
        loops = loops_in(units)
        has_wide_steps = have_several_units(loops) and not are_long(units, loops)
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
        pair = align(self.pair)
        mixtures = [mix(pair, split) for split in fitting]
        finest = max((len(mixture.units.units) for mixture in mixtures), default=0)
        return (
            self.blocks,
            *(self._solver(mixture, hand_made=len(mixture.units.units) == finest) for mixture in mixtures),
            *(self._solver(one) for one in (self.pair.around,) if one and one.options),
            *([self._solver(self.pair.blocks, over_steps=True)] if has_wide_steps else ()),
        )

    @property
    def _all_solvers(self) -> tuple[Solver, ...]:
        """All solvers, including whole units: parts of units lead a search away from low peaks that whole ones have.

        For a long loop, both would take too long.
        """
        return tuple(dict.fromkeys((*self.solvers, self.blocks if self.blocks.loops else self.whole)))

    @property
    def storings(self) -> Iterator[Storing]:
        """Yield the searches with stores: over whole units, then over the mixture with the most units."""
        if self.store_profiles:
            yield self.storing
            finest = max(self.solvers, key=lambda solver: len(solver.profile.units.units))
            if finest is not self.blocks:
                whole = self._solver(replace(finest.profile, options=()), hand_made=False)
                yield Storing(whole, self.store_profiles)

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
        is_enough = found and (self.search_budget.is_over or _best(found).recomputes_once)
        if self.dividing is not None and not is_enough:
            divided = self.dividing.solve(limit_bytes)
            found += [] if divided is None else [(divided.cost, divided)]
        if not found:
            return self.floor if self.floor.prediction.peak_bytes <= limit_bytes else None
        return _best(found)

    @cached_property
    def floor(self) -> Candidate:
        """The tree with the lowest predicted peak that was found."""
        with self.search_budget.running():
            lowest = self.blocks.floor
            for solver in self.search_budget.parts([one for one in self._all_solvers if one is not self.blocks]):
                lower = None if self.search_budget.is_over else solver.lowest_within(lowest.prediction.peak_bytes)
                lowest = min((one for one in (lower, lowest) if one is not None), key=rank_of_bytes)
            found = [lowest, *(one for storing in self.storings for one in storing.lowest)]
            if self.dividing is not None and not self.search_budget.is_over:
                found += [] if self.dividing.floor is None else [self.dividing.floor]
        return min(found, key=rank_of_bytes)


def _best(found: list[tuple[float, Candidate]]) -> Candidate:
    """Return the cheapest of the candidates by their prices."""
    return min(found, key=lambda one: (one[0], bool(one[1].offloads), one[1].prediction.peak_bytes))[1]
