"""All unnested placements of regions in a short chain, as people make them by hand: of these no better one is missed.

A placement is a sequence of kept units and regions of one or several, so that its cost is the sum of theirs, and the
bytes that it holds follow from the storages that each of them holds. A lower bound on its peak is what it holds between
forward and backward, and in the backward of each node what those before it hold, with what the node needs by itself.
So few placements are judged: in the order of their costs, the first one that fits is the cheapest, and in the order of
their bounds, no later one is lower than a bound.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Set
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, islice

from torchremat.planning.profiles.reading import Profile
from torchremat.planning.searches.loosening import HeldAfter, held_after
from torchremat.planning.searches.search_budget import SearchBudget
from torchremat.planning.simulator.points import Live, ProgramPoint
from torchremat.planning.simulator.prediction import Candidate, live_bytes, over_bytes, rank_of_bytes, walk_of
from torchremat.schedules.chain import KeepNode, Node, RegionNode, Tree

# The longest chains whose placements are listed: with regions of several units, and of one each.
_MOST_WITH_RUNS = 8
_MOST_UNITS = 13

_BACKWARD = (ProgramPoint.RECOMPUTE, ProgramPoint.BACKWARD)


@dataclass(frozen=True, slots=True)
class _Placement:
    """A placement: its cost, and a lower bound on its peak."""

    tree: Tree
    cost: float
    least_bytes: int


class Placements:
    """The placements in the chain of a profile; none if it is long. What a call is must not change the others.

    Args:
        profile: The profile.
        plain: The tree that keeps everything.
        judged: Returns a tree with its prediction.
        judged_within: Returns the same if its peak is at most a limit.
        most_judged: How many placements are judged for one answer.
        search_budget: The time limit.
    """

    def __init__(
        self,
        profile: Profile,
        plain: Candidate,
        judged: Callable[[Tree], Candidate],
        judged_within: Callable[[Tree, int], Candidate | None],
        *,
        most_judged: int,
        search_budget: SearchBudget,
    ) -> None:
        self._profile, self._plain = profile, plain
        self._judged, self._judged_within = judged, judged_within
        self._most_judged, self._search_budget = most_judged, search_budget
        self._units = len(profile.sizes)

    def cheapest(self, limit_bytes: int) -> Candidate | None:
        """Return the cheapest placement whose predicted peak is at most the limit; None if none fits."""
        may_fit = (one for one in self._cheapest_first if one.least_bytes <= limit_bytes)
        for one in islice(may_fit, self._most_judged):
            if self._search_budget.is_over:
                break
            found = self._judged_within(one.tree, limit_bytes)
            if found is not None:
                return found
        return None

    def lowest_within(self, limit_bytes: int) -> Candidate | None:
        """Return the placement with the lowest predicted peak, if that is at most a limit."""
        lowest: Candidate | None = None
        for one in self._lowest_first[: self._most_judged]:
            if one.least_bytes > limit_bytes or self._search_budget.is_over:
                break
            found = self._judged_within(one.tree, limit_bytes)
            if found is not None and (lowest is None or rank_of_bytes(found) < rank_of_bytes(lowest)):
                lowest, limit_bytes = found, found.prediction.peak_bytes
        return lowest

    @cached_property
    def _cheapest_first(self) -> list[_Placement]:
        return sorted(self._all, key=lambda one: (one.cost, one.least_bytes))

    @cached_property
    def _lowest_first(self) -> list[_Placement]:
        return sorted(self._all, key=lambda one: one.least_bytes)

    @cached_property
    def _all(self) -> list[_Placement]:
        """All placements."""
        if self._search_budget.is_over or not 1 < self._units <= _MOST_UNITS:
            return []
        longest = self._units if self._units <= _MOST_WITH_RUNS else 1
        keeps = tuple(map(KeepNode, range(self._units)))
        nodes: list[list[Node]] = [
            [keeps[first], *(RegionNode(keeps[first:end]) for end in range(first + 1, self._units + 1)[:longest])]
            for first in range(self._units)
        ]
        held: dict[Node, HeldAfter] = {}
        for node in chain.from_iterable(nodes):
            found = held_after(self._profile, (node,))
            if found is None:
                return []
            held[node] = found
        sizes = self._profile.units.trace.storage_bytes

        def bytes_of(storages: Set[int], inside_bytes: int) -> int:
            return sum(map(sizes.__getitem__, storages)) + inside_bytes

        def placed(
            first: int, storages: frozenset[int], inside_bytes: int, least_bytes: int
        ) -> Iterator[tuple[Tree, int]]:
            before_bytes = bytes_of(storages, inside_bytes)
            if first == self._units:
                yield (), max(least_bytes, free_bytes + before_bytes)
                return
            for node in nodes[first]:
                own, least = held[node], max(least_bytes, before_bytes + needs[node])
                more, inside = storages.union(own.storages), inside_bytes + own.inside_bytes
                for rest, bound in placed(node.last + 1, more, inside, least):
                    yield (node, *rest), bound

        kept_bytes, storages, inside_bytes = [0], set[int](), 0
        for one in map(held.__getitem__, keeps):
            storages, inside_bytes = storages.union(one.storages), inside_bytes + one.inside_bytes
            kept_bytes.append(bytes_of(storages, inside_bytes))
        free_bytes = self._plain.prediction.kept_bytes - kept_bytes[-1]
        alone = {node: (*keeps[: node.first], node, *keeps[node.last + 1 :]) for node in held}
        needs = {node: self._backward_bytes(node, tree) - kept_bytes[node.first] for node, tree in alone.items()}
        costs = {node: 0.0 if node in keeps else self._judged(tree).cost for node, tree in alone.items()}
        return [
            _Placement(tree, sum(map(costs.__getitem__, tree)), bound) for tree, bound in placed(0, frozenset(), 0, 0)
        ]

    def _backward_bytes(self, node: Node, tree: Tree) -> int:
        """Return the peak of a step under a tree while the backward goes through one node of it."""
        inside = range(node.first, node.last + 1)
        found = (
            live_bytes(self._profile, state) + over_bytes(self._profile, state)
            for state in walk_of(self._profile, tree)
            if isinstance(state, Live) and state.key[0] in _BACKWARD and state.key[1] in inside
        )
        return max(found, default=0)  # it may not go through it at all
