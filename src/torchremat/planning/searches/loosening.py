"""The next steps from a tree towards one that recomputes less: what may stand in the place of one of its nodes."""

from __future__ import annotations

from collections.abc import Iterator

from torchremat.schedules.chain import Keep, Region, Tree


def loosened(node: Keep | Region, costs: list[list[float]]) -> Iterator[Tree]:
    """Yield what costs less than a node and keeps a little more, to stand in its place.

    A region is dissolved, or loses its first or last child; what is kept is kept as another of its options.
    """
    if isinstance(node, Keep):
        own = costs[node.stage]
        for option, cost in enumerate(own):
            if cost < own[node.option]:
                yield (Keep(node.stage, option),)
    else:
        if len(node.children) == 1:
            for option in range(1, len(costs[node.first])):
                yield (Keep(node.first, option),)
        yield node.children
        if len(node.children) > 1:
            first, *rest = node.children
            yield (first, Region(tuple(rest)))
            *most, last = node.children
            yield (Region(tuple(most)), last)
