"""Bytes by module as a figure: boxes in boxes."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape

from torchremat.tensors.sizes import format_bytes
from torchremat.views.charts import Figure, layout_of
from torchremat.views.page import Chart

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
