"""Slices and points of a step, before they are drawn."""

import gzip
import json
from dataclasses import replace

import pytest

from torchremat.views.step_chart import step_chart, thinned
from torchremat.views.steps import CurvePoint, Slice, Step, phases_of, runs
from torchremat.views.viewed import write_trace


def moment(seconds, live_bytes, phase="forward", **more):
    return CurvePoint(seconds=seconds, live_bytes=live_bytes, phase=phase, **more)


STEP = Step(
    name="a step",
    points=(
        moment(0.0, 100),
        moment(1.0, 300, says=("forward of a", "aten.mm")),
        moment(2.0, 400, "backward"),
        moment(3.0, 100, "backward"),
    ),
    slices=(Slice(row="module", name="a", starts_s=0.0, ends_s=2.0, kind="module", key="a"),),
    jumps=True,
    before_bytes=100,
    budget_bytes=500,
)


def test_stretches_of_one_phase_are_one_slice():
    slices = phases_of(STEP.points)

    assert [(one.name, one.starts_s, one.ends_s) for one in slices] == [("forward", 0.0, 2.0), ("backward", 2.0, 3.0)]


def test_what_has_no_name_or_takes_no_time_is_no_slice():
    told = [(0.0, "a", "module", "a"), (1.0, "", "module", ""), (2.0, "b", "module", "b"), (2.0, "c", "module", "c")]

    assert [one.name for one in runs([*told, (3.0, "c", "module", "c")])] == ["a", "c"]


def test_a_step_without_moments_has_no_phases_and_no_peak():
    step = Step(name="nothing", points=())

    assert phases_of(step.points) == ()
    assert step.peak is None and step.ends_s == 0.0
    step_chart(step, title="nothing")


def test_the_peak_is_the_first_of_the_highest():
    assert STEP.peak.seconds == 2.0


def test_an_area_follows_the_jumps_and_is_closed_at_what_was_there_before():
    chart = step_chart(STEP, title="memory")

    forward = next(one for one in chart.figure["data"] if one["name"] == "forward")
    # In seconds, as the step takes at least two, and bytes, as there are few: up at 1, and on to the backward at 2.
    assert forward["x"] == [0, 0, 1, 1, 2, 2, 2, 0]
    assert forward["y"] == [100, 100, 100, 300, 300, 400, 100, 100]


def test_a_phase_that_comes_twice_is_two_shapes():
    points = [moment(0.0, 1), moment(1.0, 2, "backward"), moment(2.0, 3, "recompute"), moment(3.0, 2, "backward")]
    chart = step_chart(Step(name="twice", points=(*points, moment(4.0, 1, "backward"))), title="memory")

    backward = next(one for one in chart.figure["data"] if one["name"] == "backward")
    assert backward["x"].count(None) == 1


def test_rows_of_a_table_know_where_their_slices_are():
    region = Slice(row="region", name="a .. b", starts_s=0.0, ends_s=3.0, kind="region", key="a")

    assert step_chart(STEP, title="memory").spans == {"a": [(0.0, 2.0)]}
    assert step_chart(replace(STEP, slices=(*STEP.slices, region)), title="memory").spans == {"a": [(0.0, 2.0)]}


def test_of_many_points_each_peak_is_drawn():
    points = [moment(place, 10 + place % 7, "forward") for place in range(10_000)]
    points[5_003] = moment(5_003, 1_000)
    points[7_001] = moment(7_001, 1)

    drawn = thinned(points, 400)

    assert len(drawn) <= 400
    assert points[5_003] in drawn and points[7_001] in drawn
    assert drawn[0] == points[0] and drawn[-1] == points[-1]
    assert [one.seconds for one in drawn] == sorted(one.seconds for one in drawn)


def test_of_many_points_each_change_of_the_phase_is_drawn():
    # A backward that began in the midst of a stretch was drawn as forward until the next one.
    points = [moment(place, 10, "forward" if place < 5_005 else "backward") for place in range(10_000)]

    drawn = thinned(points, 400)

    assert next(one.seconds for one in drawn if one.phase == "backward") == 5_005


@pytest.mark.parametrize("name", ["step.json", "step.json.gz"])
def test_a_trace_has_counters_slices_and_the_peak(tmp_path, name):
    write_trace([STEP], tmp_path / name)

    content = (tmp_path / name).read_bytes()
    events = json.loads(gzip.decompress(content) if name.endswith("gz") else content)["traceEvents"]
    assert [(one["ts"], one["args"]["bytes"]) for one in events if one["ph"] == "C"] == [
        (0.0, 100),
        (1e6, 300),
        (2e6, 400),
        (3e6, 100),
    ]
    (piece,) = (one for one in events if one["ph"] == "X")
    assert (piece["name"], piece["ts"], piece["dur"], piece["cat"]) == ("a", 0.0, 2e6, "module")
    (peak,) = (one for one in events if one["ph"] == "i")
    assert (peak["name"], peak["ts"], peak["args"]["bytes"]) == ("peak", 2e6, 400)
    names = [one["args"]["name"] for one in events if one["ph"] == "M" and one["name"].endswith("_name")]
    assert names == ["a step", "module"]
    assert all("pid" in one and "ph" in one for one in events)


def test_plain_and_planned_are_two_processes_of_a_trace(tmp_path):
    write_trace([STEP, STEP], tmp_path / "both.json")

    events = json.loads((tmp_path / "both.json").read_text())["traceEvents"]
    assert {one["pid"] for one in events} == {1, 2}
