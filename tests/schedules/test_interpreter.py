import pytest

from schedules.brute_force import as_tree, evaluate, make_option, make_stage, random_chain, trees
from torchremat.errors import ScheduleError
from torchremat.schedules.chain import Chain, KeepNode, RegionNode
from torchremat.schedules.interpreter import Outcome, interpret


@pytest.mark.parametrize(("stages", "options", "chains"), [(1, 3, 20), (2, 3, 20), (3, 2, 20), (4, 1, 20), (5, 1, 3)])
def test_agrees_with_the_evaluator_on_every_tree(stages, options, chains):
    for seed in range(chains):
        chain = random_chain(seed, stages, options)
        for forest in trees(chain):
            outcome = interpret(chain, as_tree(forest))

            assert (outcome.peak_bytes, outcome.cost) == evaluate(chain, forest), (seed, forest)


def three_stages():
    # Kept, a stage holds 10 and its input of 1; a region holds an input.
    option = make_option(10, peak=12, stopped=11, back=5)
    return Chain(stages=(make_stage(option, forward=3, truncated=2, linked=1, output=1, drop=4),) * 3, tail_bytes=2)


@pytest.mark.parametrize(
    ("tree", "expected"),
    [
        # 33 held and 5 in the first backward.
        ((KeepNode(0), KeepNode(1), KeepNode(2)), Outcome(peak_bytes=38, cost=0)),
        # 3 held and the recompute's 10 + 5.
        ([RegionNode((KeepNode(stage),)) for stage in range(3)], Outcome(peak_bytes=18, cost=6)),
        # 1 held by the region; kept in it 10 (its input is the region's), 11 and 11, and 5 in backward.
        ([RegionNode((KeepNode(0), KeepNode(1), KeepNode(2)))], Outcome(peak_bytes=38, cost=8)),
        # The inner region runs 0 and 1 for 6, and holds nothing of its own. Then 2 holds 11 beside 1, and 5. Its
        # recompute, 3 + 2, is the peak: 1 + 10 + 11 + 5.
        (
            [RegionNode((RegionNode((KeepNode(0), KeepNode(1))), KeepNode(2)))],
            Outcome(peak_bytes=27, cost=13),
        ),
        # The inner region ends the outer: it does not run (only 0 does, for 3), and holds 1. 1 + 10 + 1 + 10 + 11 + 5.
        (
            [RegionNode((KeepNode(0), RegionNode((KeepNode(1), KeepNode(2)))))],
            Outcome(peak_bytes=38, cost=8),
        ),
    ],
)
def test_outcomes_by_hand(tree, expected):
    assert interpret(three_stages(), tree) == expected


def test_tail_and_bases_count():
    stages = [make_stage(forward_base_bytes=100 * index, backward_base_bytes=10) for index in range(2)]

    # Stage 1 in forward: base 100, 3 held by stage 0, its input 1 and 3.
    assert interpret(Chain(stages=tuple(stages)), (KeepNode(0), KeepNode(1))) == Outcome(peak_bytes=107, cost=0)
    # 6 held.
    tail = Chain(stages=tuple(stages), tail_bytes=200)
    assert interpret(tail, (KeepNode(0), KeepNode(1))) == Outcome(peak_bytes=206, cost=0)
    # A recompute runs at the base of its region's last stage: 50, 1 and 2 held by the region and stage 0, 1 and 2.
    late = Chain(stages=(make_stage(), make_stage(make_option(back=0), backward_base_bytes=50)))
    assert interpret(late, (RegionNode((KeepNode(0), KeepNode(1))),)).peak_bytes == 56


def test_external_inputs_are_held_by_the_outermost_region():
    option = make_option(2, external=True, peak=3, stopped=2, back=3)
    chain = Chain(stages=(make_stage(option, external=7, truncated=0),) * 2)

    # Both kept: 2 * (2 + 1 + 7) + 3.
    assert interpret(chain, (KeepNode(0), KeepNode(1))).peak_bytes == 23
    # One region: 1 + 7 + 7, and inside 2, 2 + 1, and 3.
    assert interpret(chain, (RegionNode((KeepNode(0), KeepNode(1))),)).peak_bytes == 23
    # Nested: 1 + 7 + 7, and inside 2 + 1, and 3.
    assert interpret(chain, (RegionNode((RegionNode((KeepNode(0),)), KeepNode(1))),)).peak_bytes == 21


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ((KeepNode(0),), r"the tree covers stages \[0\], but the chain has 0 to 1 in order"),
        ((KeepNode(1), KeepNode(0)), r"the tree covers stages \[1, 0\]"),
        ((KeepNode(0), KeepNode(1, 2)), "stage 1: option 2 of 2 does not exist"),
    ],
)
def test_trees_of_other_chains_are_refused(tree, message):
    chain = Chain(stages=(make_stage(make_option(), make_option()),) * 2)

    with pytest.raises(ScheduleError, match=message):
        interpret(chain, tree)
