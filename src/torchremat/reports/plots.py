"""Measured steps in one picture, steps of pipelines in another, and frontiers in a third."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from torchremat.measuring.curves import draw, headed
from torchremat.measuring.measurement import Measurement, step_of
from torchremat.pipeline import gantt
from torchremat.pipeline.timeline import Timeline
from torchremat.planning.results import staircases
from torchremat.planning.results.frontiers import Frontier


def plot_measurements(
    measurements: Mapping[str, Measurement], path: str | Path, *, budgets: Mapping[str, int] | None = None
) -> None:
    """Draw the live bytes of several measured steps side by side into an image file; its suffix sets the format.

    Args:
        measurements: By the name that each has in the picture.
        path: Of the file.
        budgets: In bytes, by the same names, for the steps that have one.

    Raises:
        UnsupportedError: matplotlib is not installed.
    """
    limits = budgets or {}
    steps = ((name, replace(step_of(own), budget_bytes=limits.get(name))) for name, own in measurements.items())
    draw([headed(name, step) for name, step in steps], path)


def plot_timelines(timelines: Mapping[str, Timeline], path: str | Path) -> None:
    """Draw several steps of pipelines below each other, on one axis of time; the file's suffix sets the format.

    Args:
        timelines: By the name that each has in the picture.
        path: Of the file.

    Raises:
        UnsupportedError: matplotlib is not installed, or knows no pictures with such an ending.
    """
    gantt.draw(timelines, path)


def plot_frontiers(frontiers: Mapping[str, Frontier], path: str | Path) -> None:
    """Draw peak against time of several models or ways of planning; the file's suffix sets the format.

    Args:
        frontiers: By the name that each has in the picture.
        path: Of the file.

    Raises:
        UnsupportedError: matplotlib is not installed, or knows no pictures with such an ending.
    """
    staircases.draw([own.staircase(name) for name, own in frontiers.items()], path)
