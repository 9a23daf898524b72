"""The table that compares ways of running a step."""

import io
from types import SimpleNamespace

from rich.console import Console

from torchremat import FrontierPoint
from torchremat.reports.tables import Row, comparison, frontier_table

MIB = 2**20


def printed(table):
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(table)
    return [line.split() for line in console.export_text().splitlines() if line.strip()]


def test_times_are_compared_with_the_first_row():
    plain = Row(name="plain", peak_bytes=100 * MIB, seconds=2.0, recomputed_flops=0, remark="-")
    half = Row(
        name="50%",
        peak_bytes=49 * MIB,
        seconds=2.5,
        recomputed_flops=1_500_000_000,
        budget_bytes=50 * MIB,
        predicted_bytes=49 * MIB,
        remark="equal",
    )

    lines = printed(comparison([plain, half], title="two", remarks="losses"))

    assert lines[0] == ["two"]
    assert lines[-2] == ["plain", "-", "-", "100.0", "0.0", "2.00", "1.00", "-"]
    assert lines[-1] == ["50%", "50.0", "49.0", "49.0", "1.5", "2.50", "1.25", "equal"]


def test_without_a_heading_there_are_no_remarks():
    row = Row(name="plain", peak_bytes=MIB, seconds=0.0, recomputed_flops=0, remark="unseen")

    assert printed(comparison([row]))[-1] == ["plain", "-", "-", "1.0", "0.0", "0.00", "-"]


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

    lines = printed(frontier_table(SimpleNamespace(points=points), title="one"))

    assert lines[-2:] == [["8.0", "8.0", "100%", "0.00", "1.00"], ["4.1", "4.0", "50%", "2.50", "1.25"]]

    points = (*points, point(3 * MIB, 3 * MIB, 0, 1.5, stored_bytes=5 * MIB))
    lines = printed(frontier_table(SimpleNamespace(points=points)))

    assert [line[-1] for line in lines[-3:]] == ["0.0", "0.0", "5.0"]
