"""Pictures: what they show, and that they leave matplotlib as it was."""

import sys

import matplotlib
import numpy as np
import pytest
import torch
from torch import nn

import torchremat
from torchremat.measuring.curves import Curve, curve_of, draw
from torchremat.measuring.timeline import timeline_of
from torchremat.planning.staircases import Staircase
from torchremat.planning.staircases import draw as draw_staircases
from torchremat.reports.plots import plot_frontiers, plot_measurements


def timeline(live_bytes, *, backward_at):
    return timeline_of(
        time_ns=np.arange(1, len(live_bytes) + 1) * 10**9,
        live_bytes=np.array(live_bytes, dtype=np.int64),
        start_ns=0,
        backward_at=backward_at,
        changes=[],
    )


def small():
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(4)))
    x = torch.randn(64, 16)
    return model, lambda model: model(x).square().mean()


def legend(figure):
    return [text.get_text() for text in figure.legends[0].get_texts()]


def test_a_measured_curve_jumps_at_each_event():
    curve = curve_of(timeline([30, 20], backward_at=1), name="a", before_bytes=10)

    assert curve.seconds.tolist() == [0, 1, 1, 2, 2]
    assert curve.live_bytes.tolist() == [10, 10, 30, 30, 20]
    assert curve.phases == ("forward", "forward", "forward", "backward", "backward")


def test_a_step_without_events_is_a_point():
    curve = curve_of(timeline([], backward_at=0), name="a", before_bytes=10)

    assert (curve.seconds.tolist(), curve.live_bytes.tolist(), curve.phases) == ([0], [10], ("forward",))


def test_panels_share_the_bytes_and_not_the_seconds(tmp_path, figures):
    short = curve_of(timeline([3 * 2**20, 2**20], backward_at=1), name="short", before_bytes=0)
    long = curve_of(timeline([2**20] * 5, backward_at=3), name="long", before_bytes=0, budget_bytes=4 * 2**20)
    draw([short, long], tmp_path / "p.png")

    left, right = figures[0].axes
    assert left.get_ylim() == right.get_ylim() == (0, pytest.approx(1.04 * 4))
    assert (left.get_xlim(), right.get_xlim()) == ((0, 2), (0, 5))
    assert left.get_ylabel() == "live memory (MiB)"
    assert left.get_title(loc="left") == "short\npeak 3.00 MiB"
    assert legend(figures[0]) == ["there before the step", "forward", "backward", "budget"]


def test_nothing_at_all_can_be_drawn(tmp_path):
    empty = Curve(
        name="empty", seconds=np.array([]), live_bytes=np.array([], dtype=np.int64), phases=(), before_bytes=0
    )
    draw([empty, curve_of(timeline([], backward_at=0), name="a", before_bytes=0)], tmp_path / "p.png")

    assert (tmp_path / "p.png").exists()


def test_a_measurement_draws_itself(tmp_path, figures):
    model, step = small()
    measured = torchremat.measure(model, step)
    measured.plot(tmp_path / "p.png")

    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    assert len(figures[0].axes) == 1


def test_a_plan_draws_plain_and_planned_side_by_side(tmp_path, figures):
    model, step = small()
    plan = torchremat.plan(model, step, budget="60%")
    plan.plot(str(tmp_path / "p.pdf"))

    assert (tmp_path / "p.pdf").read_bytes().startswith(b"%PDF")
    assert [axes.get_title(loc="left").split("\n")[0].split(",")[-1] for axes in figures[0].axes] == 2 * [" predicted"]
    assert legend(figures[0]) == ["there before the step", "forward", "recompute", "backward", "budget"]


def test_measurements_are_drawn_with_their_budgets(tmp_path, figures):
    model, step = small()
    measured = torchremat.measure(model, step)
    plot_measurements({"plain": measured, "half": measured}, tmp_path / "p.png", budgets={"half": 10**6})

    plain, half = figures[0].axes
    assert [line.get_label() for line in half.lines if line.get_label() == "budget"] == ["budget"]
    assert [line.get_label() for line in plain.lines if line.get_label() == "budget"] == []


def test_the_state_of_matplotlib_is_left_alone(tmp_path):
    before, backend = dict(matplotlib.rcParams), matplotlib.rcParams._get_backend_or_none()
    draw([curve_of(timeline([1], backward_at=1), name="a", before_bytes=0)], tmp_path / "p.png")

    assert dict(matplotlib.rcParams) == before
    assert matplotlib.rcParams._get_backend_or_none() == backend


def test_without_matplotlib_the_error_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)

    with pytest.raises(torchremat.UnsupportedError, match=r"pip install 'torchremat\[plot\]'"):
        draw([curve_of(timeline([1], backward_at=1), name="a", before_bytes=0)], tmp_path / "p.png")


def test_a_plan_serves_every_budget_up_to_the_next(figures, tmp_path):
    stairs = Staircase(name="a", peak_bytes=(4 * 2**20, 3 * 2**20, 2**20), slowdowns=(1.0, 1.1, 1.5))

    draw_staircases([stairs], tmp_path / "stairs.png")

    (axes,) = figures[0].axes
    line, marks = axes.lines
    assert line.get_drawstyle() == "steps-pre"
    assert line.get_xdata().tolist() == marks.get_xdata().tolist() == [4, 3, 1]
    assert line.get_ydata().tolist() == [1.0, 1.1, 1.5]
    assert "MiB" in axes.get_xlabel()
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["a"]


def test_frontiers_in_one_picture(figures, tmp_path):
    frontier = torchremat.frontier(*small(), cost="flops", points=2)

    plot_frontiers({"one": frontier, "two": frontier}, tmp_path / "both.svg")

    (axes,) = figures[0].axes
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["one", "two"]
    assert axes.lines[0].get_xdata()[0] == frontier.points[0].peak_bytes / 2**10
