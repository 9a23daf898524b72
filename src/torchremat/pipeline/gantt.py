"""Stages over time as a picture: a row for each stage, steps below each other on one axis of time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from torchremat.pipeline.events import EventPiece, PipelineEvent, pieces
from torchremat.schedules.pipelines import COMPUTES, Kind
from torchremat.views.pictures import COLOURS, INK, draw_legend, new_figure

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes

_COLOURS: dict[Kind, str] = {
    "forward": COLOURS["forward"],
    "recompute": COLOURS["recompute"],
    "backward": COLOURS["backward"],
    "input": "#1D4E79",
    "weight": "#5FB59C",
    "copy": "#CC79A7",
    "wait": "#FFFFFF",
}
_NAMES: dict[Kind, str] = {
    "forward": "forward",
    "recompute": "recompute",
    "backward": "backward",
    "input": "backward for inputs",
    "weight": "backward for weights",
    "copy": "copy",
    "wait": "wait",
}
_ON_DARK: frozenset[Kind] = frozenset(("backward", "input"))
_IDLE = "#E9E9E9"
_FAINT = "#BBBBBB"

_WIDTH_INCHES = 11.0
_BARS_INCHES = 9.6  # of it, about the width of the bars: the rest has names and shares
_ROW_INCHES = (0.24, 0.42)  # with many rows, and with few
_FEW_ROWS, _MANY_ROWS = 8, 24
_CHART_INCHES, _REST_INCHES = 0.35, 0.95  # a heading; the legend and the axis
_DIGIT_INCHES = 0.075
_EDGE_POINTS, _EDGE_SHARE = 0.4, 0.15  # of the white between bars, and at most this share of a narrow bar
_HEIGHT, _COPY_HEIGHT = 0.82, 0.2  # of a row and of the copies in it, where rows are 1 apart
_SHARES_AT = 1.006  # in widths of a chart
_UNITS = (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6))


class _Drawable(Protocol):
    """A `Timeline`, which draws itself by the functions below."""

    @property
    def stages(self) -> int: ...
    @property
    def start_s(self) -> float: ...
    @property
    def step_s(self) -> float: ...
    @property
    def groups(self) -> tuple[tuple[int, ...], ...]: ...
    @property
    def idle_share(self) -> tuple[float, ...]: ...
    @property
    def predicted(self) -> _Drawable | None: ...
    def events_of(self, stage: int, /) -> tuple[PipelineEvent, ...]: ...


def draw(timelines: Mapping[str, _Drawable], path: str | Path) -> None:
    """Draw steps below each other into an image file, by name, each with its prediction; its ending gives the format.

    Raises:
        UnsupportedError: matplotlib is not installed, or does not know the format.
    """
    charts = [chart for name, timeline in timelines.items() for chart in _with_prediction(name, timeline)]
    span_s = max([timeline.step_s for _, timeline in charts], default=0.0) or 1e-9
    rows = sum(timeline.stages for _, timeline in charts)
    narrow, wide = _ROW_INCHES
    crowded = min(1.0, max(0.0, (rows - _FEW_ROWS) / (_MANY_ROWS - _FEW_ROWS)))
    row_inches = wide + crowded * (narrow - wide)
    figure = new_figure(
        path, width_inches=_WIDTH_INCHES, height_inches=_REST_INCHES + len(charts) * _CHART_INCHES + rows * row_inches
    )
    unit, scale = next(((name, size) for name, size in _UNITS if span_s >= size), _UNITS[-1])
    heights = [max(1, timeline.stages) for _, timeline in charts]
    panels = figure.subplots(len(charts), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    legend: dict[str, Artist] = {}
    for panel, (name, timeline) in zip(panels, charts, strict=True):
        legend |= _draw_chart(panel, name, timeline, unit=unit, scale=scale, inches_per_s=_BARS_INCHES / span_s)
    panels[0].set_xlim(0, span_s / scale)
    for panel in panels[:-1]:
        panel.spines["bottom"].set_visible(False)
        panel.tick_params(bottom=False)
    panels[-1].set_xlabel(f"{unit} since the start of the step", color=INK)
    draw_legend(figure, legend, (*_NAMES.values(), "idle"), handlelength=1.4, columnspacing=1.4)
    figure.savefig(path)


def _with_prediction(name: str, timeline: _Drawable) -> list[tuple[str, _Drawable]]:
    title = f"{name}, " if name else ""
    if timeline.predicted is None:
        return [(f"{title}step", timeline)]
    return [(f"{title}measured: step", timeline), (f"{title}predicted: step", timeline.predicted)]


def _draw_chart(
    panel: Axes, name: str, timeline: _Drawable, *, unit: str, scale: float, inches_per_s: float
) -> dict[str, Artist]:
    """Draw one chart, and return the entries of its legend by name."""
    from matplotlib.patches import Patch

    groups, shares, start_s = timeline.groups, timeline.idle_share, timeline.start_s
    rows = [stage for group in groups for stage in group]
    own = {stage: pieces(timeline.events_of(stage)) for stage in rows}
    kinds: set[Kind] = {bar.event.kind for bars in own.values() for bar in bars}
    compute_height = _HEIGHT - (_COPY_HEIGHT if "copy" in kinds else 0)
    for place, stage in enumerate(rows):
        first, bottom = place - _HEIGHT / 2, place + _HEIGHT / 2
        panel.broken_barh([(0, timeline.step_s / scale)], (first, compute_height), color=_IDLE, linewidth=0)
        # Its worker is not idle while it works for its other stages.
        others = [one for group in groups if stage in group for one in group if one != stage]
        gaps = [
            ((bar.start_s - start_s) / scale, bar.seconds / scale)
            for other in others
            for bar in own[other]
            if bar.event.kind in COMPUTES
        ]
        panel.broken_barh(gaps, (first, compute_height), color="white", linewidth=0)
        for kind, colour in _COLOURS.items():
            bars = [bar for bar in own[stage] if bar.event.kind == kind and bar.end_s > bar.start_s]
            height = _COPY_HEIGHT if kind == "copy" else compute_height
            top = bottom - height if kind == "copy" else first
            points = [72 * bar.seconds * inches_per_s for bar in bars]
            panel.broken_barh(
                [((bar.start_s - start_s) / scale, bar.seconds / scale) for bar in bars],
                (top, height),
                facecolor=colour,
                hatch="////" if kind == "wait" else None,
                edgecolor=_FAINT if kind == "wait" else "white",
                linewidth=[0.0 if kind == "copy" else min(_EDGE_POINTS, _EDGE_SHARE * width) for width in points],
            )
            if kind not in ("copy", "wait"):
                _write(panel, bars, start_s, top + height / 2, kind, scale=scale, inches_per_s=inches_per_s)
    if len(groups) < len(rows):  # a line parts workers
        for count in [*accumulate(map(len, groups))][:-1]:
            panel.axhline(count - 0.5, color=INK, linewidth=0.6)
    panel.set_ylim(max(1, len(rows)) - 0.5, -0.5)
    panel.set_yticks(range(len(rows)), [f"stage {stage}" for stage in rows], fontsize="small")
    panel.tick_params(colors=INK, labelsize="small", left=False)
    panel.spines[["top", "right", "left"]].set_visible(False)
    panel.xaxis.set_major_formatter("{x:g}")
    panel.set_title(f"{name} {timeline.step_s / scale:.4g} {unit}", color=INK, fontsize="medium", loc="left")
    panel.annotate(
        "idle",
        (_SHARES_AT, 1.0),
        xytext=(0, 6),
        xycoords="axes fraction",
        textcoords="offset points",
        color=INK,
        fontsize="small",
        annotation_clip=False,
    )
    for place, stage in enumerate(rows):
        panel.text(
            _SHARES_AT,
            place,
            f"{shares[stage]:.0%}",
            transform=panel.get_yaxis_transform(),
            color=INK,
            fontsize="small",
            va="center",
        )
    found: dict[str, Artist] = {
        _NAMES[kind]: Patch(facecolor=colour) for kind, colour in _COLOURS.items() if kind != "wait"
    }
    found["wait"] = Patch(facecolor=_COLOURS["wait"], edgecolor=_FAINT, hatch="////", linewidth=0)
    present = {_NAMES[kind] for kind in kinds}
    return {name: one for name, one in found.items() if name in present} | {"idle": Patch(facecolor=_IDLE)}


def _write(
    panel: Axes,
    bars: Sequence[EventPiece],
    since_s: float,
    middle: float,
    kind: Kind,
    *,
    scale: float,
    inches_per_s: float,
) -> None:
    """Write the microbatch into each bar that it fits in; two bars of one kind for one are parts of one event."""
    for bar in bars:
        text = str(bar.event.microbatch)
        if bar.seconds * inches_per_s >= _DIGIT_INCHES * (len(text) + 1):
            panel.text(
                ((bar.start_s + bar.end_s) / 2 - since_s) / scale,
                middle,
                text,
                color="white" if kind in _ON_DARK else INK,
                fontsize="x-small",
                ha="center",
                va="center_baseline",
            )
