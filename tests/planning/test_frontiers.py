"""Peak against time: the points, and the plans that they stand for."""

import json
from dataclasses import replace

import pytest
import torch
from torch import nn

import models
import torchremat
from planning.steps import differences, outcome, traced_peak
from probes.planning import profiled_step as planners
from torchremat import FrontierPoint


def tiny():
    return models.gpt_step(blocks=4, width=32, context=32, vocabulary=64)


@pytest.fixture(scope="module")
def planner():
    return torchremat.Planner(*tiny(), cost="flops", certify=True)


@pytest.fixture(scope="module")
def frontier(planner):
    return planner.frontier(points=6)


def test_from_the_plain_step_to_the_floor(planner, frontier):
    peaks = [point.peak_bytes for point in frontier.points]
    flops = [point.recomputed_flops for point in frontier.points]

    assert peaks == sorted(set(peaks), reverse=True) and flops == sorted(flops)
    assert peaks[0] == planner.profiled.peak_of(planner.solver.plain) == frontier.points[0].budget_bytes
    assert frontier.points[-1].budget_bytes == planner.floor_bytes
    assert (flops[0], frontier.points[0].slowdown) == (0, 1.0)
    assert 4 <= len(peaks) <= 8


def test_a_budget_of_the_frontier_gets_no_worse_plan(planner, frontier):
    for point in frontier.points:
        plan = planner.plan(point.budget_bytes)

        assert plan.peak_bytes <= point.budget_bytes
        assert plan.recomputed_flops <= 1.01 * point.recomputed_flops


def test_points_are_plans_without_another_profile(frontier, monkeypatch):
    monkeypatch.setattr(planners, "profiled_together", None)
    point = frontier.points[2]

    plan = frontier.plan(point)

    assert (plan.peak_bytes, plan.recomputed_flops) == (point.peak_bytes, point.recomputed_flops)
    assert plan.budget_bytes == point.budget_bytes
    assert plan.slowdown == point.slowdown
    assert plan.certificate.gap is not None


def test_a_budget_in_bytes_runs_no_plain_step_that_needs_more():
    model, step = models.gpt_step(blocks=2, width=32, context=32, batch=2, vocabulary=32)
    found = torchremat.frontier(model, step, cost="flops", certify=True)
    point = found.points[-2]

    assert found.plan(point.budget_bytes).certificate.bound_all is None
    assert found.plan(point).certificate.bound_all is not None


def test_a_budget_gets_the_fastest_point_that_it_allows(frontier):
    second, third = frontier.points[1:3]

    assert frontier.plan(second.budget_bytes).peak_bytes == second.peak_bytes
    assert frontier.plan(second.budget_bytes - 1).peak_bytes == third.peak_bytes
    assert frontier.plan("100%").recomputed_flops == 0


@pytest.mark.parametrize("place", [1, -1])
def test_measured_peak_and_gradients(planner, frontier, place):
    model, step = tiny()
    plan = frontier.plan(frontier.points[place])
    expected = outcome(model, step)

    plan.apply(model)

    assert differences(outcome(model, step), expected) == []
    assert planner.fixed_bytes + traced_peak(model, step) <= plan.budget_bytes


def test_no_row_is_shown_that_another_beats_in_peak_and_time(frontier):
    # Of fewest flops, some take longer than others with a lower peak: such rows were there.
    seconds = [0.0, 0.3, 0.2, 0.2, 0.5, 0.4, 0.9, 0.8]
    points = tuple(
        FrontierPoint(
            budget_bytes=100 - place,
            peak_bytes=100 - place,
            step_bytes=0,
            recompute_seconds=added_s,
            recomputed_flops=place,
            stored_bytes=0,
            slowdown=1 + added_s,
        )
        for place, added_s in enumerate(seconds)
    )

    found = replace(frontier, points=points)

    assert [point.recomputed_flops for point in found.shown] == [0, 3, 5, 7]
    assert len(str(found).splitlines()) == 1 + 4 + 1
    assert str(found).splitlines()[-1].startswith("not shown: 4 of `points`, which need fewer flops than the row below")
    assert found.staircase("").peak_bytes == (100, 97, 95, 93)
    assert [point.peak_bytes for point in replace(frontier, points=points[:1]).shown] == [100]


def test_budgets_that_are_none(frontier):
    lowest = frontier.points[-1].budget_bytes

    with pytest.raises(torchremat.BudgetError, match=rf"The lowest needs {lowest} bytes"):
        frontier.plan(1000)
    with pytest.raises(torchremat.BudgetError, match="another frontier"):
        frontier.plan(torchremat.FrontierPoint(**vars(frontier.points[0]) | {"budget_bytes": 3}))
    with pytest.raises(torchremat.UnsupportedError, match="at least 2"):
        torchremat.frontier(*tiny(), points=1)


def test_a_model_without_a_choice():
    x = torch.randn(4, 8)
    found = torchremat.frontier(nn.Linear(8, 8), lambda model: model(x).sum(), points=3)

    assert len(found.points) == 1
    assert str(found).endswith(found.no_choice)
    assert found.plan(found.points[0]).recomputed_flops == 0


def test_floor_and_knee_are_marked_as_in_the_picture(frontier):
    # Half of the bytes for a tenth of the time, and the last tenth of them for the rest.
    points = tuple(
        replace(frontier.points[0], budget_bytes=peak, peak_bytes=peak, slowdown=slowdown)
        for peak, slowdown in ((100, 1.0), (50, 1.1), (40, 2.0))
    )

    lines = str(replace(frontier, points=points)).splitlines()

    assert [line.rpartition("  ")[2] for line in lines[2:]] == ["knee", "floor"]
    assert lines[1].endswith("FLOP")


def test_it_is_printed_saved_and_drawn(frontier, tmp_path):
    frontier.save(tmp_path / "points.json")
    frontier.plot(tmp_path / "points.png")

    lines = str(frontier).splitlines()
    assert len(lines) == 1 + len(frontier.shown) + len(frontier.remarks)
    assert "1.00 x" in lines[1] and "100%" in lines[1]
    content = json.loads((tmp_path / "points.json").read_text())
    assert [point["budget_bytes"] for point in content["points"]] == [one.budget_bytes for one in frontier.points]
    assert (tmp_path / "points.png").read_bytes().startswith(b"\x89PNG")
