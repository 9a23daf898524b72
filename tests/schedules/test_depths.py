"""Trees that nest no deeper than what can run."""

import pytest

from torchremat.schedules.chain import DEEPEST, KeepNode, RegionNode, bounded, depth, kept


def nested(count):
    """The lowest tree of `count` stages alike: `((((0) 1) 2) 3)`."""
    node = RegionNode((KeepNode(0),))
    for stage in range(1, count):
        node = RegionNode((node, KeepNode(stage)))
    return node


def text(tree):
    return " ".join(str(node.stage) if isinstance(node, KeepNode) else f"({text(node.children)})" for node in tree)


def test_the_depth_of_trees():
    assert depth(()) == depth((KeepNode(0),)) == 0
    assert depth((KeepNode(0), RegionNode((KeepNode(1), KeepNode(2))), nested(3))) == 3
    assert depth((nested(5_000),)) == 5_000


@pytest.mark.parametrize(
    ("deepest", "left"),
    [
        (8, "(((((((0) 1) 2) 3) 4) 5) 6)"),
        (6, "((((((0 1) 2) 3) 4) 5) 6)"),
        (4, "((((0 1) 2 3) 4 5) 6)"),
        (2, "((0 1 2 3) 4 5 6)"),
        (1, "(0 1 2 3 4 5 6)"),
    ],
)
def test_levels_are_dissolved_evenly(deepest, left):
    assert text(bounded((nested(7),), deepest)) == left


def test_each_outermost_region_is_looked_at_alone():
    shallow = RegionNode((KeepNode(3), RegionNode((KeepNode(4),))))

    found = bounded((nested(3), shallow, KeepNode(5)), 2)

    assert text(found) == "((0 1) 2) (3 (4)) 5"
    assert found[1] is shallow


def test_long_trees_are_bounded_and_cover_the_same_stages():
    found = bounded((nested(5_000), KeepNode(5_000)))

    assert depth(found) == DEEPEST == 64
    assert [node.stage for node in kept(found)] == list(range(5_001))
    assert max(len(region.children) for region in _regions(found)) == 80  # 5000 stages on 64 levels are 78.1


def _regions(tree):
    stack = list(tree)
    while stack:
        node = stack.pop()
        if isinstance(node, RegionNode):
            yield node
            stack.extend(node.children)
