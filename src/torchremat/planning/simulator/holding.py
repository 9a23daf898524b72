"""What a simulated step holds: bytes by storage, graphs of units, and outputs that a recompute passes on.

Most graphs live until their backward. A graph that no backward reaches lives as long as its outputs are referenced:
after `y.detach()`, the graph of `y` dies with `y`. Until then its saved tensors are held, and so are its regions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import accumulate

from torchremat.planning.profiles.units import Unit, Units
from torchremat.planning.simulator.points import UnitBytes
from torchremat.regions.rules import ended, last_uses
from torchremat.schedules.chain import Node, RegionNode


class LiveBytes:
    """The storages that are held, and bytes that belong to no boundary storage.

    Attributes:
        bytes: Of each storage.
        held: By storage, how often it is held.
        held_bytes: Their bytes, each storage once.
        inside: Bytes that kept units saved inside, and states that regions keep.
        alive: The storages in addition to the held ones, at the last program point asked for.
    """

    def __init__(self, storage_bytes: dict[int, int]) -> None:
        self.bytes = storage_bytes
        self.held: Counter[int] = Counter()
        self.held_bytes = 0
        self.inside = 0
        self.alive: Iterable[int] = ()

    def hold(self, storages: Iterable[int]) -> None:
        """Begin to hold storages, each once more."""
        for storage in storages:
            self.held[storage] += 1
            if self.held[storage] == 1:
                self.held_bytes += self.bytes[storage]

    def release(self, storages: Iterable[int]) -> None:
        """Undo `hold`."""
        for storage in storages:
            self.held[storage] -= 1
            if not self.held[storage]:
                del self.held[storage]
                self.held_bytes -= self.bytes[storage]

    def total(self, alive: Iterable[int] = ()) -> int:
        """Bytes held, plus those of `alive`."""
        self.alive = alive
        total = self.inside + self.held_bytes
        for storage in alive:
            if storage not in self.held:
                total += self.bytes[storage]
        return total


class Graphs:
    """The graphs of a simulation.

    Args:
        sizes: Bytes of the units.
        until: For each unit the time in the trace until which it has a graph; -1 if it leaves none.
        end: The time at which the forward has ended.
    """

    def __init__(self, sizes: Sequence[UnitBytes], until: Sequence[int], end: int) -> None:
        self._until = until
        self._end = end
        # For each unit, how many units before it have something that backward needs.
        self._needed = [0, *accumulate(size.has_backward for size in sizes)]
        self._idle: list[tuple[int, Node]] = []

    def has_any(self, node: Node) -> bool:
        """Whether a node leaves a graph; a node without a graph holds nothing."""
        return self._has_backward(node) or self._last(node) >= 0

    def waits(self, node: Node) -> bool:
        """Whether a recompute has anything to give to a node: graphs that are freed by then take nothing."""
        return self._has_backward(node) or self._last(node) >= self._end

    def note(self, node: Node) -> None:
        """Record a top-level node that has run, if no backward reaches the graph that it leaves."""
        if not self._has_backward(node) and self._last(node) >= 0:
            self._idle.append((self._last(node), node))

    def lost(self, time: int) -> list[Node]:
        """Return the recorded nodes whose graphs are freed by now, and forget them."""
        gone = [node for until, node in self._idle if until < time]
        self._idle = [one for one in self._idle if one[0] >= time]
        return gone

    def _has_backward(self, node: Node) -> bool:
        """Whether backward needs anything in a node."""
        return self._needed[node.last + 1] > self._needed[node.first]

    def _last(self, node: Node) -> int:
        return max(self._until[node.first : node.last + 1])


_NONE: set[int] = set()


class Links:
    """The outputs that a recompute passes on to its later units, and what they keep alive through their graphs.

    Args:
        units: The units.
        region: The region that is recomputed.
        traced: Whether the caller needs to know what the outputs keep.

    Attributes:
        ended: Ids of the nested regions of the recompute whose last unit has run, and of the units that have run.
    """

    def __init__(self, units: Units, region: RegionNode, *, traced: bool) -> None:
        self._traced = traced
        first = region.first
        later = units.units[first + 1 : region.last + 1]  # the first unit takes nothing that the region makes
        taken = [[storage for storage, producer in unit.links if producer >= first] for unit in later]
        self._last_use = last_uses(taken, first + 1)
        # By output: inputs that the recompute has unpacked, which are leaves of its graph, and ids of what is in it.
        self._leaves: dict[int, set[int]] = {}
        self._graphs: dict[int, set[int]] = {}
        self.ended: set[int] = set()

    @property
    def storages(self) -> Iterable[int]:
        """The outputs that are still needed."""
        return self._leaves

    @property
    def leaves(self) -> set[int]:
        """Storages that the outputs keep."""
        return set[int]().union(*self._leaves.values())

    @property
    def graphs(self) -> set[int]:
        """Ids of the nested regions and of the units whose graphs the outputs keep."""
        return set[int]().union(*self._graphs.values())

    def pass_on(self, unit: int, own: Unit, inner: Iterable[RegionNode]) -> None:
        """Record the outputs of a unit that has run in the regions `inner`, and forget those no longer needed."""
        if self._traced:
            self._trace(unit, own, inner)
        else:
            self._leaves.update(dict.fromkeys(own.outputs, _NONE))
        for storage in ended(self._leaves, self._last_use, unit):
            del self._leaves[storage]
            self._graphs.pop(storage, None)

    def _trace(self, unit: int, own: Unit, inner: Iterable[RegionNode]) -> None:
        """Record the outputs of a unit with what they keep."""
        # An output that no gradient flows to is in no graph.
        given = own.differentiable
        leaves = set[int]().union(*(self._leaves.get(storage, (storage,)) for storage in given))
        graphs = {id(own), *map(id, inner)}.union(*(self._graphs.get(storage, ()) for storage in given))
        self.ended.update((id(own), *(id(one) for one in inner if one.last <= unit)))
        for storage in own.outputs:
            self._leaves[storage], self._graphs[storage] = leaves, graphs
