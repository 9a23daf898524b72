"""Peaks of trainings as people write them, counted below torch, against those that plans predict."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path += map(str, Path(__file__).resolve().parents[:2])

import _paths  # noqa: F401
from _tables import bar, markdown, mib, publish
from counted import COMPILER, run_counted
from programs import PLAIN_AND, PROGRAMS

PROGRAM = Path(__file__).parent / "programs.py"
MOST_OFF = 0.001


def run(smoke: bool) -> dict[str, object]:
    if COMPILER is None:
        if not smoke:
            raise SystemExit("allocations are counted by a library that has to be compiled: there is no `cc`")
        return {"rows": [], "bars": []}
    rows = list[dict[str, object]]()
    for name in ["SGD"] if smoke else PROGRAMS:
        rows.append(run_counted(PROGRAM, [name, "small" if smoke else "whole"]))
        sys.stderr.write(f"{rows[-1]}\n")
    return {"rows": rows, "bars": bars(rows)}


def off(row: dict[str, object]) -> float:
    return row["predicted"] / row["measured"] - 1


def bars(rows: list[dict[str, object]]) -> list[dict[str, object]]:
    offs = [off(row) for row in rows]
    near = sum(abs(one) <= MOST_OFF for one in offs)
    again = sum(row["recomputed_at_plain"] > 0 for row in rows)
    return [
        bar(
            f"the predicted peak is within {MOST_OFF:.1%} of the counted one",
            f"{near} of {len(rows)}, from {min(offs, default=0):+.2%} to {max(offs, default=0):+.2%}",
            near == len(rows),
        ),
        bar("it is never below", f"{sum(one < 0 for one in offs)} below", all(one >= 0 for one in offs)),
        bar(f"nothing is recomputed in {PLAIN_AND} of the plain loop's peak", f"{again} of {len(rows)} do", not again),
    ]


def tables(results: dict[str, object]) -> dict[str, str]:
    head = ["", "plain, MiB", "predicted", "within a budget, MiB", "predicted", "off by", "recomputed calls"]
    rows = [
        [
            row["name"],
            mib(row["plain"]),
            mib(row["plain_predicted"]),
            mib(row["measured"]),
            mib(row["predicted"]),
            f"{off(row):+.3%}",
            row["recomputed"],
        ]
        for row in results["rows"]
    ]
    return {"loops": markdown(head, rows)}


if __name__ == "__main__":
    sys.exit(publish(Path(__file__).parent, run, tables))
