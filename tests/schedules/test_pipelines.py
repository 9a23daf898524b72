"""Orders of pipelines, and what is wrong with one."""

import random

import pytest

from schedules.orders import equal_costs, gpipe, one_forward_one_backward, parse, text
from torchremat.errors import ScheduleError
from torchremat.schedules.pipelines import (
    Action,
    check_order,
    clock_cycles,
    recomputing,
    simulate,
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


UNITS = {"forward": 1, "recompute": 1, "backward": 2}


def step_s(order, costs, **options):
    return max(span.end_s for span in simulate(order, costs, **options))


def timetable(order, costs, **options):
    return [
        " ".join(
            f"{span.action}@{span.start_s:g}-{span.end_s:g}"
            for span in simulate(order, costs, **options)
            if span.worker == worker
        )
        for worker in range(len(order))
    ]


def test_workers_that_wait_for_each_other_are_named():
    order = parse(["F0.0 B0.0 F0.1 B0.1", "F1.1 B1.1 F1.0 B1.0"])

    with pytest.raises(ScheduleError) as caught:
        simulate(order, equal_costs(2, UNITS))
    assert str(caught.value).split("\n") == [
        "2 of 2 workers are stuck after 1 actions:",
        "  worker 0: B0.0, its action 1, waits for B1.0, action 3 of worker 1",
        "  worker 1: F1.1, its action 0, waits for F0.1, action 2 of worker 0",
    ]


def test_a_worker_may_be_stuck_on_itself():
    with pytest.raises(ScheduleError, match=r"worker 0: F1.0, its action 0, waits for F0.0, action 1 of worker 0"):
        simulate(parse(["F1.0 F0.0"]), equal_costs(2, UNITS))


def test_costs_that_are_missing_or_none():
    with pytest.raises(ScheduleError) as caught:
        simulate(gpipe(1, 2), {(0, "forward"): 1, (0, "backward"): -1, (1, "forward"): float("nan")})

    assert str(caught.value) == (
        "costs that an order cannot run on: backward of stage 1 has no cost; backward of stage 0 costs -1 s, which is "
        "not a length of time; forward of stage 1 costs nan s, which is not a length of time"
    )


def test_a_recompute_waits_for_its_gradient():
    order = recomputing(gpipe(1, 2), chosen=lambda stage, microbatch: stage == 0)

    assert timetable(order, equal_costs(2, UNITS)) == ["F0.0@0-1 R0.0@4-5 B0.0@5-7", "F1.0@1-2 B1.0@2-4"]


def test_with_lookahead_it_does_not():
    order = recomputing(gpipe(1, 2), chosen=lambda stage, microbatch: stage == 0)

    assert timetable(order, equal_costs(2, UNITS), lookahead=True) == [
        "F0.0@0-1 R0.0@1-2 B0.0@4-6",
        "F1.0@1-2 B1.0@2-4",
    ]


def test_copies_are_the_receiver_s_and_beside_what_it_computes():
    order = recomputing(gpipe(1, 2))

    assert timetable(order, equal_costs(2, {**UNITS, "copy": 3}), lookahead=True) == [
        "F0.0@0-1 R0.0@1-2 C0.0@8-11 B0.0@11-13",
        "C1.0@1-4 F1.0@4-5 R1.0@5-6 B1.0@6-8",
    ]


def test_stages_of_one_worker_copy_nothing():
    order = parse(["F0.0 F1.0 B1.0 B0.0"])

    assert timetable(order, equal_costs(2, {**UNITS, "copy": 3})) == ["F0.0@0-1 F1.0@1-2 B1.0@2-4 B0.0@4-6"]


def test_a_split_backward_sends_its_gradient_before_the_weights():
    order = parse(["F0.0 I0.0 W0.0", "F1.0 I1.0 W1.0"])
    costs = equal_costs(2, {"forward": 1, "input": 1, "weight": 5})

    assert timetable(order, costs) == ["F0.0@0-1 I0.0@3-4 W0.0@4-9", "F1.0@1-2 I1.0@2-3 W1.0@3-8"]


def test_two_interleaved_stages_on_each_of_two_workers():
    # With m = 2 microbatches, n = 2 workers and v = 2 stages each: (m + (n - 1) / v) * (1 + 2), where the two stages of
    # a worker take 1 and 2 together. As one stage they take (2 + 1) * (1 + 2) = 9.
    order = parse(
        ["F0.0 F0.1 F2.0 F2.1 B2.0 B2.1 B0.0 B0.1", "F1.0 F1.1 F3.0 B3.0 F3.1 B3.1 B1.0 B1.1"],
    )

    assert step_s(order, equal_costs(4, {"forward": 0.5, "backward": 1})) == 7.5


# What schedules of torch 2.13 give for 4 microbatches, and two stages on each of two workers.
OF_TORCH = {
    "Interleaved1F1B": [
        "F0.0 F0.1 F2.0 F2.1 F0.2 B2.0 F0.3 B2.1 F2.2 B0.0 F2.3 B0.1 B2.2 B2.3 B0.2 B0.3",
        "F1.0 F1.1 F3.0 B3.0 F3.1 B3.1 F1.2 B1.0 F1.3 B1.1 F3.2 B3.2 F3.3 B3.3 B1.2 B1.3",
    ],
    "InterleavedZeroBubble": [
        "F0.0 F0.1 F2.0 F2.1 I2.0 W2.0 F0.2 I2.1 W2.1 F0.3 I0.0 W0.0 F2.2 I0.1 W0.1 F2.3 I2.2 W2.2 I2.3 W2.3 I0.2 W0.2 "
        "I0.3 W0.3",
        "F1.0 F1.1 F3.0 I3.0 F3.1 I3.1 W3.0 F1.2 I1.0 W3.1 F1.3 I1.1 W1.0 F3.2 I3.2 W1.1 F3.3 I3.3 W3.2 I1.2 W3.3 I1.3 "
        "W1.2 W1.3",
    ],
    "ZBVZeroBubble": [
        "F0.0 F0.1 F0.2 F3.0 I3.0 W3.0 F3.1 I3.1 W3.1 F0.3 I0.0 W0.0 F3.2 I3.2 W3.2 I0.1 W0.1 F3.3 I3.3 W3.3 I0.2 W0.2 "
        "I0.3 W0.3",
        "F1.0 F2.0 F1.1 F2.1 I2.0 W2.0 F1.2 I1.0 W1.0 F2.2 I2.1 W2.1 F1.3 I1.1 W1.1 F2.3 I2.2 W2.2 I1.2 I2.3 I1.3 W1.2 "
        "W2.3 W1.3",
    ],
    "DualPipeV": [
        "F0.0 F0.1 F0.2 F3.0 I3.0 W3.0 F3.1 F0.3 B3.1 F3.2 B0.0 B3.2 F3.3 B0.1 B3.3 I0.2 W0.2 I0.3 W0.3",
        "F1.0 F2.0 F1.1 F2.1 F1.2 B2.0 F2.2 B1.0 F1.3 B2.1 F2.3 B1.1 B2.2 B1.2 I2.3 I1.3 W2.3 W1.3",
    ],
}


@pytest.mark.parametrize(
    ("name", "expected_s"),
    # A worker works 4 * 2 * (1 + 2) = 24, and idles for a forward and a backward; where that is split, for 1 alone.
    [("Interleaved1F1B", 27), ("InterleavedZeroBubble", 25), ("ZBVZeroBubble", 25), ("DualPipeV", 25)],
)
def test_interleaved_schedules_of_torch(name, expected_s):
    costs = equal_costs(4, {"forward": 1, "backward": 2, "input": 1, "weight": 1})

    assert step_s(parse(OF_TORCH[name]), costs) == expected_s


def test_forward_alone():
    assert step_s(parse(["F0.0 F0.1", "F1.0 F1.1"]), equal_costs(2, {"forward": 1})) == 3


@pytest.mark.parametrize("microbatches", [1, 2, 5, 8])
@pytest.mark.parametrize("stages", [1, 2, 3, 6])
def test_gpipe_and_1f1b_take_what_the_closed_form_says(microbatches, stages):
    costs = equal_costs(stages, {"forward": 3, "backward": 5})
    expected_s = (microbatches + stages - 1) * (3 + 5)

    assert step_s(gpipe(microbatches, stages), costs) == expected_s
    assert step_s(gpipe(microbatches, stages, in_reverse=False), costs) == expected_s
    assert step_s(one_forward_one_backward(microbatches, stages), costs) == expected_s


@pytest.mark.parametrize("stages", [2, 4, 8])
def test_lookahead_hides_the_recomputes_of_gpipe_but_the_last_stage_s(stages):
    # The last stage goes on without a pause: m F, then m times R and B. Its last gradient then passes n - 1 stages,
    # each of which has recomputed already. Without lookahead all of them recompute then.
    microbatches = 2 * stages
    order, costs = recomputing(gpipe(microbatches, stages)), equal_costs(stages, UNITS)

    assert step_s(order, costs) == (microbatches + stages - 1) * 4
    assert step_s(order, costs, lookahead=True) == (microbatches + stages - 1) * 4 - (stages - 1)


@pytest.mark.parametrize(
    ("make", "stages", "microbatches", "copy", "percent"),
    [
        (gpipe, 4, 8, 0, "6.8"),
        (gpipe, 8, 16, 0, "7.6"),
        (one_forward_one_backward, 4, 16, 0.5, "15.6"),
        (one_forward_one_backward, 8, 32, 0.5, "17.9"),
        (one_forward_one_backward, 16, 64, 0.5, "19.0"),
    ],
)
def test_what_lookahead_gains(make, stages, microbatches, copy, percent):
    order = recomputing(make(microbatches, stages))
    costs = equal_costs(stages, {**UNITS, "copy": copy})
    gain = 1 - step_s(order, costs, lookahead=True) / step_s(order, costs)

    assert f"{100 * gain:.1f}" == percent


def relaxed(order, costs, *, lookahead):
    """Ends of all actions by iteration until nothing moves, from rules written down anew; shares no code."""
    worker = {(a.kind, a.stage, a.microbatch): w for w, actions in enumerate(order) for a in actions}
    rules = {}
    for actions in order:
        for place, a in enumerate(actions):
            s, i = a.stage, a.microbatch
            asked = {
                "forward": [("forward", s - 1, i)],
                "recompute": [("forward", s, i)] + [(k, s + 1, i) for k in ("backward", "input") if not lookahead],
                "backward": [("forward", s, i), ("recompute", s, i), ("backward", s + 1, i), ("input", s + 1, i)],
                "input": [("forward", s, i), ("recompute", s, i), ("backward", s + 1, i), ("input", s + 1, i)],
                "weight": [("input", s, i)],
            }[a.kind]
            own = actions[place - 1] if place else None
            rules[a.kind, s, i] = (
                [key for key in asked if key in worker],
                own and (own.kind, own.stage, own.microbatch),
            )
    ends = dict.fromkeys(rules, 0.0)
    for _ in range(len(rules) + 1):
        for key, (needs, own) in rules.items():
            there = [
                ends[n] + (costs[key[1], "copy"] if n[1] != key[1] and worker[n] != worker[key] else 0) for n in needs
            ]
            ends[key] = max([0.0, *there, ends[own] if own else 0.0]) + costs[key[1], key[0]]
    return ends


ORDERS = {
    "gpipe": recomputing(gpipe(5, 3)),
    "1f1b": recomputing(one_forward_one_backward(6, 4), chosen=lambda stage, microbatch: stage < 3),
    "interleaved": recomputing(
        parse(["F0.0 F0.1 F2.0 F2.1 B2.0 B2.1 B0.0 B0.1", "F1.0 F1.1 F3.0 B3.0 F3.1 B3.1 B1.0 B1.1"])
    ),
    **{name: recomputing(parse(lines)) for name, lines in OF_TORCH.items()},
}


@pytest.mark.parametrize("name", ORDERS)
@pytest.mark.parametrize("lookahead", [False, True])
def test_random_costs_by_iteration(name, lookahead):
    draws = random.Random(name)
    for _ in range(20):
        kinds = ("forward", "recompute", "backward", "input", "weight", "copy")
        costs = {(stage, kind): draws.choice([0.0, 0.5, 1.0, 3.0]) for stage in range(4) for kind in kinds}
        spans = simulate(ORDERS[name], costs, lookahead=lookahead)
        ends = {
            (span.action.kind, span.action.stage, span.action.microbatch): span.end_s
            for span in spans
            if span.action.kind != "copy"
        }

        assert ends == relaxed(ORDERS[name], costs, lookahead=lookahead)
