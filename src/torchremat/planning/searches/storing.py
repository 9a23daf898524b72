"""Chooses which kept units of a tree go to a store, and when they leave and come back.

A peak is mostly where the backward begins, so the units needed last are stored first: the first units of the forward.
For a slow store every second unit is better, since the store is idle less. Both rows are tried, as short as the limit
allows, for several trees: the plain one, the best one without stores, and some for limits in between, on the way to the
fitting tree that recomputes least, since a store may have little room.

The time that a unit may take to leave, and the unit before which it begins to come back, follow from the store's speed:
just long and just early enough that the step never waits, if memory allows. Otherwise both take place within a few
units; at the tightest the step waits for the whole transfer at the unit's end, and again where the unit is needed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache, partial

from torchremat.planning.profiles.reading import Profile
from torchremat.planning.searches.search_budget import JUDGED_UNITS
from torchremat.planning.searches.solver import Solver
from torchremat.planning.simulator.offload_choices import OffloadChoice, Offloads, OffloadSize, StoredUnit, StoreProfile
from torchremat.planning.simulator.points import Live, ProgramPoint
from torchremat.planning.simulator.prediction import Candidate, predict, walk_of
from torchremat.schedules.chain import KeepNode, Tree
from torchremat.schedules.store_queue import QueuedCopy, earliest_dues, latest_begins, reading_wait_s, writing_wait_s

# During how many units a transfer may be in flight, out and back: as many as its store needs, or fewer.
_REACHES = (10**6, 1, 0)
# How often the interval between the requested limit and the plain peak is halved, to find the tree that recomputes
# least among those that fit with stores.
_HALVINGS = 4

# If the cost is seconds, a plan with stores is chosen only if it is predicted to be faster than the best one without,
# by more than this share of a plain step and by as much as the seconds of its copies vary. In doubt, the simpler plan
# wins.
LEAST_GAIN = 0.02


class Storing:
    """Finds the units to store, for one profile."""

    def __init__(self, solver: Solver, store_profiles: Sequence[StoreProfile]) -> None:
        self.solver = solver
        self.store_profiles = store_profiles
        self._judged = 0
        calls = [unit.calls for unit in solver.profile.units.units]
        # By the index of the store, then by unit.
        self._offload_sizes = {
            store_profile.store: {
                unit: store_profile.offload_sizes[own]
                for unit, own in enumerate(calls)
                if own in store_profile.offload_sizes
            }
            for store_profile in store_profiles
        }

    @property
    def profile(self) -> Profile:
        """The profile of the solver."""
        return self.solver.profile

    @property
    def lowest(self) -> Iterator[Candidate]:
        """Yield candidates with low peaks: everything possible stored, with as few bytes in flight as possible."""
        for store_profile in self.store_profiles:
            for tree in dict.fromkeys((self.solver.plain.tree, self.solver.floor.tree)):
                units = self._within(store_profile, self._storable(store_profile, tree))
                if units:
                    yield self.judged(store_profile, tree, units, 0)

    def solve(self, limit_bytes: int) -> Candidate | None:
        """Return the cheapest candidate found with a stored unit whose predicted peak is at most the limit."""
        self._judged = 0
        cheapest = cache(partial(self._cheapest, limit_bytes=limit_bytes))  # trees recur
        plain = self.solver.plain
        found = cheapest(plain.tree)
        lower, upper = limit_bytes, plain.prediction.peak_bytes
        for _ in range(_HALVINGS):
            if found is not None and not found.cost:
                break
            middle = (lower + upper) // 2
            one = self.solver.solve(middle)
            stored = None if one is None else cheapest(one.tree)
            if one is not None and stored is None:
                upper = middle  # the store has too little room, or too little time
            else:
                lower = middle
            found = _cheaper(found, stored)
        for one in (self.solver.solve(limit_bytes), self.solver.floor):
            if one is not None and (found is None or found.cost):
                found = _cheaper(found, cheapest(one.tree))
        return None if found is None else self._pruned(found, limit_bytes)

    def _cheapest(self, tree: Tree, limit_bytes: int) -> Candidate | None:
        """Return the cheapest candidate found with some units of a tree stored; None if none fits."""
        found: Candidate | None = None
        for store_profile in self.store_profiles:
            storable = self._storable(store_profile, tree)
            for reach in _REACHES:
                for stride in (1, 2):
                    # Every second one, and then the others from the first on.
                    row = [*storable[::stride], *(one for i, one in enumerate(storable) if i % stride)]
                    found = _cheaper(found, self._shortest(store_profile, tree, row, reach, limit_bytes))
            if self._judged * len(self.profile.sizes) > JUDGED_UNITS:
                break
        return found

    def _pruned(self, best: Candidate, limit_bytes: int) -> Candidate:
        """Return a candidate that keeps each stored unit for which the tree still fits."""
        for unit in sorted(best.offloads, reverse=True):
            offloads = {one: choice for one, choice in best.offloads.items() if one != unit}
            if not offloads:
                break
            store_profile = self.store_profiles[next(iter(offloads.values())).planned.store]
            for reach in _REACHES:
                one = self.judged(store_profile, best.tree, sorted(offloads), reach)
                if one.prediction.peak_bytes <= limit_bytes and rank(one) < rank(best):
                    best = one
                    break
        return best

    def judged(self, store_profile: StoreProfile, tree: Tree, units: Sequence[int], reach: int) -> Candidate:
        """Return a tree with units in a store, with its prediction."""
        self._judged += 1
        offloads, moving_s = self._moved(store_profile, tree, units, reach)
        prediction = replace(predict(self.profile, tree, offloads), moving_s=moving_s)
        plain = self.solver.judged(tree)
        seconds = self.solver.cost_unit == "seconds"
        return replace(
            plain, prediction=prediction, cost=plain.cost + (moving_s if seconds else 0.0), offloads=offloads
        )

    def price(self, found: Candidate) -> float:
        """Return the price to compare with candidates without stores: its cost, and for seconds the uncertainty too."""
        if self.solver.cost_unit != "seconds":
            return found.cost
        spread = max(self.store_profiles[choice.planned.store].speed.spread for choice in found.offloads.values())
        return found.cost + LEAST_GAIN * self.profile.seconds + spread * found.prediction.moving_s

    def _storable(self, store_profile: StoreProfile, tree: Tree) -> list[int]:
        order, offload_sizes = set(self.profile.order), self._offload_sizes[store_profile.store]
        kept = [
            node.stage
            for node in tree
            if isinstance(node, KeepNode) and not node.option and node.stage in offload_sizes
        ]
        return [unit for unit in kept if unit in order and self._frees(offload_sizes[unit])]

    def _frees(self, offload_size: OffloadSize) -> bool:
        """Return whether a payload frees more than its store holds in its place; storages live anyway are not freed."""
        trace = self.profile.units.trace
        dying = sum(trace.storage_bytes[storage] for storage in offload_size.boundary if storage in trace.died)
        return offload_size.inside_bytes + dying > offload_size.held_bytes

    def _within(self, store_profile: StoreProfile, units: Sequence[int]) -> list[int]:
        """Return as many of the units as the store has room for."""
        taken, total = list[int](), 0
        for unit in units:
            total += self._offload_sizes[store_profile.store][unit].all_bytes
            if store_profile.limit_bytes is not None and total > store_profile.limit_bytes:
                break
            taken.append(unit)
        return taken

    def _shortest(
        self, store_profile: StoreProfile, tree: Tree, row: Sequence[int], reach: int, limit_bytes: int
    ) -> Candidate | None:
        """Return the candidate that stores the fewest units from the beginning of a row; None if none fits."""
        row = self._within(store_profile, row)
        if not row:
            return None
        best = self.judged(store_profile, tree, row, reach)
        if best.prediction.peak_bytes > limit_bytes:
            return None
        fits, less = len(row), 0
        while fits - less > 1:
            count = (fits + less) // 2
            one = self.judged(store_profile, tree, row[:count], reach)
            if one.prediction.peak_bytes <= limit_bytes:
                best, fits = one, count
            else:
                less = count
        return best

    def _moved(
        self, store_profile: StoreProfile, tree: Tree, units: Sequence[int], reach: int
    ) -> tuple[Offloads, float]:
        """Return the offload choices of units with the points of their transfers, and the seconds that these add."""
        profile, speed, offload_sizes = self.profile, store_profile.speed, self._offload_sizes[store_profile.store]
        place = {unit: i for i, unit in enumerate(profile.order)}
        forward_s = [cost.seconds for cost in profile.costs]
        backward_s = self._backward_s(tree)
        going, coming = sorted(units), sorted(units, key=lambda unit: place[unit])
        of_unit = {unit: (offload_sizes[unit].tensors, offload_sizes[unit].all_bytes) for unit in units}
        out_s = {unit: speed.out.seconds(*of_unit[unit]) for unit in units}
        in_s = {unit: speed.back.seconds(*of_unit[unit]) for unit in units}
        # Part of it displaces compute, the rest overlaps with it.
        out_busy_s = {unit: speed.out.busy_s(*of_unit[unit]) for unit in units}
        in_busy_s = {unit: speed.back.busy_s(*of_unit[unit]) for unit in units}
        moving_s = sum(out_busy_s.values()) + sum(in_busy_s.values())
        out_s = {unit: out_s[unit] - out_busy_s[unit] for unit in units}
        in_s = {unit: in_s[unit] - in_busy_s[unit] for unit in units}
        dues = earliest_dues(forward_s, [(unit, out_s[unit]) for unit in going])
        writes = [
            QueuedCopy(asked=unit, due=min(due, unit + reach), seconds=out_s[unit])
            for unit, due in zip(going, dues, strict=True)
        ]
        begins = latest_begins(backward_s, [(place[unit], in_s[unit]) for unit in coming])
        reads = [
            QueuedCopy(asked=max(begun, place[unit] - reach), due=place[unit], seconds=in_s[unit])
            if offload_sizes[unit].comes_ahead
            else QueuedCopy(asked=place[unit], due=place[unit], seconds=in_s[unit])
            for unit, begun in zip(coming, begins, strict=True)
        ]
        moving_s += writing_wait_s(forward_s, writes) + reading_wait_s(backward_s, reads)
        leaves = {write.asked: write.due for write in writes}
        offloads = {
            unit: OffloadChoice(
                planned=StoredUnit(
                    unit=unit,
                    store=store_profile.store,
                    leaves_after=leaves[unit],
                    comes_before=profile.order[read.asked],
                    stored_bytes=offload_sizes[unit].all_bytes,
                ),
                offload_size=offload_sizes[unit],
            )
            for unit, read in zip(coming, reads, strict=True)
        }
        return offloads, moving_s

    def _backward_s(self, tree: Tree) -> list[float]:
        """Return the seconds of the backward of each unit, in the order of backward, with the recomputes before it."""
        profile = self.profile
        result, recompute_s = list[float](), 0.0
        for state in walk_of(profile, tree):
            if isinstance(state, Live):
                if state.key[0] is ProgramPoint.BACKWARD:
                    result.append(recompute_s + profile.costs[state.key[1]].seconds_backward)
                    recompute_s = 0.0
            else:
                cost = profile.costs[state.unit]
                recompute_s += cost.seconds_truncated if state.truncated else cost.seconds_inside
        return result


def _cheaper(one: Candidate | None, other: Candidate | None) -> Candidate | None:
    return min((found for found in (one, other) if found is not None), key=rank, default=None)


def rank(one: Candidate) -> tuple[float, float, int, int]:
    """Return the key that candidates are chosen by: cost, moved bytes, stored units, peak.

    Of equal flops the candidate of the fewest seconds is chosen.
    """
    stored_bytes = sum(choice.planned.stored_bytes for choice in one.offloads.values())
    return one.cost, one.prediction.seconds + one.prediction.moving_s, stored_bytes, one.prediction.peak_bytes
