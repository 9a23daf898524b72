"""Orders of pipelines, and what is wrong with one."""

import pytest

from schedules.orders import gpipe, one_forward_one_backward, parse, text
from torchremat.errors import ScheduleError
from torchremat.schedules.pipelines import (
    Action,
    check_order,
    clock_cycles,
    recomputing,
)


@pytest.mark.parametrize(
    ("microbatches", "stages", "cycles"),
    [
        (1, 1, [[(0, 0)]]),
        (1, 3, [[(0, 0)], [(0, 1)], [(0, 2)]]),
        (3, 1, [[(0, 0)], [(1, 0)], [(2, 0)]]),
        (3, 3, [[(0, 0)], [(1, 0), (0, 1)], [(2, 0), (1, 1), (0, 2)], [(2, 1), (1, 2)], [(2, 2)]]),
        (4, 2, [[(0, 0)], [(1, 0), (0, 1)], [(2, 0), (1, 1)], [(3, 0), (2, 1)], [(3, 1)]]),
    ],
)
def test_clock_cycles(microbatches, stages, cycles):
    assert list(clock_cycles(microbatches, stages)) == cycles


def test_gpipe_comes_back_in_reverse():
    assert text(gpipe(3, 2)) == ["F0.0 F0.1 F0.2 B0.2 B0.1 B0.0", "F1.0 F1.1 F1.2 B1.2 B1.1 B1.0"]
    assert text(gpipe(3, 2, in_reverse=False))[1] == "F1.0 F1.1 F1.2 B1.0 B1.1 B1.2"


def test_1f1b_holds_one_microbatch_less_on_each_stage():
    assert text(one_forward_one_backward(4, 3)) == [
        "F0.0 F0.1 F0.2 B0.0 F0.3 B0.1 B0.2 B0.3",
        "F1.0 F1.1 B1.0 F1.2 B1.1 F1.3 B1.2 B1.3",
        "F2.0 B2.0 F2.1 B2.1 F2.2 B2.2 F2.3 B2.3",
    ]


def test_1f1b_with_fewer_microbatches_than_stages():
    assert text(one_forward_one_backward(1, 3)) == ["F0.0 B0.0", "F1.0 B1.0", "F2.0 B2.0"]


def test_what_is_chosen_is_recomputed_before_its_backward():
    order = recomputing(gpipe(3, 2), chosen=lambda stage, microbatch: stage == 0 and microbatch < 2)

    assert text(order) == ["F0.0 F0.1 F0.2 B0.2 R0.1 B0.1 R0.0 B0.0", "F1.0 F1.1 F1.2 B1.2 B1.1 B1.0"]


def test_a_split_backward_is_recomputed_before_its_first_part():
    assert text(recomputing(parse(["F0.0 I0.0 W0.0"]))) == ["F0.0 R0.0 I0.0 W0.0"]


def test_the_text_of_actions():
    lines = ["F0.0 R0.0 B0.0 F0.11", "I1.0 W1.0 C1.0 _1.0"]

    assert text(parse(lines)) == lines
    assert parse(["I12.3"]) == ((Action(kind="input", stage=12, microbatch=3),),)


@pytest.mark.parametrize("sizes", [(0, 2), (2, 0), (-1, -1)])
def test_sizes_are_at_least_1(sizes):
    with pytest.raises(ScheduleError, match="expected at least 1 of both"):
        list(clock_cycles(*sizes))


@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        (["F0.0 F0.0"], "F0.0 of worker 0: it is there twice, worker 0 has it"),
        (["F0.0", "F0.1"], "F0.1 of worker 1: stage 0 belongs to worker 0"),
        (["F0.0 C0.0"], "C0.0 of worker 0: an order cannot hold a copy"),
        (["F1.0"], "stage 0 has no worker, the last is 1"),
        (["F0.0", "F1.1"], "F1.1 needs F0.1, which no worker runs"),
        (["B0.0"], "B0.0 needs F0.0, which no worker runs"),
        (["B0.0 F0.0"], "B0.0 needs F0.0, which worker 0 runs after it"),
        (["F0.0 B0.0 R0.0"], "B0.0 needs R0.0, which worker 0 runs after it"),
        (["F0.0 R0.0"], "R0.0 is of no use, no worker runs B0.0 or I0.0"),
        (["F0.0 W0.0"], "W0.0 needs I0.0, which no worker runs"),
        (["F0.0 I0.0 B0.0"], "B0.0 is the whole backward, but I0.0 is in the order as well"),
        (["F0.0 B0.0", "F1.0"], "B0.0 needs B1.0 or I1.0, and no worker runs either"),
    ],
)
def test_what_is_missing_is_named(lines, problem):
    with pytest.raises(ScheduleError) as caught:
        check_order(parse(lines))

    assert f"  {problem}" in str(caught.value).split("\n")


def test_all_problems_are_in_one_message():
    with pytest.raises(ScheduleError) as caught:
        check_order(parse([" ".join(f"B0.{microbatch}" for microbatch in range(14))]))

    lines = str(caught.value).split("\n")
    assert lines[0] == "an order of 1 workers that cannot run:"
    assert lines[1] == "  B0.0 needs F0.0, which no worker runs"
    assert lines[13] == "  ... and 2 more"
