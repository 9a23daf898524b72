"""Peaks of trainings as people write them, counted below torch, against those that plans predict."""

from __future__ import annotations

import statistics
import sys
from pathlib import Path

sys.path += map(str, Path(__file__).resolve().parents[:2])

import _paths  # noqa: F401
from _tables import bar, markdown, mib, publish
from counted import COMPILER, run_counted
from programs import PLAIN_AND, PROGRAMS

PROGRAM, PADDING = (Path(__file__).parent / name for name in ("programs.py", "padding.py"))
MOST_OFF = 0.001
# Budgets: the highest of the training with checkpoints, and these parts of what the plain one has above it.
SHARES = (0.8, 0.6, 0.4, 0.2)
ROUNDS, MOST_TIME = 3, 2.0
WITH_CHECKPOINTS = "`gradient_checkpointing=True`"


def run(smoke: bool) -> dict[str, object]:
    if COMPILER is None:
        if not smoke:
            raise SystemExit("allocations are counted by a library that has to be compiled: there is no `cc`")
        return {"rows": [], "padding": [], "bars": []}
    rows = list[dict[str, object]]()
    for name in ["SGD"] if smoke else PROGRAMS:
        rows.append(run_counted(PROGRAM, [name, "small" if smoke else "whole"]))
        sys.stderr.write(f"{rows[-1]}\n")
    padding = padded(smoke)
    return {"rows": rows, "padding": padding, "bars": bars(rows, padding)}


def padded(smoke: bool) -> list[dict[str, object]]:
    """transformers' Trainer with batches of many sizes: plainly, with checkpoints, and within budgets between the two.

    All ways run in turn.
    """
    runs: dict[str, list[dict[str, object]]] = {}

    def run_once(name: str, way: str) -> int:
        runs.setdefault(name, []).append(run_counted(PADDING, [way, "3" if smoke else "50"]))
        sys.stderr.write(f"{name}: {runs[name][-1]}\n")
        return runs[name][-1]["highest"]

    if smoke:
        run_once("a budget", str(2**26))
    for _ in range(0 if smoke else ROUNDS):
        plain, least = run_once("plain", "plain"), run_once(WITH_CHECKPOINTS, "checkpointing")
        for share in SHARES:
            budget = int(least + share * (plain - least))
            run_once(f"a budget of {mib(budget)} MiB", str(budget))
    (first, *_), *_ = runs.values()
    return [
        {
            "name": name,
            "budget": int(found[0]["way"]) if found[0]["way"].isdecimal() else None,
            "highest": max(one["highest"] for one in found),
            "steps": [peak for one in found for peak in one["peaks"]],
            "seconds": statistics.median(one["seconds"] for one in found),
            "is_equal": all(one["result"] == first["result"] for one in found),
        }
        for name, found in runs.items()
    ]


def with_checkpoints(padding: list[dict[str, object]]) -> float:
    """The seconds of the training with checkpoints; of none, a number."""
    return next((row["seconds"] for row in padding if row["name"] == WITH_CHECKPOINTS), 1.0)


def off(row: dict[str, object]) -> float:
    return row["predicted"] / row["measured"] - 1


def bars(rows: list[dict[str, object]], padding: list[dict[str, object]]) -> list[dict[str, object]]:
    offs = [off(row) for row in rows]
    near = sum(abs(one) <= MOST_OFF for one in offs)
    again = sum(row["recomputed_at_plain"] > 0 for row in rows)
    ours = [row for row in padding if row["budget"]]
    above = sum(peak > row["budget"] for row in ours for peak in row["steps"])
    highest = max(row["highest"] / row["budget"] for row in ours)
    slowest = max(row["seconds"] for row in ours) / with_checkpoints(padding)
    return [
        bar(
            f"the predicted peak is within {MOST_OFF:.1%} of the counted one",
            f"{near} of {len(rows)}, from {min(offs, default=0):+.2%} to {max(offs, default=0):+.2%}",
            near == len(rows),
        ),
        bar("it is never below", f"{sum(one < 0 for one in offs)} below", all(one >= 0 for one in offs)),
        bar(f"nothing is recomputed in {PLAIN_AND} of the plain loop's peak", f"{again} of {len(rows)} do", not again),
        bar(
            "with batches of many sizes no step is above its budget",
            f"{above} of {sum(len(row['steps']) for row in ours)}",
            not above,
        ),
        bar("planning included, that is all that the training ever has", f"{highest:.3f} x the budget", highest <= 1),
        bar(
            f"it takes at most {MOST_TIME} x the time of `gradient_checkpointing=True`",
            f"{slowest:.2f}",
            slowest <= MOST_TIME,
        ),
        bar("all trainings end with equal parameters", "", all(row["is_equal"] for row in padding)),
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
    padding = [
        [
            row["name"],
            mib(row["highest"]),
            sum(peak > row["budget"] for peak in row["steps"]) if row["budget"] else "",
            f"{row['seconds']:.1f}",
            f"{row['seconds'] / with_checkpoints(results['padding']):.2f}",
        ]
        for row in results["padding"]
    ]
    named = ["", "highest, MiB", "steps above", "seconds in all", "x with checkpoints"]
    return {"loops": markdown(head, rows), "padding": markdown(named, padding)}


if __name__ == "__main__":
    sys.exit(publish(Path(__file__).parent, run, tables))
