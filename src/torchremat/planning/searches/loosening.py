"""Changes a tree so that it recomputes a little less, and bounds the new peak without a simulation.

A simulation of a whole step takes a millisecond or more, and most changes that keep a little more do not fit. At a
program point at which the changed part is neither in its forward nor in its backward, that part only holds the storages
that stay after its forward. So a few of the highest program points are recorded with the storages held there, and the
additional bytes that a change holds there follow from a few storages.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from torchremat.planning.profiles.reading import Profile
from torchremat.planning.simulator.points import Live, ProgramPoint
from torchremat.planning.simulator.prediction import live_bytes, over_bytes, walk_of
from torchremat.schedules.chain import KeepNode, Node, RegionNode, Tree


def loosened(node: Node, costs: list[list[float]]) -> Iterator[Tree]:
    """Yield replacements for a node that cost less and keep a little more.

    A region is dissolved, or loses its first or last child; a kept unit is kept by another of its options.
    """
    if isinstance(node, KeepNode):
        own = costs[node.stage]
        for option, cost in enumerate(own):
            if cost < own[node.option]:
                yield (KeepNode(node.stage, option),)
    else:
        if len(node.children) == 1:
            for option in range(1, len(costs[node.first])):
                yield (KeepNode(node.first, option),)
        yield node.children
        if len(node.children) > 1:
            first, *rest = node.children
            yield (first, RegionNode(tuple(rest)))
            *most, last = node.children
            yield (RegionNode(tuple(most)), last)


class HeldAfter(NamedTuple):
    """What nodes hold between forward and backward: storages, by how often they do, and other bytes."""

    storages: Counter[int]
    inside_bytes: int


def held_after(profile: Profile, nodes: Tree) -> HeldAfter | None:
    """Return what consecutive nodes hold after their forward; None if that changes later."""
    simulator = walk_of(profile, nodes)
    for unit in range(nodes[0].first, nodes[-1].last + 1):
        simulator.take(unit)
    return None if simulator.unborn else HeldAfter(simulator.live.held, simulator.live.inside)


@dataclass(frozen=True, kw_only=True)
class _PeakBound:
    """One program point: live bytes, storages held, others alive, and the units whose backward is still to come."""

    live_bytes: int
    held: dict[int, int]
    alive: frozenset[int]
    rank: int


class PeakBounds:
    """The highest program points of a step under a tree, from the end of its forward on."""

    def __init__(self, profile: Profile, tree: Tree) -> None:
        self._profile = profile
        self._tree = tree
        self._ranks = {unit: place for place, unit in enumerate(profile.order)}
        self._peak_bounds = list(self._highest())

    def _highest(self) -> Iterator[_PeakBound]:
        """Yield the end of the forward, and each program point of the backward that is higher than all before it."""
        profile, highest = self._profile, -1
        simulator = walk_of(self._profile, self._tree)
        for state in simulator:
            if not isinstance(state, Live) or state.key[0] in (ProgramPoint.FORWARD, ProgramPoint.LEFT):
                continue
            live = live_bytes(profile, state) + over_bytes(profile, state)
            if live > highest:
                highest = live
                rank = -1 if state.key[0] is ProgramPoint.END else self._ranks[state.key[1]]
                yield _PeakBound(
                    live_bytes=live, held=dict(simulator.live.held), alive=frozenset(simulator.live.alive), rank=rank
                )

    def least_bytes(self, place: int, nodes: Tree) -> int:
        """Return a lower bound on the peak if other nodes replace the node at one place of the tree."""
        old = self._tree[place]
        first = min((self._ranks[unit] for unit in range(old.first, old.last + 1) if unit in self._ranks), default=-1)
        ahead = [height for height in self._peak_bounds if height.rank < first]
        if not ahead:
            return 0
        before, after = held_after(self._profile, (old,)), held_after(self._profile, nodes)
        if before is None or after is None:
            return 0
        return max(height.live_bytes + self._added(height, before, after) for height in ahead)

    def _added(self, height: _PeakBound, before: HeldAfter, after: HeldAfter) -> int:
        """Return how many bytes more are held at a program point."""
        added, sizes = after.inside_bytes - before.inside_bytes, self._profile.units.trace.storage_bytes
        for storage in before.storages.keys() | after.storages.keys():
            if storage in height.alive:
                continue
            was = height.held.get(storage, 0)
            now = was - before.storages[storage] + after.storages[storage]
            added += sizes[storage] * ((now > 0) - (was > 0))
        return added
