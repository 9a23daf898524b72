"""Predictions: the order simulated with what was measured."""

from dataclasses import replace

import pytest

from pipeline.making import timeline
from probes.pipelines import costs_of, predict, recomputing
from schedules.orders import equal_costs, gpipe, one_forward_one_backward, parse, text
from torchremat.errors import ScheduleError


def test_costs_are_medians_of_what_is_an_event_s_own():
    own = timeline(
        ("F0.0", 0, 1),
        ("F0.1", 1, 2),
        ("F0.2", 2, 9),
        ("B0.0", 10, 20),
        ("R0.0", 11, 14),
        ("C0.0", 11, 13),
        ("_0.0", 15, 16),
    )

    assert costs_of(own) == {(0, "forward"): 1, (0, "recompute"): 3, (0, "copy"): 2, (0, "backward"): 6}


def test_two_events_at_the_same_time_and_one_of_none():
    assert costs_of(timeline(("F0.0", 0, 4), ("F0.0", 0, 4), ("B0.0", 5, 5))) == {(0, "forward"): 2, (0, "backward"): 0}


def test_a_prediction_of_its_own_order_is_itself():
    costs = equal_costs(3, {"forward": 1, "recompute": 1, "backward": 2, "copy": 0.5})
    order = recomputing(one_forward_one_backward(5, 3))
    own = predict(timeline(stages=3), order, costs=costs)

    assert predict(own, order) == own
    assert [own.order(stage) for stage in range(3)] == text(order)
    assert (own.stages, own.workers) == (3, ())


def test_lookahead_is_predicted_from_a_run_without():
    # 44 = (8 + 4 - 1) * 4, and the recomputes of three stages are hidden.
    costs = equal_costs(4, {"forward": 1, "recompute": 1, "backward": 2})
    order = recomputing(gpipe(8, 4))
    measured = predict(timeline(stages=4), order, costs=costs)
    foretold = predict(measured, order, lookahead=True)

    assert (measured.step_s, foretold.step_s) == (44, 41)
    assert replace(measured, predicted=foretold).predicted == foretold


def test_what_is_known_better_goes_before_what_was_measured():
    measured = timeline(("F0.0", 0, 1), ("F1.0", 1, 2), stages=2)

    assert predict(measured, parse(["F0.0", "F1.0"]), costs={(1, "copy"): 5, (1, "forward"): 2}).step_s == 8


def test_a_prediction_knows_the_stages_of_its_workers():
    measured = timeline(("F0.0", 0, 1), ("F1.0", 1, 2), ("F2.0", 1, 2), stages=3)

    assert predict(measured, parse(["F0.0 F2.0", "F1.0"])).workers == ((0, 2), (1,))


def test_what_was_not_measured_is_named():
    with pytest.raises(ScheduleError, match=r"recompute of stage 0 has no cost; recompute of stage 1 has no cost"):
        predict(
            timeline(("F0.0", 0, 1), ("F1.0", 0, 1), ("B0.0", 0, 1), ("B1.0", 0, 1), stages=2), recomputing(gpipe(1, 2))
        )
