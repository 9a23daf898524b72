"""Timelines of pipelines: whose time it is, what is idle, the table, and JSON."""

from dataclasses import replace

import pytest

from pipeline.making import timeline
from probes.pipelines import PipelineEvent, pieces
from torchremat.errors import ScheduleError
from torchremat.pipeline.timeline import Timeline


def test_an_inner_event_takes_the_time_of_the_outer():
    own = timeline(("B0.0", 0, 10), ("R0.0", 2, 5), ("_0.0", 3, 4))

    assert [(str(one.event), one.start_s, one.end_s) for one in pieces(own.events)] == [
        ("B0.0", 0, 2),
        ("R0.0", 2, 3),
        ("_0.0", 3, 4),
        ("R0.0", 4, 5),
        ("B0.0", 5, 10),
    ]
    assert {kind: s for kind, s in own.seconds(0).items() if s} == {"backward": 7, "recompute": 2, "wait": 1}


def test_an_event_that_is_overtaken_loses_the_rest_of_its_time():
    own = timeline(("F0.0", 0, 6), ("F0.1", 4, 10))

    assert [(str(one.event), one.start_s, one.end_s) for one in pieces(own.events)] == [
        ("F0.0", 0, 4),
        ("F0.1", 4, 10),
    ]


def test_copies_take_no_time_from_computations():
    own = timeline(("F0.0", 0, 6), ("C0.1", 4, 8))

    assert (own.seconds(0)["forward"], own.seconds(0)["copy"], own.busy_s(0)) == (6, 4, 8)


def test_overlaps_are_busy_once_and_waits_are_idle():
    own = timeline(("F0.0", 0, 4), ("F0.1", 2, 6), ("C0.2", 5, 7), ("C0.3", 6, 7), ("_0.2", 7, 9), ("B0.0", 9, 10))

    assert own.busy_s(0) == 8
    assert own.idle_share == (pytest.approx(0.2),)


def test_a_recompute_while_a_stage_waits_is_busy():
    assert timeline(("_0.0", 0, 10), ("R0.0", 1, 4)).idle_share == (pytest.approx(0.7),)


def test_the_step_is_that_of_all_stages():
    own = timeline(("F0.0", 100, 101), ("F1.0", 103, 104), stages=3)

    assert (own.start_s, own.step_s) == (100, 4)
    assert own.idle_share == (0.75, 0.75, 1.0)


def test_stages_of_one_worker_are_idle_together():
    own = timeline(("F0.0", 0, 1), ("F1.0", 1, 2), ("F2.0", 1, 2), ("F3.0", 3, 4), stages=4, workers=((0, 2), (1, 3)))

    assert own.idle_share == (0.5, 0.5, 0.5, 0.5)


def test_no_events_are_no_time():
    own = timeline(stages=2)

    assert (own.step_s, own.idle_share, own.order()) == (0, (0.0, 0.0), "")
    assert str(own).splitlines()[0] == "step  0.0 ms"


def test_order_is_by_start_and_without_copies_and_waits():
    own = timeline(("F0.1", 1, 2), ("C1.0", 1, 3), ("F0.0", 0, 1), ("_0.0", 2, 9), ("R0.0", 3, 4), stages=2)

    assert own.order() == "F0.0 F0.1 R0.0"
    assert own.order(1) == ""
    assert own.order(kinds=("copy", "wait")) == "C1.0 _0.0"


def test_the_table():
    own = timeline(("F0.0", 0, 0.001), ("R0.0", 0.002, 0.0035), ("I0.0", 0.004, 0.006), ("W0.0", 0.007, 0.008))

    assert str(own) == "\n".join(
        [
            "step  8.0 ms",
            "stage    forward ms  recompute ms   backward ms     copies ms          idle",
            "    0           1.0           1.5           3.0           0.0         31.2%",
        ]
    )


def test_what_was_predicted_stands_beside_it():
    own = timeline(("F0.0", 0, 0.001), ("B1.0", 0, 0.002), stages=2)
    own = replace(own, predicted=timeline(("F0.0", 0, 0.004), ("C1.0", 0, 0.001), stages=2))

    assert str(own) == "\n".join(
        [
            "step  2.0 ms, 4.0 ms predicted; predictions are in brackets",
            "stage          forward ms        recompute ms         backward ms           copies ms                idle",
            "    0           1.0 (4.0)           0.0 (0.0)           0.0 (0.0)           0.0 (0.0)        50.0% (0.0%)",
            "    1           0.0 (0.0)           0.0 (0.0)           2.0 (0.0)           0.0 (1.0)        0.0% (75.0%)",
        ]
    )


def test_json_and_back():
    own = timeline(("F0.0", 0.25, 0.5), ("F1.0", 1, 2), stages=2, workers=((1,), (0,)))
    own = replace(own, predicted=timeline(("_1.3", 0, 1), stages=2))

    assert Timeline.from_json(own.to_json()) == own


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "[]",
        '{"stages": 1, "workers": [], "events": []}',
        '{"stages": 1, "workers": [], "events": [[0, 0, "forward", 1]], "predicted": null}',
        '{"stages": 1, "workers": [], "events": [[0, 0, "nap", 1, 2]], "predicted": null}',
        '{"stages": "1", "workers": [], "events": [[0, 0, "wait", 1, 2]], "predicted": null}',
    ],
)
def test_a_text_that_is_no_timeline(content):
    with pytest.raises(ScheduleError, match="this text is not a timeline: "):
        Timeline.from_json(content)


def test_an_event_that_is_none_says_all_that_is_wrong():
    with pytest.raises(ScheduleError) as caught:
        PipelineEvent(stage=0, microbatch=-1, kind="nap", start_s=2, end_s=1)

    assert str(caught.value) == (
        "nap of stage 0, microbatch -1, from 2 s to 1 s is not an event: its kind is not one of forward, "
        "recompute, backward, "
        "input, weight, copy, wait; a stage and a microbatch are at least 0; it has to start before it ends"
    )


def test_a_timeline_that_is_none_says_all_that_is_wrong():
    with pytest.raises(ScheduleError) as caught:
        timeline(("F2.0", 0, 1), stages=2, workers=((0,), (0,)), predicted=timeline(stages=3))

    assert str(caught.value) == (
        "these events are not a timeline: F2.0 is of stage 2, the last is 1; the workers have the stages ((0,), (0,)), "
        "expected each of the 2 once; 2 stages were measured, 3 predicted"
    )
