"""Pictures: what they show, and that they leave matplotlib as it was."""

import sys

import matplotlib
import pytest
import torch
from torch import nn

import torchremat
from torchremat.measuring.curves import draw, headed
from torchremat.planning.results.staircases import Staircase, knee_of
from torchremat.planning.results.staircases import draw as draw_staircases
from torchremat.reports.plots import plot_frontiers, plot_measurements
from torchremat.tensors.sizes import format_bytes
from torchremat.views.steps import CurvePoint, Step


def step(name, live_bytes, *, backward_at=0, before_bytes=0, budget_bytes=None):
    """A step whose bytes jump at each second."""
    points = [
        CurvePoint(seconds=at, live_bytes=size, phase="backward" if at > backward_at else "forward")
        for at, size in enumerate([before_bytes, *live_bytes])
    ]
    return Step(name=name, points=tuple(points), jumps=True, before_bytes=before_bytes, budget_bytes=budget_bytes)


def small():
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(4)))
    x = torch.randn(64, 16)
    return model, lambda model: model(x).square().mean()


def legend(figure):
    return [text.get_text() for text in figure.legends[0].get_texts()]


def areas(axes):
    """The phase of each area, and the seconds from where to where it reaches."""
    extents = [(area.get_label(), area.get_paths()[0].get_extents()) for area in axes.collections]
    return [(phase, extent.x0, extent.x1) for phase, extent in extents]


def test_a_measured_curve_jumps_at_each_event(tmp_path, figures):
    draw([step("a", [30, 20, 40], backward_at=1, before_bytes=10)], tmp_path / "p.png")

    (axes,) = figures[0].axes
    line = axes.lines[0]
    assert line.get_xdata().tolist() == [0, 1, 1, 2, 2, 3, 3]
    assert line.get_ydata().tolist() == [10, 10, 30, 30, 20, 20, 40]
    # A phase reaches up to where the next one begins.
    assert areas(axes) == [("forward", 0, 2), ("backward", 2, 3)]


def test_a_step_without_events_is_a_point(tmp_path, figures):
    draw([step("a", [], before_bytes=10)], tmp_path / "p.png")

    (axes,) = figures[0].axes
    line = axes.lines[0]
    assert (line.get_xdata().tolist(), line.get_ydata().tolist()) == ([0], [10])
    assert areas(axes) == [("forward", 0, 0)]


def test_panels_share_their_scales(tmp_path, figures):
    short = headed("short", step("", [3 * 2**20, 2**20], backward_at=1))
    long = headed("long", step("", [2**20] * 5, backward_at=3, budget_bytes=4 * 2**20))
    draw([short, long], tmp_path / "p.png")

    left, right = figures[0].axes
    assert left.get_ylim() == right.get_ylim() == (0, pytest.approx(1.04 * 4))
    # Two seconds and five. The short one ends after its curve, so that its heading has room.
    assert (left.get_xlim(), right.get_xlim()) == ((0, 2.5), (0, 5))
    assert (left.get_xticks().tolist(), right.get_xticks().tolist()) == ([0, 1, 2], [0, 1, 2, 3, 4, 5])
    assert figures[0].get_supxlabel() == "time in the step (s)"
    assert left.get_ylabel() == "live memory (MiB)"
    assert left.get_title(loc="left") == "short\npeak 3.00 MiB"
    assert legend(figures[0]) == ["there before the step", "forward", "backward", "budget"]


def test_short_steps_are_in_milliseconds(tmp_path, figures):
    # Marks at 0.025 s in one panel and at 0.05 s in the next had nothing to do with each other.
    steps = [
        Step(name=name, points=tuple(CurvePoint(seconds=at, live_bytes=1, phase="forward") for at in (0.0, end)))
        for name, end in (("plain", 0.12), ("planned", 0.13))
    ]
    draw(steps, tmp_path / "p.png")

    left, right = figures[0].axes
    assert left.get_xticks().tolist() == pytest.approx([0, 50, 100])
    assert right.get_xticks().tolist() == pytest.approx([0, 50, 100])
    assert figures[0].get_supxlabel() == "time in the step (ms)"


def test_nothing_at_all_can_be_drawn(tmp_path):
    draw([headed("nothing", Step(name="", points=())), step("a", [])], tmp_path / "p.png")

    assert (tmp_path / "p.png").exists()


def test_a_measurement_draws_itself(tmp_path, figures):
    measured = torchremat.measure(*small())
    measured.plot(tmp_path / "p.png")

    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    (axes,) = figures[0].axes
    (_, begins, turns), (_, turned, ends) = areas(axes)
    assert [phase for phase, _, _ in areas(axes)] == ["forward", "backward"]
    assert begins == 0 < turns == turned < ends


def test_a_plan_draws_plain_and_planned_side_by_side(tmp_path, figures):
    plan = torchremat.plan(*small(), budget="60%")
    plan.plot(str(tmp_path / "p.pdf"))

    assert (tmp_path / "p.pdf").read_bytes().startswith(b"%PDF")
    plain, planned = (axes.get_title(loc="left") for axes in figures[0].axes)
    assert plain == f"plain\npeak {format_bytes(plan.plain_peak_bytes)} measured"
    assert planned == (
        f"budget {format_bytes(plan.budget_bytes)}, {plan.slowdown:.2f} x plain\n"
        f"peak {format_bytes(plan.peak_bytes)} predicted"
    )
    for number in (plan.plain_peak_bytes, plan.budget_bytes, plan.peak_bytes):
        assert format_bytes(number) in str(plan)
    assert legend(figures[0]) == ["there before the step", "forward", "recompute", "backward", "budget"]


