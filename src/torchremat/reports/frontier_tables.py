"""Frontiers in tables of rich."""

from __future__ import annotations

from rich.box import SIMPLE_HEAD
from rich.table import Table

from torchremat.planning.results.frontiers import Frontier

_MIB = 2**20
_FRONTIER = ("budget\nMiB", "peak\nMiB", "against\nplain", "recomputed\nGFLOP", "time\nagainst plain")


def frontier_table(frontier: Frontier) -> Table:
    """Return the points of a frontier as a table; each row has the budget to pass."""
    table = Table(box=SIMPLE_HEAD, padding=(0, 0, 0, 1))
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


def _mib(size: int) -> str:
    return f"{size / _MIB:.1f}"
