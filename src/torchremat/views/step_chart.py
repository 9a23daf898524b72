"""A step as a figure: the curve of its bytes in the colours of the running phases, and rows of slices below."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from itertools import groupby
from typing import get_args

from torchremat.tensors.sizes import axis_unit, format_bytes
from torchremat.views.charts import Figure, layout_of
from torchremat.views.page import Chart
from torchremat.views.steps import CurvePoint, Phase, Slice, Step

_PHASES: tuple[Phase, ...] = get_args(Phase)
_MOST_OUTLINED, _MOST_NAMED = 120, 400  # slices of a row: with more, only outlines would be visible
_ROW_PIXELS, _CURVE_PIXELS, _MARGIN_PIXELS = 26, 360, 120

# A browser draws this many points without a pause. Of more, the page keeps every visible one: the first, the lowest,
# the highest and the last of equal stretches of the curve.
MOST_POINTS = 24_000


def step_chart(step: Step, *, others: Sequence[Step] = (), title: str, note: str = "") -> Chart:
    """Return the curve of a step with its slices below, and the lines of other steps."""
    steps = (step, *others)
    highest = max([one.live_bytes for each in steps for one in each.points] + [step.budget_bytes or 0, 1])
    unit, size = axis_unit(highest)
    time_unit, scale = ("s", 1.0) if max(each.ends_s for each in steps) >= 2 else ("ms", 1e3)
    points = thinned(step.points)
    if len(points) < len(step.points):
        note = f"{note} {len(points):,} of {len(step.points):,} points are drawn, with each peak.".strip()
    data = [
        *_before(step, scale, size),
        *(_area(step, points, phase, scale, size) for phase in _PHASES if any(one.phase == phase for one in points)),
        *(_line(one, thinned(one.points), scale, size, is_other=True) for one in others),
        _line(step, points, scale, size, is_other=False),
        *_budget(step, max(each.ends_s for each in steps), scale, size),
        *_peak(step, scale, size),
    ]
    rows = [*dict.fromkeys(one.row for one in step.slices)]
    data += [_bars(row, [one for one in step.slices if one.row == row], scale) for row in rows]
    height = _CURVE_PIXELS + _MARGIN_PIXELS + _ROW_PIXELS * len(rows)
    share = _ROW_PIXELS * len(rows) / (height - _MARGIN_PIXELS)
    layout = layout_of(
        xaxis={
            "title": {"text": f"time in the step ({time_unit})"},
            "anchor": "y2" if rows else "y",
            "range": [0, max(each.ends_s for each in steps) * scale],
            "autorange": False,
            "zeroline": False,
        },
        yaxis={
            "title": {"text": f"live memory ({unit})"},
            "domain": [share + 0.03 if rows else 0, 1],
            "rangemode": "tozero",
            "fixedrange": True,
        },
        yaxis2={
            "domain": [0, share],
            "autorange": "reversed",
            "fixedrange": True,
            "categoryorder": "array",
            "categoryarray": rows,
            "showgrid": False,
        },
        annotations=_peak_notes(step, scale, size),
    )
    spans: dict[str, list[tuple[float, float]]] = {}
    for one in step.slices:
        if one.key and one.kind == "module":  # a region is more than the row with its key
            spans.setdefault(one.key, []).append((one.starts_s * scale, one.ends_s * scale))
    return Chart(title=title, figure={"data": data, "layout": layout}, spans=spans, note=note, height=height)


def thinned(points: Sequence[CurvePoint], most: int = MOST_POINTS) -> list[CurvePoint]:
    """Return about `most` points: the first, the lowest, the highest and the last of equal stretches.

    No point at a change of phase is left out, so the result may have a few more.
    """
    if len(points) <= most:
        return [*points]
    length = -(-len(points) * 4 // most)
    found: list[CurvePoint] = []
    for start in range(0, len(points), length):
        places = range(start, min(start + length, len(points)))
        lowest = min(places, key=lambda place: points[place].live_bytes)
        highest = max(places, key=lambda place: points[place].live_bytes)
        changes = {place for place in places if place and points[place].phase != points[place - 1].phase}
        found += [points[place] for place in sorted({places[0], lowest, highest, places[-1], *changes})]
    return found


def _before(step: Step, scale: float, size: int) -> list[Figure]:
    if not step.before_bytes:
        return []
    height, ends = step.before_bytes / size, step.ends_s * scale
    return [
        {
            **_AREA,
            "name": "there before the step",
            "x": [0, 0, ends, ends],
            "y": [0, height, height, 0],
            "fillcolor": "@before",
        }
    ]


_AREA: Figure = {"type": "scatter", "mode": "lines", "fill": "toself", "line": {"width": 0}, "hoverinfo": "skip"}


def _area(step: Step, points: Sequence[CurvePoint], phase: str, scale: float, size: int) -> Figure:
    """Return the area of one phase: a closed shape for each stretch of it, with gaps between."""
    base = step.before_bytes / size
    xs: list[float | None] = []
    ys: list[float | None] = []
    for is_phase, group in groupby(range(len(points)), key=lambda place: points[place].phase == phase):
        places = [*group]
        if not is_phase:
            continue
        reach = [*places, places[-1] + 1] if places[-1] + 1 < len(points) else places
        x, y = _points(step, [points[place] for place in reach], scale, size)
        if xs:
            xs.append(None)
            ys.append(None)
        xs += [x[0], *x, x[-1], x[0]]
        ys += [base, *y, base, base]
    return {**_AREA, "name": phase, "x": xs, "y": ys, "fillcolor": f"@{phase}"}


def _points(step: Step, points: Sequence[CurvePoint], scale: float, size: int) -> tuple[list[float], list[float]]:
    """Return the corners of the curve."""
    xs = [one.seconds * scale for one in points]
    ys = [one.live_bytes / size for one in points]
    if not step.jumps:
        return xs, ys
    corners = [(xs[0], ys[0])]
    for place in range(1, len(xs)):
        corners += [(xs[place], ys[place - 1]), (xs[place], ys[place])]
    return [x for x, _ in corners], [y for _, y in corners]


def _line(step: Step, points: Sequence[CurvePoint], scale: float, size: int, *, is_other: bool) -> Figure:
    line: Figure = {"shape": "hv" if step.jumps else "linear", "width": 1.5, "color": "@ink"}
    if is_other:
        line |= {"color": "@plain", "dash": "dot"}
    return {
        "type": "scatter",
        "mode": "lines",
        "name": step.name,
        "x": [one.seconds * scale for one in points],
        "y": [one.live_bytes / size for one in points],
        "line": line,
        "customdata": [[_hover(one, step.name if is_other else ""), one.key] for one in points],
        "hovertemplate": "%{customdata[0]}<extra></extra>",
    }


def _hover(moment: CurvePoint, name: str) -> str:
    lines = [f"<b>{format_bytes(moment.live_bytes)}</b> at {1e3 * moment.seconds:.2f} ms", *map(escape, moment.says)]
    return "<br>".join([f"<i>{escape(name)}</i>", *lines] if name else lines)


def _budget(step: Step, ends_s: float, scale: float, size: int) -> list[Figure]:
    if step.budget_bytes is None:
        return []
    height = step.budget_bytes / size
    return [
        {
            "type": "scatter",
            "mode": "lines",
            "name": f"budget {format_bytes(step.budget_bytes)}",
            "x": [0, ends_s * scale],
            "y": [height, height],
            "line": {"color": "@budget", "width": 1.5, "dash": "dash"},
            "hoverinfo": "skip",
        }
    ]


def _peak(step: Step, scale: float, size: int) -> list[Figure]:
    peak = step.peak
    if peak is None:
        return []
    return [
        {
            "type": "scatter",
            "mode": "markers",
            "name": f"peak {format_bytes(peak.live_bytes)}",
            "x": [peak.seconds * scale],
            "y": [peak.live_bytes / size],
            "marker": {"size": 10, "color": "@page", "line": {"color": "@budget", "width": 2.5}},
            "customdata": [[_hover(peak, "peak"), peak.key]],
            "hovertemplate": "%{customdata[0]}<extra></extra>",
            "cliponaxis": False,
        }
    ]


def _peak_notes(step: Step, scale: float, size: int) -> list[Figure]:
    peak = step.peak
    if peak is None:
        return []
    place = peak.seconds / max(step.ends_s, 1e-12)
    return [
        {
            "x": peak.seconds * scale,
            "y": peak.live_bytes / size,
            "text": f"peak {format_bytes(peak.live_bytes)}",
            "showarrow": False,
            "yshift": 18,
            "xanchor": "left" if place < 0.1 else "right" if place > 0.9 else "center",
            "bgcolor": "@panel",
            "opacity": 0.92,
            "borderpad": 2,
            "font": {"size": 12, "color": "@ink"},
        }
    ]


def _bars(row: str, slices: Sequence[Slice], scale: float) -> Figure:
    """Return one row of slices below the curve; every second of neighbours with the same colour is paler."""
    return {
        "type": "bar",
        "orientation": "h",
        "yaxis": "y2",
        "name": row,
        "showlegend": False,
        "y": [row] * len(slices),
        "base": [one.starts_s * scale for one in slices],
        "x": [(one.ends_s - one.starts_s) * scale for one in slices],
        "marker": {
            "color": [
                f"@{one.kind}{place % 2}" if one.kind in ("module", "other") else f"@{one.kind}"
                for place, one in enumerate(slices)
            ],
            "line": {"width": 1 if len(slices) <= _MOST_OUTLINED else 0, "color": "@panel"},
        },
        "customdata": [[_describe(one), one.key] for one in slices],
        "hovertemplate": "%{customdata[0]}<extra></extra>",
        "text": [escape(one.name) for one in slices] if len(slices) <= _MOST_NAMED else None,
        "textposition": "inside",
        "insidetextanchor": "middle",
        "constraintext": "inside",
        "textangle": 0,
        "textfont": {"size": 11},
    }


def _describe(one: Slice) -> str:
    length = f"{1e3 * one.starts_s:.2f} to {1e3 * one.ends_s:.2f} ms"
    return "<br>".join([f"<b>{escape(one.name)}</b>", length, *map(escape, one.says)])
