"""The next steps from a tree towards one that recomputes less: replacements for one of its nodes."""

from __future__ import annotations

from collections.abc import Iterator

from torchremat.schedules.chain import KeepNode, RegionNode, Tree


def loosened(node: KeepNode | RegionNode, costs: list[list[float]]) -> Iterator[Tree]:
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
