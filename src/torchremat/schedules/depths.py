"""How deep the regions of a tree nest, and trees that nest no deeper than what can run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from torchremat.schedules.chain import KeepNode, RegionNode, Tree

# NOTE [ How deep regions may nest ]
#
# A call in d regions is d calls in one another, in the forward as in each recompute, and to unpack an input of the
# innermost region recomputes of all d may begin in one another. In Python's own stack, where there is room for 1000
# calls, that takes for each level
#
#   5    a call that runs in regions
#   8    a recompute that asks for what a recompute around it makes
#
# So 64 levels take 512 at most, which leaves the other half to the model, the loop around it, and whatever calls that.
# The cheapest and lowest trees of long chains nest as deep as the chain is long. Such a tree has regions dissolved:
# evenly, since what is dissolved in one place is kept there all at once.
DEEPEST = 64


def depth(tree: Tree) -> int:
    """Return how many regions of a tree are in one another at most."""
    most, stack = 0, [(node, 1) for node in tree]
    while stack:
        node, level = stack.pop()
        if isinstance(node, RegionNode):
            most = max(most, level)
            stack.extend((child, level + 1) for child in node.children)
    return most


def bounded(tree: Tree, deepest: int = DEEPEST) -> Tree:
    """Return the tree with levels of regions dissolved, evenly, where it nests deeper than `deepest`.

    Of three levels, of which two may be, the innermost is dissolved:

    >>> nested = RegionNode((KeepNode(0), RegionNode((KeepNode(1), RegionNode((KeepNode(2),)), KeepNode(3)))))
    >>> bounded((nested,), 2) == (RegionNode((KeepNode(0), RegionNode((KeepNode(1), KeepNode(2), KeepNode(3))))),)
    True

    Args:
        tree: What to change. The outermost regions stay, so the same stages are recomputed.
        deepest: At least 1.
    """
    return tuple(_bounded(node, deepest) for node in tree)


@dataclass
class _Open:
    """A region whose children are being looked at."""

    waiting: Iterator[KeepNode | RegionNode]
    nodes: list[KeepNode | RegionNode] = field(default_factory=list["KeepNode | RegionNode"])


def _bounded(node: KeepNode | RegionNode, deepest: int) -> KeepNode | RegionNode:
    levels = depth((node,))
    if levels <= deepest:
        return node
    # Of each two levels one stays if there are twice as many as may be, and so on; the first always does.
    stays = [-(-(level + 1) * deepest // levels) > -(-level * deepest // levels) for level in range(levels)]
    around = [_Open(iter((node,)))]
    while True:
        child = next(around[-1].waiting, None)
        if isinstance(child, RegionNode):
            around.append(_Open(iter(child.children)))
        elif child is not None:
            around[-1].nodes.append(child)
        elif len(around) > 1:
            nodes = around.pop().nodes
            around[-1].nodes += [RegionNode(tuple(nodes))] if stays[len(around) - 1] else nodes
        else:
            (found,) = around[0].nodes
            return found
