"""A frontier as a page: peak against time, and a table of the points with the budget to pass for each."""

from __future__ import annotations

from torchremat.planning.frontier_data import FrontierData, FrontierPoint
from torchremat.tensors.sizes import format_bytes
from torchremat.views.charts import staircase_chart
from torchremat.views.page import Fact, Page, Table, TableCell, TableRow, size_cell


def page_of(frontier: FrontierData) -> Page:
    """Return the page of a frontier."""
    points, plain, floor, knee = frontier.shown, frontier.points[0], frontier.floor, frontier.knee
    facts = [
        Fact(name="plain", value=format_bytes(plain.peak_bytes), note="the peak of a step that recomputes nothing"),
        Fact(
            name="floor",
            value=format_bytes(floor.peak_bytes),
            note=f"the lowest found, at {floor.slowdown:.2f} x plain",
        ),
    ]
    marks = {len(points) - 1: f"floor: {format_bytes(floor.peak_bytes)}, {floor.slowdown:.2f} x"}
    if knee is not None:
        note = f"at {knee.slowdown:.2f} x plain; below it each byte costs more time than above"
        facts.insert(1, Fact(name="knee", value=format_bytes(knee.peak_bytes), note=note))
        marks[points.index(knee)] = f"knee: {format_bytes(knee.peak_bytes)}, {knee.slowdown:.2f} x"
    facts += [Fact(name="remark", value="", note=remark) for remark in frontier.remarks]
    chart = staircase_chart(
        [point.peak_bytes for point in points],
        [point.slowdown for point in points],
        says=[f"{format_bytes(point.peak_bytes)} at {point.slowdown:.2f} x plain" for point in points],
        marks=marks,
        title="Peak against time",
        note="A plan serves every budget up to the next point.",
    )
    return Page(
        title=f"Peak against time on {frontier.device}, planned by {frontier.cost}",
        facts=tuple(facts),
        charts=(chart,),
        tables=(_table(frontier),),
    )


def _table(frontier: FrontierData) -> Table:
    whole = max(1, frontier.shown[0].peak_bytes)
    stores = any(point.stored_bytes for point in frontier.shown)
    steps = any(point.stepping != frontier.shown[0].stepping for point in frontier.shown)
    few = ["stored"] * stores + ["optimizer"] * steps
    columns = ("budget", "to pass", "peak", "of plain", "time", "GFLOP recomputed", *few)
    rows = tuple(_row(point, place, whole, stores=stores, steps=steps) for place, point in enumerate(frontier.shown))
    return Table(title="Points", columns=columns, rows=rows)


def _row(point: FrontierPoint, place: int, whole: int, *, stores: bool, steps: bool) -> TableRow:
    cells = (
        size_cell(point.budget_bytes),
        TableCell(str(point.budget_bytes), point.budget_bytes),
        size_cell(point.peak_bytes),
        TableCell(f"{100 * point.peak_bytes / whole:.0f}%", point.peak_bytes),
        TableCell(f"{point.slowdown:.2f} x", point.slowdown),
        TableCell(f"{point.recomputed_flops / 1e9:.2f}", point.recomputed_flops),
        *([size_cell(point.stored_bytes)] if stores else []),
        *([TableCell(str(point.stepping))] if steps else []),
    )
    return TableRow(cells=cells, key=str(place))
