"""The table that compares ways of running a step."""

import io

from rich.console import Console

from torchremat.reports.tables import Row, comparison

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
