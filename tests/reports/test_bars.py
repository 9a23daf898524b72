"""The bar of planning, drawn into text: what it shows, when, and that it is nowhere but in a terminal."""

import io
import itertools
import sys
import time

import pytest
import torch
from rich.console import Console
from torch import nn

import torchremat
from probes.planning import bars
from torchremat import Progress
from torchremat.reports.bars import progress_bar


def drawn(*told, seconds, terminal=True):
    """What is written for what is told, `seconds` after the beginning; a bar is drawn once more when it is left."""
    console = Console(file=io.StringIO(), force_terminal=terminal, color_system=None, width=120)
    now_s = 100.0
    with progress_bar(console, clock=lambda: now_s) as progress:
        for one in told:
            progress(one)
        now_s += seconds
    progress(Progress(phase="certificate", share=None, slowdown=None))  # too late to be seen
    return console.file.getvalue()


POLISHING = Progress(phase="polishing", share=0.4, slowdown=1.104)
PROFILING = Progress(phase="profiling", share=None, slowdown=None)


def test_a_bar_says_what_is_under_way_how_far_it_is_and_the_best_plan():
    text = drawn(PROFILING, POLISHING, seconds=62.0)

    assert "planning: polish" in text
    assert "40%" in text and "best 1.10 x plain" in text and "0:01:02" in text


def test_where_nobody_knows_how_far_it_is_there_is_no_share():
    text = drawn(POLISHING, PROFILING, seconds=3.0)

    assert "planning: running the step" in text
    assert "%" not in text and "plain" not in text


@pytest.mark.parametrize(("seconds", "is_seen"), [(1.9, False), (2.1, True)])
def test_a_bar_appears_after_two_seconds(seconds, is_seen):
    assert ("planning" in drawn(POLISHING, seconds=seconds)) is is_seen


def test_nothing_is_written_where_there_is_no_terminal():
    assert drawn(PROFILING, POLISHING, seconds=62.0, terminal=False) == ""


def failing(progress):
    progress(POLISHING)
    raise ValueError("mine")


def test_the_bar_is_gone_after_an_error():
    console, seconds = Console(file=io.StringIO(), force_terminal=True, width=120), itertools.count()

    with (
        pytest.raises(ValueError, match="mine"),
        progress_bar(console, clock=lambda: float(next(seconds))) as progress,
    ):
        failing(progress)
    assert console.file.getvalue().endswith("\x1b[1A\x1b[2K")  # one line up, and erased


def test_without_rich_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "rich", None)

    with pytest.raises(ModuleNotFoundError, match=r"pip install 'torchremat\[cli\]'") as caught, progress_bar():
        pass
    assert caught.value.name == "rich"


class Terminal(io.StringIO):
    def isatty(self):
        return True


class Slow(nn.Module):
    """One layer, whose first forward takes longer than nobody waits."""

    def __init__(self, seconds):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(3)))
        self.seconds = seconds

    def forward(self, x):
        time.sleep(self.seconds)
        return self.layers(x)


def planned(monkeypatch, stream, *, seconds=0.0, call=torchremat.plan, **options):
    """What is written to stderr while a slow step is planned for."""
    x = torch.randn(8, 16)
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(bars, "_HIDDEN_S", 0.05)
    call(Slow(seconds), lambda model: model(x).sum(), **options)
    return stream.getvalue()


@pytest.mark.parametrize("call", [torchremat.plan, torchremat.fit], ids=["plan", "fit"])
def test_a_terminal_shows_a_bar_by_itself(monkeypatch, call):
    assert "planning: running the step" in planned(monkeypatch, Terminal(), seconds=0.5, budget="100%", call=call)


def test_a_frontier_shows_one_too(monkeypatch):
    text = planned(monkeypatch, Terminal(), seconds=0.5, call=torchremat.frontier, points=2)

    assert "planning: running the step" in text


@pytest.mark.parametrize(
    ("stream", "options"),
    [(io.StringIO, {}), (Terminal, {"progress": False}), (Terminal, {"progress": lambda told: None})],
    ids=["no terminal", "off", "somebody else is told"],
)
def test_nobody_is_shown_a_bar_who_does_not_look_or_does_not_want_one(monkeypatch, stream, options):
    assert planned(monkeypatch, stream(), seconds=0.3, budget="100%", **options) == ""


def test_without_rich_nothing_is_shown_by_itself(monkeypatch):
    monkeypatch.setitem(sys.modules, "rich.errors", None)

    assert planned(monkeypatch, Terminal(), seconds=0.3, budget="100%") == ""


def test_what_a_step_prints_stays_on_stdout(monkeypatch, capsys):
    # rich takes both streams over while it draws, and gives what is printed to its own one.
    x = torch.randn(8, 16)
    monkeypatch.setattr(sys, "stderr", Terminal())

    def step(model):
        print("mine")
        return model(x).sum()

    torchremat.plan(Slow(0.0), step, budget="100%")

    assert "mine" in capsys.readouterr().out
