"""Bytes by module as a figure: boxes in boxes."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape

from torchremat.tensors.sizes import format_bytes
from torchremat.views.charts import Figure, layout_of
from torchremat.views.page import Chart


def tree_chart(sizes: Mapping[str, int], *, root: str, title: str, note: str = "") -> Chart:
    """Return bytes by dotted name as a tree of boxes: the box of a name lies in those of its parents.

    Args:
        sizes: Of each name itself, without what lies below it.
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
    data: list[Figure] = [
        {
            "type": "treemap",
            "ids": [name or root for name in names],
            "labels": [escape(name.rpartition(".")[2] or root) for name in names],
            "parents": ["" if not name else name.rpartition(".")[0] or root for name in names],
            "values": [totals[name] for name in names],
            "branchvalues": "total",
            "customdata": [[escape(name or root), format_bytes(totals[name]), name] for name in names],
            "hovertemplate": "%{customdata[0]}<br>%{customdata[1]}<extra></extra>",
            "texttemplate": "%{label}<br>%{customdata[1]}",
            "tiling": {"pad": 2},
            "marker": {
                "colors": ["@tree1" if name in leaves else "@tree0" for name in names],
                "line": {"color": "@panel", "width": 1},
            },
            "pathbar": {"visible": True},
        }
    ]
    layout = layout_of(hovermode="closest", margin={"l": 4, "r": 4, "t": 28, "b": 4})
    return Chart(title=title, figure={"data": data, "layout": layout}, note=note)
