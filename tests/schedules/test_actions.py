import pytest

from schedules.brute_force import as_tree, make_option, make_stage, random_chain, trees
from schedules.words import parse
from torchremat.errors import ScheduleError
from torchremat.schedules.actions import (
    BackwardAction,
    ForwardAction,
    HoldAction,
    RecomputeAction,
    schedule,
    text,
)
from torchremat.schedules.chain import Chain, KeepNode, RegionNode


def chain_of(count):
    return Chain(stages=(make_stage(make_option(), make_option()),) * count)


@pytest.mark.parametrize(
    ("tree", "expected"),
    [
        ((KeepNode(0), KeepNode(1)), "F0:0 F1:0 B1 B0"),
        ((KeepNode(0, 1), KeepNode(1)), "F0:1 F1:0 B1 B0"),
        ((RegionNode((KeepNode(0),)), KeepNode(1)), "H0-0 F0 F1:0 B1 R0:0! B0"),
        ((KeepNode(0), RegionNode((KeepNode(1), KeepNode(2, 1)))), "F0:0 H1-2 F1 F2 R1:0 R2:1! B2 B1 B0"),
        # The inner region runs without saving in the recompute of the outer, then on its own.
        (
            (RegionNode((RegionNode((KeepNode(0), KeepNode(1))), KeepNode(2))), KeepNode(3)),
            "H0-2 F0 F1 F2 F3:0 B3 H0-1 R0 R1 R2:0! B2 R0:0 R1:0! B1 B0",
        ),
        # The inner region ends the outer, so it does not run in its recompute.
        (
            (RegionNode((KeepNode(0), RegionNode((KeepNode(1), KeepNode(2))))),),
            "H0-2 F0 F1 F2 R0:0 H1-2 R1:0 R2:0! B2 B1 B0",
        ),
        (
            (RegionNode((KeepNode(0), RegionNode((RegionNode((KeepNode(1),)), KeepNode(2))), KeepNode(3))),),
            "H0-3 F0 F1 F2 F3 R0:0 H1-2 R1 R2 R3:0! B3 H1-1 R1 R2:0! B2 R1:0! B1 B0",
        ),
    ],
)
def test_schedules_of_trees(tree, expected):
    stages = tree[-1].last + 1

    assert text(schedule(tree, chain_of(stages))) == expected


def test_parse_reads_what_text_writes():
    for forest in trees(random_chain(0, 3, 2)):
        actions = tuple(schedule(as_tree(forest), chain_of(3)))

        assert parse(text(actions)) == actions


def test_parse_reads_every_action():
    assert parse("F3 F3:1 H3-5 R3 R3:1 R3:1! B12") == (
        ForwardAction(3),
        ForwardAction(3, 1),
        HoldAction(3, 5),
        RecomputeAction(3),
        RecomputeAction(3, 1),
        RecomputeAction(3, 1, stops=True),
        BackwardAction(12),
    )


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ((KeepNode(0),), r"the tree covers stages \[0\], but the chain has 0 to 1 in order"),
        ((KeepNode(1), KeepNode(0)), r"the tree covers stages \[1, 0\]"),
        ((KeepNode(0), KeepNode(1, 2)), "stage 1: option 2 of 2 does not exist"),
    ],
)
def test_trees_of_other_chains_are_refused(tree, message):
    with pytest.raises(ScheduleError, match=message):
        schedule(tree, chain_of(2))
