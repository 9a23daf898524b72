"""Pictures of pipelines: what they show, from two stages to sixteen."""

import sys
from dataclasses import replace

import matplotlib
import pytest
from matplotlib.colors import to_hex

from probes.pipelines import PipelineEvent, predict, recomputing
from schedules.orders import equal_costs, gpipe, one_forward_one_backward, parse
from torchremat.errors import UnsupportedError
from torchremat.pipeline.timeline import Timeline
from torchremat.reports.plots import plot_timelines


def made(order, *, lookahead=False, **seconds):
    stages = 1 + max(action.stage for actions in order for action in actions)
    return predict(Timeline(events=(), stages=stages), order, costs=equal_costs(stages, seconds), lookahead=lookahead)


def small(**others):
    return made(recomputing(gpipe(2, 2)), forward=1, recompute=1, backward=2, **others)


def legend(figure):
    return [text.get_text() for text in figure.legends[0].get_texts()]


def written(panel):
    return [text.get_text() for text in panel.texts]


def rows(panel):
    return [label.get_text() for label in panel.get_yticklabels()]


def stretches(panel):
    """Start and end of all bars but the grey ones behind them."""
    return [stretch for bars in panel.collections if not is_idle(bars) for stretch in spans(bars)]


def idle(panel):
    """Start and end of the grey bars."""
    return [stretch for bars in panel.collections if is_idle(bars) for stretch in spans(bars)]


def is_idle(bars):
    return to_hex(bars.get_facecolor()[0]) == "#e9e9e9"


def spans(bars):
    return [(float(path.vertices[:, 0].min()), float(path.vertices[:, 0].max())) for path in bars.get_paths()]


def test_a_row_for_each_stage_with_its_idle_share(tmp_path, figures):
    own = small()
    own.plot(tmp_path / "p.png")

    (panel,) = figures[0].axes
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    assert panel.get_title(loc="left") == "step 12 s"
    assert rows(panel) == ["stage 0", "stage 1"]
    assert own.idle_share == (pytest.approx(1 / 3), pytest.approx(1 / 3))
    assert written(panel)[-3:] == ["idle", "33%", "33%"]
    assert panel.get_xlim() == (0, 12)
    assert legend(figures[0]) == ["forward", "recompute", "backward", "idle"]


def test_bars_are_where_the_events_are(tmp_path, figures):
    small().plot(tmp_path / "p.svg")

    assert (tmp_path / "p.svg").read_text().startswith("<?xml")
    stage_0 = [(0, 1), (1, 2), (6, 7), (9, 10), (7, 9), (10, 12)]
    stage_1 = [(1, 2), (2, 3), (3, 4), (6, 7), (4, 6), (7, 9)]
    assert stretches(figures[0].axes[0]) == stage_0 + stage_1


def test_what_was_predicted_lies_below_on_the_same_axis(tmp_path, figures):
    replace(small(), predicted=small(lookahead=True)).plot(tmp_path / "p.png")

    above, below = figures[0].axes
    assert above.get_title(loc="left") == "measured: step 12 s"
    assert below.get_title(loc="left") == "predicted: step 11 s"
    assert above.get_xlim() == below.get_xlim() == (0, 12)
    assert idle(above) == [(0, 12), (0, 12)]
    assert idle(below) == [(0, 11), (0, 11)]


def test_short_steps_have_a_unit_of_their_own(tmp_path, figures):
    made(gpipe(1, 1), forward=0.002, backward=0.004).plot(tmp_path / "p.png")
    made(gpipe(1, 1), forward=2e-6, backward=4e-6).plot(tmp_path / "p.png")

    assert [figure.axes[0].get_title(loc="left") for figure in figures] == ["step 6 ms", "step 6 µs"]
    assert [figure.axes[0].get_xlabel() for figure in figures] == [
        "ms since the start of the step",
        "µs since the start of the step",
    ]


