"""The bar of planning, drawn into text: what it shows, when, and that it is nowhere but in a terminal."""

import importlib.util
import io
import itertools
import sys

import pytest
from rich.console import Console

from torchremat import Progress
from torchremat.reports import bars
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
    text = drawn(POLISHING, PROFILING, seconds=2.0)

    assert "planning: running the step" in text
    assert "%" not in text and "plain" not in text


@pytest.mark.parametrize(("seconds", "is_seen"), [(0.9, False), (1.1, True)])
def test_a_bar_appears_after_a_second(seconds, is_seen):
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
    spec = importlib.util.spec_from_file_location("bars_again", bars.__file__)

    with pytest.raises(ModuleNotFoundError, match=r"pip install 'torchremat\[cli\]'") as caught:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
    assert caught.value.name == "rich"
