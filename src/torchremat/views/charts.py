"""The common part of the plotly.js figures. Figures are plain data, which the page draws.

Why plotly: it zooms, hovers, links and draws trees from data alone; its JavaScript is one file that works without a
network, and is in its Python package, which needs two small ones. Bokeh's file is smaller, but its package brings a web
server; Altair needs a compiler to write a chart into a page.

Colours are names of the page's palette, "@forward", since the viewer makes a page light or dark.
"""

from __future__ import annotations

from typing import TypeAlias

Figure: TypeAlias = dict[str, object]

_UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10), ("B", 1))
_FONT: Figure = {"family": "ui-sans-serif, system-ui, sans-serif", "size": 13, "color": "@ink"}


def unit_of(highest: int) -> tuple[str, int]:
    """Return the unit that sizes up to `highest` are drawn in, and its bytes."""
    return next((name, size) for name, size in _UNITS if highest >= 2 * size or size == 1)


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