def test_seconds_count_from_the_first_event(tmp_path, figures):
    late = PipelineEvent(stage=0, microbatch=0, kind="forward", start_s=100, end_s=102)
    Timeline(events=(late,), stages=1).plot(tmp_path / "p.png")

    assert stretches(figures[0].axes[0]) == [(0, 2)]


def test_every_kind_is_in_the_legend(tmp_path, figures):
    order = recomputing(parse(["F0.0 F0.1 B0.0 I0.1 W0.1", "F1.0 B1.0 F1.1 I1.1 W1.1"]))
    own = made(order, forward=1, recompute=1, backward=2, input=1, weight=1, copy=0.5)
    wait = PipelineEvent(stage=1, microbatch=0, kind="wait", start_s=0, end_s=1)
    replace(own, events=(*own.events, wait)).plot(tmp_path / "p.png")

    assert legend(figures[0]) == [
        "forward",
        "recompute",
        "backward",
        "backward for inputs",
        "backward for weights",
        "copy",
        "wait",
        "idle",
    ]


def test_stages_of_one_worker_stand_together(tmp_path, figures):
    own = made(parse(["F0.0 F2.0", "F1.0 F3.0"]), forward=1)
    own.plot(tmp_path / "p.png")

    panel = figures[0].axes[0]
    assert own.workers == ((0, 2), (1, 3))
    # In each row a white gap where the other stage of the worker runs, and the stage's own bar.
    assert stretches(panel) == [(2, 3), (0, 1), (0, 1), (2, 3), (3, 4), (1, 2), (1, 2), (3, 4)]
    assert rows(panel) == ["stage 0", "stage 2", "stage 1", "stage 3"]
    assert [line.get_ydata()[0] for line in panel.lines] == [1.5]


def test_numbers_of_microbatches_are_left_out_where_there_is_no_room(tmp_path, figures):
    few = made(recomputing(one_forward_one_backward(4, 2)), forward=1, recompute=1, backward=2)
    few.plot(tmp_path / "p.png")
    many = made(recomputing(one_forward_one_backward(64, 16)), forward=1, recompute=1, backward=2, copy=0.5)
    many.plot(tmp_path / "p.png")

    assert len(written(figures[0].axes[0])) == 2 * 4 * 3 + 1 + 2
    assert written(figures[1].axes[0])[0] == "idle"
    assert len(written(figures[1].axes[0])) == 1 + 16
    assert len(stretches(figures[1].axes[0])) == 16 * 64 * 3 + 2 * 15 * 64


def test_several_timelines_below_each_other(tmp_path, figures):
    one, two = small(), small(lookahead=True)
    plot_timelines({"GPipe": replace(one, predicted=two), "ahead": two}, tmp_path / "p.png")

    assert [panel.get_title(loc="left") for panel in figures[0].axes] == [
        "GPipe, measured: step 12 s",
        "GPipe, predicted: step 11 s",
        "ahead, step 11 s",
    ]


def test_nothing_at_all_can_be_drawn(tmp_path):
    Timeline(events=(), stages=0).plot(tmp_path / "p.png")
    Timeline(events=(), stages=2).plot(tmp_path / "q.png")

    assert (tmp_path / "p.png").exists() and (tmp_path / "q.png").exists()


def test_the_state_of_matplotlib_is_left_alone(tmp_path):
    before, backend = dict(matplotlib.rcParams), matplotlib.rcParams._get_backend_or_none()
    small().plot(tmp_path / "p.png")

    assert dict(matplotlib.rcParams) == before
    assert matplotlib.rcParams._get_backend_or_none() == backend


def test_without_matplotlib_the_error_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)

    with pytest.raises(UnsupportedError, match=r"pip install 'torchremat\[plot\]'"):
        small().plot(tmp_path / "p.png")


def test_an_ending_that_is_no_picture(tmp_path):
    with pytest.raises(UnsupportedError, match=r"p\.txt: the file ending sets the format, one of .*png"):
        small().plot(tmp_path / "p.txt")
