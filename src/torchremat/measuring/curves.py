"""Live bytes over a step as a picture: one panel for each curve, side by side on the same scales.

This file only draws. All that have a curve to draw import it: `Measurement.plot`, `Plan.plot`, `reports.plots`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from torchremat.tensors.sizes import axis_unit, format_bytes
from torchremat.views.pictures import COLOURS, INK, draw_legend, new_figure
from torchremat.views.steps import Phase, Step

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_BEFORE = "#DDDDDD"
_BUDGET = "#D55E00"
_LEGEND = ("there before the step", "forward", "gradient", "recompute", "backward", "budget")

_HEIGHT_INCHES = 3.9
_WIDTH_INCHES = (6.4, 12.0)  # a picture with one panel, and one with many


def headed(name: str, step: Step) -> Step:
    """Return a step with a heading for its panel: a name, and its peak."""
    peak_bytes = 0 if step.peak is None else step.peak.live_bytes
    return replace(step, name=f"{name}\npeak {format_bytes(peak_bytes)}")


@dataclass(frozen=True, eq=False)
class _Line:
    """A step as a line: seconds and bytes of its points, and the phase that runs from each point to the next."""

    step: Step
    seconds: NDArray[np.float64]
    live_bytes: NDArray[np.int64]
    phases: tuple[Phase, ...]


def _line_of(step: Step) -> _Line:
    times = 2 if step.jumps else 1  # a jump is two points at one time
    seconds = np.repeat([point.seconds for point in step.points], times)[times - 1 :]
    live_bytes = np.repeat(np.array([point.live_bytes for point in step.points], np.int64), times)[: len(seconds)]
    phases: list[Phase] = [point.phase for point in step.points for _ in range(times)]
    return _Line(step, seconds, live_bytes, tuple(phases[times - 1 :]))


def draw(steps: Sequence[Step], path: str | Path) -> None:
    """Draw the bytes of steps side by side into an image file; its suffix sets the format. Names are headings.

    Raises:
        UnsupportedError: matplotlib is not installed, or does not support this suffix.
    """
    lines = [_line_of(step) for step in steps]
    spans_s = [max(step.ends_s, 1e-9) for step in steps]
    time_unit, time_scale = ("s", 1.0) if max(spans_s) >= 2 else ("ms", 1e3)
    # One scale for all panels. A panel too narrow for its heading would run into the next, so it ends after its curve.
    widths = [time_scale * max(span_s, 0.5 * max(spans_s)) for span_s in spans_s]
    highest = max(max(int(line.live_bytes.max(initial=1)), line.step.budget_bytes or 0) for line in lines)
    unit, size = axis_unit(highest)
    narrow, wide = _WIDTH_INCHES
    figure = new_figure(path, width_inches=min(wide, narrow + 3.0 * (len(steps) - 1)), height_inches=_HEIGHT_INCHES)
    panels = figure.subplots(1, len(steps), sharey=True, squeeze=False, width_ratios=widths)[0]
    for panel, line, width in zip(panels, lines, widths, strict=True):
        _draw_panel(panel, line, size, time_scale)
        panel.set_xlim(0, width)
        panel.set_xticks(np.arange(0, width * 1.001, _tick(max(widths))))
    panels[0].set_ylim(0, 1.04 * highest / size)
    panels[0].set_ylabel(f"live memory ({unit})", color=INK)
    figure.supxlabel(f"time in the step ({time_unit})", color=INK, fontsize="medium")
    named = {name: handle for panel in panels for handle, name in zip(*panel.get_legend_handles_labels(), strict=True)}
    draw_legend(figure, named, _LEGEND)
    figure.savefig(path)


def _tick(longest: float) -> float:
    """Return a round distance between tick marks, so that the longest panel has about five."""
    power = 10.0 ** np.floor(np.log10(longest / 5))
    return float(next(power * digit for digit in (1, 2, 5, 10) if power * digit >= longest / 5))


def _draw_panel(panel: Axes, line: _Line, size: int, time_scale: float) -> None:
    """Draw one step; `size` is the unit of the bytes, and a second has `time_scale` units of time."""
    step, live, times = line.step, line.live_bytes / size, line.seconds * time_scale
    panel.axhspan(0, step.before_bytes / size, color=_BEFORE, linewidth=0, label="there before the step")
    for phase, first, last in _runs(line.phases):
        reach = slice(first, min(last + 2, len(live)))  # up to the point where the next phase begins
        panel.fill_between(
            times[reach],
            step.before_bytes / size,
            live[reach],
            color=COLOURS[phase],
            linewidth=0,
            label=phase,
        )
    panel.plot(times, live, color=INK, linewidth=0.6)
    if step.budget_bytes is not None:
        panel.axhline(step.budget_bytes / size, color=_BUDGET, linestyle=(0, (5, 2)), linewidth=1.5, label="budget")
    panel.xaxis.set_major_formatter("{x:g}")
    panel.tick_params(colors=INK, labelsize="small")
    panel.spines[["top", "right"]].set_visible(False)
    panel.set_title(step.name, color=INK, fontsize="medium", loc="left")


def _runs(phases: tuple[Phase, ...]) -> Iterator[tuple[Phase, int, int]]:
    """Yield each stretch of equal phases with its first and last index."""
    for _, group in groupby(range(len(phases)), key=phases.__getitem__):
        places = list(group)
        yield phases[places[0]], places[0], places[-1]
