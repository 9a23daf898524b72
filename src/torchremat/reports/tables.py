"""Steps of one model, plain and under plans, and frontiers, in tables of rich."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.box import SIMPLE_HEAD
from rich.table import Table

from torchremat.planning.frontiers import Frontier

_MIB = 2**20
_FRONTIER = ("budget\nMiB", "peak\nMiB", "against\nplain", "recomputed\nGFLOP", "time\nagainst plain")
_HEADINGS = ("budget\nMiB", "predicted\nMiB", "measured\nMiB", "recomputed\nGFLOP", "time\ns", "against\nplain")


@dataclass(frozen=True, kw_only=True)
class Row:
    """One way of running a step.

    Attributes:
        name: Its name.
        peak_bytes: Measured peak of a training step.
        seconds: Of a step.
        recomputed_flops: Measured.
        budget_bytes: None without a plan.
        predicted_bytes: The peak that the plan predicts; None without a plan.
        remark: A remark about it.
    """

    name: str
    peak_bytes: int
    seconds: float
    recomputed_flops: int
    budget_bytes: int | None = None
    predicted_bytes: int | None = None
    remark: str = ""


def comparison(rows: Sequence[Row], *, title: str = "", remarks: str = "") -> Table:
    """Return a table of the rows; times are compared with the first row's.

    Args:
        rows: At least one.
        title: Of the table.
        remarks: Heading of the remarks; without one the table has no column for them.
    """
    table = Table(title=title or None, box=SIMPLE_HEAD, padding=(0, 0, 0, 1))
    table.add_column("")
    for heading in _HEADINGS:
        table.add_column(heading, justify="right")
    if remarks:
        table.add_column(remarks)
    for row in rows:
        cells = [
            row.name,
            _mib(row.budget_bytes),
            _mib(row.predicted_bytes),
            _mib(row.peak_bytes),
            f"{row.recomputed_flops / 1e9:.1f}",
            f"{row.seconds:.2f}",
            f"{row.seconds / rows[0].seconds:.2f}" if rows[0].seconds else "-",
        ]
        table.add_row(*cells, *([row.remark] if remarks else []))
    return table


def frontier_table(frontier: Frontier, *, title: str = "") -> Table:
    """Return the points of a frontier as a table; each row has the budget to pass.

    Args:
        frontier: The frontier.
        title: Of the table.
    """
    table = Table(title=title or None, box=SIMPLE_HEAD, padding=(0, 0, 0, 1))
    stored = any(point.stored_bytes for point in frontier.points)
    for heading in (*_FRONTIER, *(["stored\nMiB"] if stored else [])):
        table.add_column(heading, justify="right")
    steps = any(point.stepping != frontier.points[0].stepping for point in frontier.points)
    if steps:
        table.add_column("optimizer")
    for point in frontier.points:
        table.add_row(
            # Rounded up: a budget read off the table must suffice.
            f"{-(-10 * point.budget_bytes // _MIB) / 10:.1f}",
            _mib(point.peak_bytes),
            f"{100 * point.peak_bytes / max(1, frontier.points[0].peak_bytes):.0f}%",
            f"{point.recomputed_flops / 1e9:.2f}",
            f"{point.slowdown:.2f}",
            *([_mib(point.stored_bytes)] if stored else []),
            *([str(point.stepping)] if steps else []),
        )
    return table


def _mib(size: int | None) -> str:
    return "-" if size is None else f"{size / _MIB:.1f}"
