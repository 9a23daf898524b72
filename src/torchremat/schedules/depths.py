"""The nesting depth of a tree's regions, and trees that nest no deeper than can run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from torchremat.schedules.chain import KeepNode, RegionNode, Tree

# NOTE [ How deep regions may nest ]
#
# A call in d regions is d nested calls, in the forward as in each recompute, and to unpack an input of the innermost
# region the recomputes of all d may nest. Python's own stack has room for 1000 calls, and each level takes
#
#   5    a call that runs in regions
#   8    a recompute that asks for the result of an enclosing recompute
#
# So 64 levels take 512 at most, which leaves the other half to the model, the loop around it, and that loop's callers.
# The cheapest and lowest trees of long chains nest as deep as the chain is long. In such a tree regions are dissolved:
# evenly, since regions dissolved in one place are all kept there at once.
DEEPEST = 64


def depth(tree: Tree) -> int:
    """Return the greatest number of nested regions in a tree."""
    most, stack = 0, [(node, 1) for node in tree]
    while stack:
        node, level = stack.pop()
        if isinstance(node, RegionNode):
            most = max(most, level)
            stack.extend((child, level + 1) for child in node.children)
    return most


def bounded(tree: Tree, deepest: int = DEEPEST) -> Tree:
    """Return the tree with levels of regions dissolved, evenly, where it nests deeper than `deepest`.

    Of three levels with two allowed, the innermost is dissolved:

    >>> nested = RegionNode((KeepNode(0), RegionNode((KeepNode(1), RegionNode((KeepNode(2),)), KeepNode(3)))))
    >>> bounded((nested,), 2) == (RegionNode((KeepNode(0), RegionNode((KeepNode(1), KeepNode(2), KeepNode(3))))),)
    True

    Args:
        tree: The tree. The outermost regions stay, so the same stages are recomputed.
        deepest: At least 1.
    """
    return tuple(_bounded(node, deepest) for node in tree)


@dataclass
class _Open:
    """A region whose children are being visited."""

    waiting: Iterator[KeepNode | RegionNode]
    nodes: list[KeepNode | RegionNode] = field(default_factory=list["KeepNode | RegionNode"])


def _bounded(node: KeepNode | RegionNode, deepest: int) -> KeepNode | RegionNode:
    levels = depth((node,))
    if levels <= deepest:
        return node
    # With twice as many levels as allowed, every second level stays, and so on; the first always stays.
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
