"""The table of a frontier."""

import io
from types import SimpleNamespace

from rich.console import Console

from torchremat import FrontierPoint
from torchremat.cli.commands import frontier_table

MIB = 2**20


def printed(table):
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(table)
    return [line.split() for line in console.export_text().splitlines() if line.strip()]


def test_budgets_of_a_frontier_are_rounded_up():
    def point(budget_bytes, peak_bytes, flops, slowdown, stored_bytes=0):
        return FrontierPoint(
            budget_bytes=budget_bytes,
            peak_bytes=peak_bytes,
            step_bytes=peak_bytes,
            recompute_seconds=0.0,
            recomputed_flops=flops,
            stored_bytes=stored_bytes,
            slowdown=slowdown,
        )

    points = (point(8 * MIB, 8 * MIB, 0, 1.0), point(4 * MIB + 1, 4 * MIB, 2_500_000_000, 1.25))

    lines = printed(frontier_table(SimpleNamespace(points=points)))

    assert lines[-2:] == [["8.0", "8.0", "100%", "0.00", "1.00"], ["4.1", "4.0", "50%", "2.50", "1.25"]]

    points = (*points, point(3 * MIB, 3 * MIB, 0, 1.5, stored_bytes=5 * MIB))
    lines = printed(frontier_table(SimpleNamespace(points=points)))

    assert [line[-1] for line in lines[-3:]] == ["0.0", "0.0", "5.0"]
