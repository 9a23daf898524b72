"""Peak against time as a picture: a staircase for each model, since a plan serves every budget up to the next.

This is the drawing alone, below everything that has something to draw: `Frontier.plot`, `reports.plots`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torchremat.measuring.pictures import new_figure

# After Okabe and Ito's palette, which the colour-blind can tell apart.
_COLOURS = ("#3D85B8", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9")
_INK = "#333333"
_FAINT = "#DDDDDD"
_UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10), ("B", 1))
_WIDTH_INCHES, _HEIGHT_INCHES = 6.4, 3.9


@dataclass(frozen=True, kw_only=True)
class Staircase:
    """The points of a frontier, from the highest peak to the lowest.

    Attributes:
        name: Of the line; nothing if there is only one.
        peak_bytes: Of each point.
        slowdowns: Of each point: seconds of a step over those of a plain one.
    """

    name: str
    peak_bytes: tuple[int, ...]
    slowdowns: tuple[float, ...]


def draw(staircases: Sequence[Staircase], path: str | Path) -> None:
    """Draw staircases into one image file; its ending says which kind.

    Raises:
        UnsupportedError: matplotlib is not installed, or knows no pictures with such an ending.
    """
    figure = new_figure(path, width_inches=_WIDTH_INCHES, height_inches=_HEIGHT_INCHES)
    axes = figure.add_subplot()
    highest = max(max(one.peak_bytes) for one in staircases)
    unit, scale = next(((name, size) for name, size in _UNITS if highest >= size), _UNITS[-1])
    for place, one in enumerate(staircases):
        colour = _COLOURS[place % len(_COLOURS)]
        peaks = [size / scale for size in one.peak_bytes]
        axes.step(peaks, one.slowdowns, where="pre", color=colour, linewidth=1.6, label=one.name or None)
        axes.plot(peaks, one.slowdowns, "o", color=colour, markersize=3.5)
    axes.set_xlabel(f"peak of a training step ({unit})", color=_INK)
    axes.set_ylabel("time of a step, plain = 1", color=_INK)
    axes.set_xlim(left=0.0)
    axes.grid(color=_FAINT, linewidth=0.6)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.tick_params(colors=_INK)
    if any(one.name for one in staircases):
        axes.legend(frameon=False)
    figure.savefig(path)
