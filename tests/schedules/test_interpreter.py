import pytest

from schedules.brute_force import as_tree, evaluate, make_option, make_stage, random_chain, trees
from schedules.words import parse
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
        ((KeepNode(0), KeepNode(1), KeepNode(2)), Outcome(peak_bytes=38, cost=0, where="B2")),
        # 3 held and the recompute's 10 + 5.
        ([RegionNode((KeepNode(stage),)) for stage in range(3)], Outcome(peak_bytes=18, cost=6, where="B2")),
        # 1 held by the region; kept in it 10 (its input is the region's), 11 and 11, and 5 in backward.
        ([RegionNode((KeepNode(0), KeepNode(1), KeepNode(2)))], Outcome(peak_bytes=38, cost=8, where="B2")),
        # The inner region runs 0 and 1 for 6, and holds nothing of its own. Then 2 holds 11 beside 1, and 5. Its
        # recompute, 3 + 2, is the peak: 1 + 10 + 11 + 5.
        (
            [RegionNode((RegionNode((KeepNode(0), KeepNode(1))), KeepNode(2)))],
            Outcome(peak_bytes=27, cost=13, where="B1"),
        ),
        # The inner region ends the outer: it does not run (only 0 does, for 3), and holds 1. 1 + 10 + 1 + 10 + 11 + 5.
        (
            [RegionNode((KeepNode(0), RegionNode((KeepNode(1), KeepNode(2)))))],
            Outcome(peak_bytes=38, cost=8, where="B2"),
        ),
    ],
)
def test_outcomes_by_hand(tree, expected):
    assert interpret(three_stages(), tree) == expected


def test_tail_and_bases_count():
    stages = [make_stage(forward_base_bytes=100 * index, backward_base_bytes=10) for index in range(2)]

    # Stage 1 in forward: base 100, 3 held by stage 0, its input 1 and 3.
    assert interpret(Chain(stages=tuple(stages)), (KeepNode(0), KeepNode(1))) == Outcome(
        peak_bytes=107, cost=0, where="F1:0"
    )
    # 6 held.
    tail = Chain(stages=tuple(stages), tail_bytes=200)
    assert interpret(tail, (KeepNode(0), KeepNode(1))) == Outcome(peak_bytes=206, cost=0, where="tail")
    # A recompute runs at the base of its region's last stage.
    late = Chain(stages=(make_stage(), make_stage(make_option(back=0), backward_base_bytes=50)))
    assert interpret(late, (RegionNode((KeepNode(0), KeepNode(1))),)).where == "R1:0!"


def test_external_inputs_are_held_by_the_outermost_region():
    option = make_option(2, external=True, peak=3, stopped=2, back=3)
    chain = Chain(stages=(make_stage(option, external=7, truncated=0),) * 2)

    # Both kept: 2 * (2 + 1 + 7) + 3.
    assert interpret(chain, (KeepNode(0), KeepNode(1))).peak_bytes == 23
    # One region: 1 + 7 + 7, and inside 2, 2 + 1, and 3.
    assert interpret(chain, (RegionNode((KeepNode(0), KeepNode(1))),)).peak_bytes == 23
    # Nested: 1 + 7 + 7, and inside 2 + 1, and 3.
    assert interpret(chain, (RegionNode((RegionNode((KeepNode(0),)), KeepNode(1))),)).peak_bytes == 21


def test_a_recompute_may_run_its_last_stage_in_full():
    assert interpret(three_stages(), parse("H0-2 F0 F1 F2 R0:0 R1:0 R2:0 B2 B1 B0")).cost == 9


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("F1:0", "action 0, F1:0: the first forward of stage 0 comes next"),
        ("F0", "action 0, F0: nothing is kept, but no region holds its inputs; keep an option, or hold first"),
        ("F0:1", "action 0, F0:1: option 1 of 1 does not exist"),
        ("H0-1 F0:0", "action 1, F0:0: it keeps, but lies in the region H0-1"),
        ("H0-1 H0-0", "action 1, H0-0: stage 0 of H0-1 has to run first"),
        ("H1-2", "action 0, H1-2: the first forward of stage 0 comes next"),
        ("H0-3", "action 0, H0-3: the last stage is 2"),
        ("H1-0", "action 0, H1-0: it ends before it begins"),
        ("H0-0 F0 R0:0!", "action 2, R0:0!: the first forward of stage 1 comes first"),
        ("F0:0 F1:0 B1", "action 2, B1: the first forward of stage 2 comes first"),
        ("F0:0 F1:0 F2:0 F3:0", "action 3, F3:0: a recompute or a backward comes next"),
        ("F0:0 F1:0 F2:0 B1", "action 3, B1: the backward of stage 2 comes next"),
        ("F0:0 F1:0 F2:0 R0:0", "action 3, R0:0: stage 2 is kept, and its backward comes next"),
        ("F0:0 F1:0 F2:0 B2 B1 B0 B0", "action 6, B0: every backward has run"),
        ("F0:0 F1:0 F2:0 B2 B1 B0 R0:0", "action 6, R0:0: every backward has run"),
        ("H0-2 F0 F1 F2 B2", "action 4, B2: H0-2 comes next and must be recomputed first"),
        ("H0-2 F0 F1 F2 R1:0", "action 4, R1:0: the recompute of H0-2 comes to stage 0 next"),
        ("H0-2 F0 F1 F2 R0:0!", "action 4, R0:0!: it stops at its last save, but stage 1 needs its output"),
        ("H0-2 F0 F1 F2 R0", "action 4, R0: nothing is kept, but no nested region holds its input; keep an option, or"),
        ("H0-2 F0 F1 F2 H1-1", "action 4, H1-1: the recompute of H0-2 comes to stage 0 next"),
        ("H0-2 F0 F1 F2 H0-3", "action 4, H0-3: the region around it ends with stage 2"),
        ("H0-2 F0 F1 F2 H0-1 R0:0", "action 5, R0:0: it keeps, but lies in the nested region H0-1"),
        ("H0-2 F0 F1 F2 H0-1 R1", "action 5, R1: stage 0 of H0-1 has to run first"),
        ("H0-2 F0 F1 F2 H0-1 H0-0", "action 5, H0-0: stage 0 of H0-1 has to run first"),
        ("H0-2 F0 F1 F2 R0:0 B0", "action 5, B0: the recompute of H0-2 comes to stage 1 first"),
        ("H0-2 F0 F1 F2 R0:0 H1-2 R1", "action 6, R1: nothing is kept, but no nested region holds its input"),
        ("F0:0 F1:0", "after 2 actions: the first forward of stage 2 is missing"),
        ("F0:0 F1:0 F2:0 B2", "after 4 actions: the backward of stage 1 is missing"),
        ("H0-2 F0 F1 F2", "after 4 actions: the backward of stage 2 is missing"),
    ],
)
def test_bad_schedules_are_refused(line, message):
    with pytest.raises(ScheduleError) as raised:
        interpret(three_stages(), parse(line))

    assert str(raised.value).startswith(message)


def test_actions_and_nodes_are_not_mixed():
    with pytest.raises(ScheduleError, match="1 nodes of a tree and 1 actions are mixed"):
        interpret(three_stages(), (KeepNode(0), *parse("F1:0")))
