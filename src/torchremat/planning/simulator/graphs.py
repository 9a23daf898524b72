"""Which graphs the units of a step leave, how long they live, and whether a backward reaches them.

Most graphs live until their backward. A graph that no backward reaches lives as long as its outputs are referenced:
after `y.detach()`, the graph of `y` dies with `y`. Until then its saved tensors are held, and so are its regions.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from torchremat.planning.simulator.points import UnitBytes
from torchremat.schedules.chain import KeepNode, RegionNode


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
        self._idle: list[tuple[int, KeepNode | RegionNode]] = []

    def has_any(self, node: KeepNode | RegionNode) -> bool:
        """Whether a node leaves a graph; a node without a graph holds nothing."""
        return self._has_backward(node) or self._last(node) >= 0

    def waits(self, node: KeepNode | RegionNode) -> bool:
        """Whether a recompute has anything to give to a node: graphs that are freed by then take nothing."""
        return self._has_backward(node) or self._last(node) >= self._end

    def note(self, node: KeepNode | RegionNode) -> None:
        """Record a top-level node that has run, if no backward reaches the graph that it leaves."""
        if not self._has_backward(node) and self._last(node) >= 0:
            self._idle.append((self._last(node), node))

    def lost(self, time: int) -> list[KeepNode | RegionNode]:
        """Return the recorded nodes whose graphs are freed by now, and forget them."""
        gone = [node for until, node in self._idle if until < time]
        self._idle = [one for one in self._idle if one[0] >= time]
        return gone

    def _has_backward(self, node: KeepNode | RegionNode) -> bool:
        """Whether backward needs anything in a node."""
        return self._needed[node.last + 1] > self._needed[node.first]

    def _last(self, node: KeepNode | RegionNode) -> int:
        return max(self._until[node.first : node.last + 1])
