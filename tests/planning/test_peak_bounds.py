"""What is said of a change without a walk, against walks."""

import random

import pytest

from planning.kinds import KINDS, SEVERAL_ROOTS
from planning.steps import blocks, random_tree
from probes.planning import KeepNode, PeakBounds, RegionNode, predict


# With several roots a change of one call is one of the others too, so nobody asks.
@pytest.mark.parametrize("kind", sorted(KINDS.keys() - SEVERAL_ROOTS))
def test_a_change_is_never_said_to_need_more_than_it_does(kind):
    own, rng = blocks(*KINDS[kind]()), random.Random(0)
    assert len(own.units.roots) == 1
    told = checked = 0
    for _ in range(12):
        tree = random_tree(own.units, rng)
        peak_bounds = PeakBounds(own, tree)
        for place, node in enumerate(tree):
            changed = node.children if isinstance(node, RegionNode) else (RegionNode((node,)),)
            least = peak_bounds.least_bytes(place, changed)
            found = predict(own, (*tree[:place], *changed, *tree[place + 1 :])).peak_bytes

            assert least <= found
            checked += 1
            told += least == found
    # Were nothing ever told, every change would be walked through.
    assert told * 10 > checked


def test_nothing_is_known_of_what_is_first_in_backward_but_for_the_end_of_the_forward():
    own = blocks(*KINDS["loop"]())
    last = len(own.units.units) - 1
    peak_bounds = PeakBounds(own, tuple(map(KeepNode, range(last + 1))))

    assert (
        0 < peak_bounds.least_bytes(last, (RegionNode((KeepNode(last),)),)) < peak_bounds.least_bytes(0, (KeepNode(0),))
    )
