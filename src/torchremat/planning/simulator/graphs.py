"""Which graphs the units of a step leave, how long they last, and whether a backward comes to them.

Most graphs last until their backward. One that no backward comes to lasts as long as anybody has what came out of it:
`y.detach()` loses that of `y` with `y`. Until then what was saved for it is held, and so is a region in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from torchremat.planning.simulator.points import UnitBytes
from torchremat.schedules.chain import KeepNode, RegionNode


class Graphs:
    """The graphs of a walk.

    Args:
        sizes: Of the units.
        until: For each unit the time in the trace until which it has a graph; -1 if it leaves none.
        end: The time at which the forward has ended.
    """

    def __init__(self, sizes: Sequence[UnitBytes], until: Sequence[int], end: int) -> None:
        self._until = until
        self._end = end
        # How many units before each have something that backward needs.
        self._needed = [0, *accumulate(size.has_backward for size in sizes)]
        self._idle: list[tuple[int, KeepNode | RegionNode]] = []

    def has_any(self, node: KeepNode | RegionNode) -> bool:
        """Whether a node leaves a graph; one that leaves none holds nothing."""
        return self._has_backward(node) or self._last(node) >= 0

    def waits(self, node: KeepNode | RegionNode) -> bool:
        """Whether a recompute has anything to give to a node: graphs that are gone by then take nothing."""
        return self._has_backward(node) or self._last(node) >= self._end

    def note(self, node: KeepNode | RegionNode) -> None:
        """Note a top-level node that has run, if no backward comes to the graph that it leaves."""
        if not self._has_backward(node) and self._last(node) >= 0:
            self._idle.append((self._last(node), node))

    def lost(self, time: int) -> list[KeepNode | RegionNode]:
        """Return the noted nodes whose graphs are gone by now, and forget them."""
        gone = [node for until, node in self._idle if until < time]
        self._idle = [one for one in self._idle if one[0] >= time]
        return gone

    def _has_backward(self, node: KeepNode | RegionNode) -> bool:
        """Whether anything in a node is needed in backward."""
        return self._needed[node.last + 1] > self._needed[node.first]

    def _last(self, node: KeepNode | RegionNode) -> int:
        return max(self._until[node.first : node.last + 1])
