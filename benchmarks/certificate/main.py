"""How far our plans can be from the best of all schedules, and what it takes to know that."""

from __future__ import annotations

import sys
import time
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))

import _paths  # noqa: F401
import numpy as np
from _steps import Make
from _tables import MIB, bar, markdown, mib, publish

import models
import torchremat
from torchremat.planning.bounds.plain_step import PlainStep
from torchremat.schedules.bounds import lower_bound

# Budgets in MiB beside what lies there before a step, and how far from the best a plan may be at each, in percent.
BUDGETS: dict[str, dict[int, float]] = {
    "GPT": {100: 3.0, 80: 3.0, 60: 3.0, 45: 3.0, 36: 5.0, 30: 5.0},
    "U-Net": {90: 3.5, 75: 3.5, 60: 3.5, 55: 3.5},
}
MODELS: dict[str, Make] = {"GPT": lambda: models.gpt_step(vocabulary=1000), "U-Net": models.unet_step}
TINY: dict[str, Make] = {
    "GPT": lambda: models.gpt_step(blocks=4, width=32, context=32, vocabulary=64),
    "U-Net": lambda: models.unet_step(batch=1, size=16, width=8),
}
# And how often each is profiled anew: flops are always the same, and seconds never.
COSTS = {"flops": 1, "seconds": 9}

BLOCKS = (8, 24, 48, 100)  # of a small GPT; 100 have some 1000 operators
SHARES = (0.7, 0.4, 0.25)  # of the plain peak
MOST_S = 5.0


def certified(make: Make, budgets: list[int], cost: str, rounds: int) -> list[dict[str, object]]:
    """Certify a plan for each budget; the one whose gap is the median over several profiles, and the quarters of it."""
    found = []
    for rows in zip(*(certified_once(make, budgets, cost) for _ in range(rounds)), strict=True):
        ordered = sorted(rows, key=lambda row: row["gap"])
        gaps = [row["gap"] for row in ordered]
        low, high = (float(np.quantile(gaps, share)) for share in (0.25, 0.75))
        found.append({**ordered[len(ordered) // 2], "gap_low": low, "gap_high": high})
    return found


def certified_once(make: Make, budgets: list[int], cost: str) -> list[dict[str, object]]:
    planner = torchremat.Planner(*make(), cost=cost, certify=True)
    before = planner.fixed_bytes
    assert isinstance(planner.profiled.plain_step, PlainStep)  # which no plan for bytes runs
    plans = [planner.plan(before + size) for size in budgets if before + size >= planner.floor_bytes]
    return [
        {
            "budget_bytes": plan.budget_bytes - before,
            "step_cost": plan.certificate.step_cost,
            "cost": plan.certificate.cost,
            "bound_all": plan.certificate.bound_all,
            "bound_persistent": plan.certificate.bound_persistent,
            "gap": plan.certificate.gap,
            "seconds": plan.certificate.seconds,
        }
        for plan in plans
    ]


def solver_seconds(blocks: int) -> dict[str, object]:
    planner = torchremat.Planner(*models.gpt_step(blocks=blocks, width=64, context=64, vocabulary=64), cost="seconds")
    step, plain = planner.profiled.plain_step, planner.solver.plain.prediction.peak_bytes
    seconds = {}
    for share in SHARES:
        start_s = time.process_time()
        lower_bound(step.flow, step.pulls, int(share * plain))
        seconds[f"{share:.0%}"] = time.process_time() - start_s
    return {"operators": len(step.flow.operators), "seconds": seconds}


def run(smoke: bool) -> dict[str, object]:
    found: dict[str, object] = {"models": {}, "solver": {}, "bars": []}
    for name, make in (TINY if smoke else MODELS).items():
        sizes = [600_000, 400_000] if smoke else [size * MIB for size in BUDGETS[name]]
        found["models"][name] = {
            cost: certified(make, sizes, cost, rounds) for cost, rounds in list(COSTS.items())[: 1 if smoke else 2]
        }
        if not smoke:
            found["bars"] += [one for cost in COSTS for one in gap_bars(name, found["models"][name][cost], cost)]
    for blocks in (4,) if smoke else BLOCKS:
        found["solver"][str(blocks)] = solver_seconds(blocks)
    last = list(found["solver"].values())[-1]
    longest = max(last["seconds"].values())
    claim = f"the bound over all schedules takes at most {MOST_S:.0f} s at {last['operators']} operators"
    found["bars"].append(bar(claim, f"{longest:.1f} s", longest <= MOST_S))
    return found


def gap_bars(name: str, rows: list[dict[str, object]], cost: str) -> list[dict[str, object]]:
    bars = []
    for most in sorted(set(BUDGETS[name].values())):
        sizes = [size for size, one in BUDGETS[name].items() if one == most]
        gaps = [100 * row["gap"] for row in rows if row["budget_bytes"] / MIB in sizes]
        claim = f"{name}: at most {most:g}% of a step at {', '.join(map(str, sizes))} MiB, in {cost}"
        met = len(gaps) == len(sizes) and max(gaps) <= most
        bars.append(bar(claim, ", ".join(f"{gap:.1f}%" for gap in gaps), met))
    return bars


def share(row: dict[str, object], what: str) -> str:
    return "-" if row[what] is None else f"{100 * row[what] / row['step_cost']:.2f}%"


def gap(row: dict[str, object]) -> str:
    low, median, high = (f"{100 * row[name]:.2f}" for name in ("gap_low", "gap", "gap_high"))
    return f"{median}% ({low}-{high})"


def tables(results: dict[str, object]) -> dict[str, str]:
    made = {}
    for cost in COSTS:
        rows = [
            [
                name,
                mib(row["budget_bytes"]),
                share(row, "cost"),
                share(row, "bound_all"),
                gap(row) if cost == "seconds" else f"{100 * row['gap']:.2f}%",
                share(row, "bound_persistent"),
                f"{row['seconds']:.2f} s",
            ]
            for name, one in results["models"].items()
            for row in one.get(cost, ())
        ]
        head = ["", "budget, MiB", "recomputed", "any schedule, at least", "gap", "whole calls, at least", "found in"]
        made[cost] = markdown(head, rows)
    solved = [
        [f"{blocks} blocks, {one['operators']} operators", *(f"{seconds:.2f}" for seconds in one["seconds"].values())]
        for blocks, one in results["solver"].items()
    ]
    shares = [f"at {name} of the plain peak" for name in next(iter(results["solver"].values()))["seconds"]]
    made["solver"] = markdown(["seconds", *shares], solved)
    return made


if __name__ == "__main__":
    sys.exit(publish(Path(__file__).parent, run, tables))
