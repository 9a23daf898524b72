"""Peak against time as a picture: a staircase for each model, since a plan serves every budget up to the next.

This module only draws, below everything that has something to draw: `Frontier.plot`, `reports.plots`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from torchremat.tensors.sizes import axis_unit, format_bytes
from torchremat.views.pictures import INK, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# After Okabe and Ito's palette, which the colour-blind can tell apart.
_COLOURS = ("#3D85B8", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9")
_FAINT = "#DDDDDD"
_MARK_POINTS = 8  # from a point to its label
_LEAST_TURN = 0.02  # of the square; anything less is a line
_WIDTH_INCHES, _HEIGHT_INCHES = 6.4, 3.9


@dataclass(frozen=True, kw_only=True)
class Staircase:
    """The points of a frontier, from the highest peak to the lowest.

    Attributes:
        name: Name of the line; empty if it is the only one.
        peak_bytes: Peak of each point.
        slowdowns: For each point, seconds of a step over those of a plain one.
        knee: Index of the knee; None if no point is one.
    """

    name: str
    peak_bytes: tuple[int, ...]
    slowdowns: tuple[float, ...]
    knee: int | None = None


def knee_of(peak_bytes: Sequence[int], slowdowns: Sequence[float]) -> int | None:
    """Return the point where a staircase turns: beyond it, each byte costs more than before it.

    Of the points, scaled to a square, the one farthest below the line from the first to the last; None if all are on
    the line, or above it.

    Source: V. Satopää et al., "Finding a 'Kneedle' in a Haystack", ICDCS Workshops 2011, for points and not a curve.

    The points are in order, from the highest peak to the lowest.
    """
    saved, cost = peak_bytes[0] - peak_bytes[-1], slowdowns[-1] - slowdowns[0]
    if saved <= 0 or cost <= 0:
        return None
    below = [
        (peak_bytes[0] - peak) / saved - (slowdown - slowdowns[0]) / cost
        for peak, slowdown in zip(peak_bytes, slowdowns, strict=True)
    ]
    place = max(range(len(below)), key=below.__getitem__)
    return place if below[place] > _LEAST_TURN else None


def draw(staircases: Sequence[Staircase], path: str | Path, *, title: str = "") -> None:
    """Draw staircases into one image file, with floor and knee of a single one; the extension selects the format.

    Raises:
        UnsupportedError: matplotlib is not installed, or does not support the extension.
    """
    figure = new_figure(path, width_inches=_WIDTH_INCHES, height_inches=_HEIGHT_INCHES)
    axes = figure.add_subplot()
    highest = max(max(one.peak_bytes) for one in staircases)
    unit, scale = axis_unit(highest, least=1)
    for place, one in enumerate(staircases):
        colour = _COLOURS[place % len(_COLOURS)]
        peaks = [size / scale for size in one.peak_bytes]
        axes.step(peaks, one.slowdowns, where="pre", color=colour, linewidth=1.6, label=one.name or None)
        axes.plot(peaks, one.slowdowns, "o", color=colour, markersize=3.5)
    axes.set_xlabel(f"peak of a training step ({unit})", color=INK)
    axes.set_ylabel("time of a step, plain = 1", color=INK)
    axes.set_xlim(left=0.0)
    axes.grid(color=_FAINT, linewidth=0.6)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.tick_params(colors=INK)
    if len(staircases) == 1:
        _mark(axes, staircases[0], scale)
    if title:
        axes.set_title(title, color=INK, fontsize="medium", loc="left")
    if any(one.name for one in staircases):
        axes.legend(frameon=False)
    figure.savefig(path)


def _mark(axes: Axes, one: Staircase, scale: int) -> None:
    """Label floor and knee next to their points."""
    marks = {len(one.peak_bytes) - 1: "floor"} | ({} if one.knee is None else {one.knee: "knee"})
    for place, word in marks.items():
        peak, slowdown = one.peak_bytes[place] / scale, one.slowdowns[place]
        axes.plot([peak], [slowdown], "o", color=INK, markersize=7, fillstyle="none")
        axes.annotate(
            f"{word}: {format_bytes(one.peak_bytes[place])}, {slowdown:.2f} x",
            (peak, slowdown),
            xytext=(_MARK_POINTS, _MARK_POINTS),
            textcoords="offset points",
            color=INK,
            fontsize="small",
        )
    axes.margins(x=0.05, y=0.12)
