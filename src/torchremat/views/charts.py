"""Figures of plotly.js as plain data, which the page draws: their common part, a staircase, and boxes in boxes.

Why plotly: it zooms, hovers, links and draws trees from data alone; its JavaScript is one file that works without a
network, and is in its Python package, which needs two small ones. Bokeh's file is smaller, but its package brings a web
server; Altair needs a compiler to write a chart into a page.

Colours are names of the page's palette, "@forward", since the viewer makes a page light or dark.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import TypeAlias

from torchremat.tensors.sizes import axis_unit, format_bytes
from torchremat.views.page import Chart

Figure: TypeAlias = dict[str, object]

_FONT: Figure = {"family": "ui-sans-serif, system-ui, sans-serif", "size": 13, "color": "@ink"}


def layout_of(**more: object) -> Figure:
    """Return the common layout of all figures, with `more`; a dict in `more` is merged into an existing one."""
    axis: Figure = {
        "gridcolor": "@grid",
        "linecolor": "@faint",
        "tickcolor": "@faint",
        "showspikes": False,
        "ticks": "outside",
    }
    layout: Figure = {
        "font": _FONT,
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "margin": {"l": 76, "r": 20, "t": 44, "b": 52},
        "hovermode": "closest",
        "hoverlabel": {"bgcolor": "@panel", "bordercolor": "@faint", "font": _FONT, "align": "left", "namelength": -1},
        "legend": {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom", "font": {"size": 12}},
        "dragmode": "zoom",
        "barmode": "overlay",
        "bargap": 0.18,
        "hoverdistance": 30,
        "modebar": {"bgcolor": "rgba(0,0,0,0)", "color": "@quiet", "activecolor": "@ink"},
        "uniformtext": {"minsize": 10, "mode": "hide"},
    }
    for name, value in more.items():
        layout[name] = {**axis, **_dict(value)} if "axis" in name else value
    return layout


def _dict(value: object) -> Figure:
    return {str(key): one for key, one in value.items()} if isinstance(value, dict) else {}


def staircase_chart(
    peak_bytes: Sequence[int],
    slowdowns: Sequence[float],
    *,
    says: Sequence[str],
    marks: Mapping[int, str],
    title: str,
    note: str = "",
) -> Chart:
    """Return peak against time; the key of each point is its number."""
    unit, size = axis_unit(max(peak_bytes))
    peaks = [peak / size for peak in peak_bytes]
    data: list[Figure] = [
        {
            "type": "scatter",
            "mode": "lines+markers",
            "x": peaks,
            "y": [*slowdowns],
            "line": {"shape": "vh", "color": "@backward", "width": 2},
            "marker": {"size": 8, "color": "@backward"},
            "customdata": [[escape(text), str(place)] for place, text in enumerate(says)],
            "hovertemplate": "%{customdata[0]}<extra></extra>",
            "showlegend": False,
        }
    ]
    notes = [
        {
            "x": peaks[place],
            "y": slowdowns[place],
            "text": escape(text),
            "showarrow": True,
            "arrowcolor": "@faint",
            "ax": 36,
            "ay": -30,
            "xanchor": "left",
            "font": {"color": "@ink"},
        }
        for place, text in marks.items()
    ]
    layout = layout_of(
        xaxis={"title": {"text": f"peak of a training step ({unit})"}, "rangemode": "tozero", "zeroline": False},
        yaxis={"title": {"text": "time of a step, plain = 1"}, "zeroline": False},
        annotations=notes,
        hovermode="closest",
    )
    spans = {str(place): [(peak, peak)] for place, peak in enumerate(peaks)}
    return Chart(title=title, figure={"data": data, "layout": layout}, spans=spans, note=note)


_REST = "the rest"


def tree_chart(sizes: Mapping[str, int], *, root: str, title: str, note: str = "") -> Chart:
    """Return bytes by dotted name as a tree of boxes: the box of a name lies in those of its parents.

    Args:
        sizes: The bytes of each name itself, without the names below it.
        root: The name of the outermost box.
        title: Of the chart.
        note: Of the chart.
    """
    names = dict.fromkeys([""])
    for name in sizes:
        parts = name.split(".")
        names |= dict.fromkeys(".".join(parts[: end + 1]) for end in range(len(parts))) if name else {}
    totals = dict.fromkeys(names, 0)
    for name, size in sizes.items():
        parts = name.split(".") if name else []
        for end in range(len(parts) + 1):
            totals[".".join(parts[:end])] += size
    leaves = names.keys() - {name.rpartition(".")[0] for name in names}
    # Bytes of a name itself, in addition to the names below it, would be an empty space in its box: they get a box too.
    own = {f"{name or root}\n": name for name, size in sizes.items() if size and name not in leaves}
    shown = [(escape(name or root), totals[name], name) for name in names]
    shown += [(f"{escape(name or root)}, {_REST}", sizes[name], name) for name in own.values()]
    data: list[Figure] = [
        {
            "type": "treemap",
            "ids": [*(name or root for name in names), *own],
            "labels": [*(escape(name.rpartition(".")[2] or root) for name in names), *(_REST for _ in own)],
            "parents": [
                *("" if not name else name.rpartition(".")[0] or root for name in names),
                *(name or root for name in own.values()),
            ],
            "values": [size for _, size, _ in shown],
            "branchvalues": "total",
            "customdata": [[words, format_bytes(size), name] for words, size, name in shown],
            "hovertemplate": "%{customdata[0]}<br>%{customdata[1]}<extra></extra>",
            "texttemplate": "%{label}<br>%{customdata[1]}",
            "tiling": {"pad": 2},
            "marker": {
                "colors": [*("@tree1" if name in leaves else "@tree0" for name in names), *("@tree1" for _ in own)],
                "line": {"color": "@panel", "width": 1},
            },
            "pathbar": {"visible": True},
        }
    ]
    layout = layout_of(hovermode="closest", margin={"l": 4, "r": 4, "t": 28, "b": 4})
    return Chart(title=title, figure={"data": data, "layout": layout}, note=note)
