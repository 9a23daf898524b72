"""Peak against time as a figure: a staircase, since a plan serves every budget up to the next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from torchremat.views.charts import Figure, layout_of, unit_of
from torchremat.views.page import Chart


def staircase_chart(
    peak_bytes: Sequence[int],
    slowdowns: Sequence[float],
    *,
    says: Sequence[str],
    marks: Mapping[int, str],
    title: str,
    note: str = "",
) -> Chart:
    """Return peak against time; the key of each point is its number.

    Args:
        peak_bytes: The peak of each point.
        slowdowns: The slowdown of each point.
        says: The hover text of each point.
        marks: Labels next to some of the points.
        title: Of the chart.
        note: Of the chart.
    """
    unit, size = unit_of(max(peak_bytes))
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