def test_a_peak_in_the_optimizers_step_is_said(tmp_path):
    # Adam's foreach kernels take as much as the parameters again: more than a small batch does.
    x = torch.randn(2, 64)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    optimizer = torch.optim.Adam(model.parameters())
    plan = torchremat.plan(model, lambda model: model(x).sum(), budget="100%", optimizer=optimizer, cost="flops")

    assert plan.peak_bytes == plan.optimizer_peak_bytes > plan.step_peak_bytes
    assert "highest during the optimizer's step" in str(plan)
    assert plan.drawn[1].name.endswith(f"\npeak {format_bytes(plan.peak_bytes)} predicted, in the optimizer's step")


def test_measurements_are_drawn_with_their_budgets(tmp_path, figures):
    measured = torchremat.measure(*small())
    plot_measurements({"plain": measured, "half": measured}, tmp_path / "p.png", budgets={"half": 10**6})

    plain, half = figures[0].axes
    assert [line.get_label() for line in half.lines if line.get_label() == "budget"] == ["budget"]
    assert [line.get_label() for line in plain.lines if line.get_label() == "budget"] == []


def test_the_state_of_matplotlib_is_left_alone(tmp_path):
    before, backend = dict(matplotlib.rcParams), matplotlib.rcParams._get_backend_or_none()
    draw([step("a", [1])], tmp_path / "p.png")

    assert dict(matplotlib.rcParams) == before
    assert matplotlib.rcParams._get_backend_or_none() == backend


def test_without_matplotlib_the_error_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)

    with pytest.raises(torchremat.UnsupportedError, match=r"pip install 'torchremat\[plot\]'"):
        draw([step("a", [1])], tmp_path / "p.png")


def test_a_plan_serves_every_budget_up_to_the_next(figures, tmp_path):
    stairs = Staircase(name="a", peak_bytes=(4 * 2**20, 3 * 2**20, 2**20), slowdowns=(1.0, 1.1, 1.5))

    draw_staircases([stairs], tmp_path / "stairs.png")

    (axes,) = figures[0].axes
    line, marks, floor = axes.lines
    assert floor.get_xdata() == [1] and floor.get_ydata() == [1.5]
    assert line.get_drawstyle() == "steps-pre"
    assert line.get_xdata().tolist() == marks.get_xdata().tolist() == [4, 3, 1]
    assert line.get_ydata().tolist() == [1.0, 1.1, 1.5]
    assert "MiB" in axes.get_xlabel()
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["a"]


def test_a_plan_and_its_picture_agree_on_the_seconds():
    # The picture added up what units take by themselves, and the text compared whole steps: 0.124 s and 0.132 s.
    plan = torchremat.plan(*small(), budget="60%")
    plain, planned = plan.drawn

    assert planned.ends_s / plain.ends_s == pytest.approx(plan.slowdown)
    assert plain.ends_s == pytest.approx(plan.plain_seconds)


def test_floor_and_knee_are_marked(figures, tmp_path):
    # A corner: three quarters of the bytes are nearly free, the last quarter costs all of the time.
    stairs = Staircase(name="", peak_bytes=(4 * 2**20, 2 * 2**20, 2**20), slowdowns=(1.0, 1.1, 2.0), knee=1)

    draw_staircases([stairs], tmp_path / "stairs.png", title="what it is")

    (axes,) = figures[0].axes
    assert axes.get_title(loc="left") == "what it is"
    assert [text.get_text() for text in axes.texts] == ["floor: 1.00 MiB, 2.00 x", "knee: 2.00 MiB, 1.10 x"]


@pytest.mark.parametrize(
    ("peaks", "slowdowns", "knee"),
    [
        ((4, 2, 1), (1.0, 1.1, 2.0), 1),  # 2/3 of the bytes for 1/10 of the time
        ((4, 3, 2, 1), (1.0, 1.1, 1.2, 1.3), None),  # a line
        ((3, 2, 1), (1.0, 1.9, 2.0), None),  # dear at once, then cheap
        ((3,), (1.0,), None),
        ((3, 2), (1.0, 1.0), None),  # lower at no cost
    ],
)
def test_the_knee_is_where_bytes_begin_to_cost(peaks, slowdowns, knee):
    assert knee_of(peaks, slowdowns) == knee


def test_a_frontier_knows_its_floor_and_says_what_it_is(figures, tmp_path):
    frontier = torchremat.frontier(*small(), cost="flops", points=4)

    frontier.plot(tmp_path / "frontier.png")

    assert frontier.floor == frontier.points[-1]
    (axes,) = figures[0].axes
    assert axes.get_title(loc="left") == "Peak against time on cpu, planned by flops"
    # In the words of the table.
    (floor,) = (text.get_text() for text in axes.texts if text.get_text().startswith("floor: "))
    assert floor == f"floor: {format_bytes(frontier.floor.peak_bytes)}, {frontier.floor.slowdown:.2f} x"
    (row,) = (line for line in str(frontier).splitlines() if line.endswith("  floor"))
    assert format_bytes(frontier.floor.peak_bytes) in row and f"{frontier.floor.slowdown:.2f} x" in row


def test_frontiers_in_one_picture(figures, tmp_path):
    frontier = torchremat.frontier(*small(), cost="flops", points=2)

    plot_frontiers({"one": frontier, "two": frontier}, tmp_path / "both.svg")

    (axes,) = figures[0].axes
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["one", "two"]
    assert axes.lines[0].get_xdata()[0] == frontier.points[0].peak_bytes / 2**10
