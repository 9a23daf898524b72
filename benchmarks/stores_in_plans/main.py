"""Under a budget, with and without a disk to put saved tensors on: peaks, recomputed flops, seconds.

With `UNTIMED=1` in the environment no step is timed: for a machine on which others run as well.
"""

from __future__ import annotations

import os
import sys
from dataclasses import asdict
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))

import _paths  # noqa: F401
from _steps import Make, computed, differing, ratio, seconds_in_turn, take, training_step
from _tables import bar, markdown, mflop, mib, publish, yes

import models
import torchremat

MODELS: dict[str, Make] = {
    "GPT": lambda: models.gpt_step(vocabulary=1000),
    "U-Net": models.unet_step,
    "ResNet": models.resnet_step,
}
TINY: dict[str, Make] = {"GPT": lambda: models.gpt_step(blocks=3, width=32, context=32, vocabulary=64)}
SHARES = (0.6, 0.4)  # of the plain step's peak beside what lies there before it
ROUNDS = 0 if os.environ.get("UNTIMED") else 30

RECOMPUTE, DISK = "recompute", "with `Disk()`"


def planners(make: Make) -> dict[str, torchremat.Planner]:
    """Return the ways of planning, each with a disk of its own."""
    return {
        f"{RECOMPUTE}, fewest flops": torchremat.Planner(*make(), cost="flops"),
        f"{DISK}, fewest flops": torchremat.Planner(*make(), cost="flops", stores=[torchremat.Disk()]),
        f"{RECOMPUTE}, fewest seconds": torchremat.Planner(*make(), cost="seconds"),
        f"{DISK}, fewest seconds": torchremat.Planner(*make(), cost="seconds", stores=[torchremat.Disk()]),
    }


def compare(make: Make, share: float, ways: dict[str, torchremat.Planner], rounds: int) -> list[dict[str, object]]:
    """Plan in each way for one budget, measure the plans, and time them in turn."""
    plain, expected = take(*make()), computed(*make())
    budget = plain.before_bytes + int(share * plain.step_bytes)
    runs = {"plain": training_step(*make())}
    rows: list[dict[str, object]] = []
    plans: dict[str, torchremat.Plan] = {}
    for name, planner in ways.items():
        plan = plans[name] = planner.plan(max(budget, planner.floor_bytes))
        model, step = make()
        plan.apply(model)
        rows.append(
            {
                "way": name,
                "budget_bytes": plan.budget_bytes,
                "predicted_bytes": plan.peak_bytes,
                "taken": asdict(take(model, step)),
                "stored_bytes": plan.stored_bytes,
                "stored_units": len(plan.stored),
                "predicted_ratio": plan.slowdown,
                "differs": differing(computed(model, step), expected),
            }
        )
        runs[name] = training_step(model, step)
    seconds = seconds_in_turn(runs, rounds) if rounds else None
    for row in rows:
        way = row["way"]
        row["time"] = None if seconds is None else asdict(ratio(seconds[way], seconds["plain"]))
        # Against the plan for the same budget and cost that has no disk.
        rival = way.replace(DISK, RECOMPUTE)
        row["same"] = rival != way and does(plans[way]) == does(plans[rival])
        against = None if seconds is None or rival == way or row["same"] else ratio(seconds[way], seconds[rival])
        row["against"] = None if against is None else asdict(against)
    return rows


def does(plan: torchremat.Plan) -> tuple[object, ...]:
    """What a plan does in a step. Two that do the same differ in nothing but noise."""
    return plan.tree, plan.held, plan.stored


def run(smoke: bool) -> dict[str, object]:
    found: dict[str, object] = {"models": {}, "bars": []}
    for name, make in (TINY if smoke else MODELS).items():
        ways = planners(make)
        shares = SHARES[:1] if smoke else SHARES
        found["models"][name] = {share: compare(make, share, ways, 1 if smoke else ROUNDS) for share in shares}
    rows = [row for shares in found["models"].values() for rows in shares.values() for row in rows]
    over = [row for row in rows if row["taken"]["peak_bytes"] > row["predicted_bytes"]]
    off = max(abs(1 - row["taken"]["peak_bytes"] / row["predicted_bytes"]) for row in rows)
    exact = [row for row in rows if not row["differs"]]
    found["bars"] = [
        bar("Measured peak never above the predicted one", f"{len(over)} of {len(rows)} above", not over),
        bar("and within 1% of it", f"{100 * off:.2f}% at most", off <= 0.01),
        bar("Loss, gradients and buffers equal bit for bit", f"{len(exact)} of {len(rows)}", exact == rows),
    ]
    timed = [row for row in rows if row["time"]]
    if timed:
        worst = max(abs(_off(row)) for row in timed)
        quick = [row for row in timed if DISK in row["way"] and "seconds" in row["way"]]
        slowest = max((row["against"]["median"] for row in quick if row["against"]), default=1.0)
        same = sum(row["same"] for row in quick)
        found["bars"] += [
            bar("Measured time within 10% of the predicted", f"{100 * worst:.0f}% at most", worst <= 0.1),
            bar(
                "For the fewest seconds, never slower with a disk than without (3% of noise)",
                f"{same} of {len(quick)} the same plan, the others {slowest:.2f} times at most",
                slowest <= 1.03,
            ),
        ]
    return found


def _off(row: dict[str, object]) -> float:
    """Return by which share a plan takes longer than predicted."""
    return row["time"]["median"] / row["predicted_ratio"] - 1


HEAD = (
    "budget",
    "predicted",
    "measured",
    "recomputed, MFLOP",
    "stored, MiB",
    "units",
    "time, predicted",
    "time",
    "off",
    "against recompute",
    "equal",
)


def tables(results: dict[str, object]) -> dict[str, str]:
    return {
        name: markdown([name, *HEAD], [_row(share, row) for share, rows in shares.items() for row in rows])
        for name, shares in results["models"].items()
    }


def _row(share: float | str, row: dict[str, object]) -> list[object]:
    taken = row["taken"]
    return [
        f"{100 * float(share):.0f}%, {row['way']}",
        mib(row["budget_bytes"]),
        mib(row["predicted_bytes"]),
        mib(taken["peak_bytes"]),
        mflop(taken["recomputed_flops"]),
        mib(row["stored_bytes"]),
        row["stored_units"],
        f"{row['predicted_ratio']:.2f}",
        _told(row["time"]),
        f"{100 * _off(row):+.0f}%" if row["time"] else "-",
        "the same plan" if row["same"] else _told(row["against"]),
        yes(not row["differs"]),
    ]


def _told(time: dict[str, float] | None) -> str:
    return f"{time['median']:.2f} ({time['low']:.2f}-{time['high']:.2f})" if time else "-"


if __name__ == "__main__":
    sys.exit(publish(Path(__file__).parent, run, tables))
