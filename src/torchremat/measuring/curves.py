"""Live bytes over a step as a picture: one panel for each curve, side by side on the same scales.

This file only draws. All that have a curve to draw import it: `Measurement.plot`, `Plan.plot`, `reports.plots`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from torchremat.measuring.pictures import new_figure
from torchremat.measuring.timeline import MemoryTimeline
from torchremat.tensors.sizes import format_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Phase = Literal["forward", "recompute", "backward"]

# After Okabe and Ito's palette, which the colour-blind can tell apart; the blues differ in lightness.
_COLOURS: dict[Phase, str] = {"forward": "#9AD0F0", "recompute": "#E69F00", "backward": "#3D85B8"}
_BEFORE = "#DDDDDD"
_BUDGET = "#D55E00"
_INK = "#333333"
_LEGEND = ("there before the step", "forward", "recompute", "backward", "budget")

_HEIGHT_INCHES = 3.9
_WIDTH_INCHES = (6.4, 12.0)  # a picture with one panel, and one with many
_UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10), ("B", 1))


@dataclass(frozen=True, kw_only=True, eq=False)
class Curve:
    """A line through points, and the phase that runs from each point to the next.

    Attributes:
        name: The heading of its panel.
        seconds: Of each point, since the start of the step.
        live_bytes: Of each point.
        phases: Of each point: the phase that starts there.
        before_bytes: Live bytes before the step.
        budget_bytes: Drawn as a line; None without a budget.
        peak: The peak to print below the heading; the highest of the points if not given.
    """

    name: str
    seconds: NDArray[np.float64]
    live_bytes: NDArray[np.int64]
    phases: tuple[Phase, ...]
    before_bytes: int
    budget_bytes: int | None = None
    peak: str = ""


def phase_at(timeline: MemoryTimeline, event: int) -> Phase:
    """Return the phase at an event; a recompute is distinct from the backward that it serves."""
    if not timeline.in_backward[event]:
        return "forward"
    return "recompute" if timeline.operator_at(event).recomputes else "backward"


def curve_of(timeline: MemoryTimeline, *, name: str, before_bytes: int, budget_bytes: int | None = None) -> Curve:
    """Return a measured timeline as a curve: the bytes jump at each event and stay until the next.

    A recompute is distinct from the backward that it serves where the operators are known.
    """
    phases: list[Phase] = [phase_at(timeline, event) for event in range(len(timeline))]
    return Curve(
        name=name,
        seconds=np.concatenate([[0.0], np.repeat(timeline.seconds, 2)]),
        live_bytes=np.repeat(np.append(before_bytes, timeline.live_bytes), 2)[:-1],
        phases=("forward", *(phase for phase in phases for _ in range(2))),
        before_bytes=before_bytes,
        budget_bytes=budget_bytes,
    )


def draw(curves: Sequence[Curve], path: str | Path) -> None:
    """Draw the curves side by side into an image file; its suffix sets the format.

    Raises:
        UnsupportedError: matplotlib is not installed, or does not support this suffix.
    """
    spans_s = [max(float(curve.seconds.max(initial=0.0)), 1e-9) for curve in curves]
    time_unit, time_scale = ("s", 1.0) if max(spans_s) >= 2 else ("ms", 1e3)
    # One scale for all panels. A panel too narrow for its heading would run into the next, so it ends after its curve.
    widths = [time_scale * max(span_s, 0.5 * max(spans_s)) for span_s in spans_s]
    highest = max(max(int(curve.live_bytes.max(initial=1)), curve.budget_bytes or 0) for curve in curves)
    unit, size = next((name, size) for name, size in _UNITS if highest >= 2 * size or size == 1)
    narrow, wide = _WIDTH_INCHES
    figure = new_figure(path, width_inches=min(wide, narrow + 3.0 * (len(curves) - 1)), height_inches=_HEIGHT_INCHES)
    panels = figure.subplots(1, len(curves), sharey=True, squeeze=False, width_ratios=widths)[0]
    for panel, curve, width in zip(panels, curves, widths, strict=True):
        _draw_panel(panel, curve, size, time_scale)
        panel.set_xlim(0, width)
        panel.set_xticks(np.arange(0, width * 1.001, _tick(max(widths))))
    panels[0].set_ylim(0, 1.04 * highest / size)
    panels[0].set_ylabel(f"live memory ({unit})", color=_INK)
    figure.supxlabel(f"time in the step ({time_unit})", color=_INK, fontsize="medium")
    named = {name: handle for panel in panels for handle, name in zip(*panel.get_legend_handles_labels(), strict=True)}
    shown = [name for name in _LEGEND if name in named]
    figure.legend(
        [named[name] for name in shown],
        shown,
        loc="outside upper center",
        ncols=len(shown),
        frameon=False,
        labelcolor=_INK,
    )
    figure.savefig(path)


def _tick(longest: float) -> float:
    """Return a round distance between tick marks, so that the longest panel has about five."""
    power = 10.0 ** np.floor(np.log10(longest / 5))
    return float(next(power * digit for digit in (1, 2, 5, 10) if power * digit >= longest / 5))


def _draw_panel(panel: Axes, curve: Curve, size: int, time_scale: float) -> None:
    """Draw one curve; `size` is the unit of the bytes, and a second has `time_scale` units of time."""
    live, times = curve.live_bytes / size, curve.seconds * time_scale
    panel.axhspan(0, curve.before_bytes / size, color=_BEFORE, linewidth=0, label="there before the step")
    for phase, first, last in _runs(curve.phases):
        reach = slice(first, min(last + 2, len(live)))  # up to the point where the next phase begins
        panel.fill_between(
            times[reach],
            curve.before_bytes / size,
            live[reach],
            color=_COLOURS[phase],
            linewidth=0,
            label=phase,
        )
    panel.plot(times, live, color=_INK, linewidth=0.6)
    if curve.budget_bytes is not None:
        panel.axhline(curve.budget_bytes / size, color=_BUDGET, linestyle=(0, (5, 2)), linewidth=1.5, label="budget")
    panel.xaxis.set_major_formatter("{x:g}")
    panel.tick_params(colors=_INK, labelsize="small")
    panel.spines[["top", "right"]].set_visible(False)
    peak = curve.peak or f"peak {format_bytes(int(curve.live_bytes.max(initial=0)))}"
    panel.set_title(f"{curve.name}\n{peak}", color=_INK, fontsize="medium", loc="left")


def _runs(phases: tuple[Phase, ...]) -> Iterator[tuple[Phase, int, int]]:
    """Yield each stretch of equal phases with its first and last index."""
    for _, group in groupby(range(len(phases)), key=phases.__getitem__):
        places = list(group)
        yield phases[places[0]], places[0], places[-1]
