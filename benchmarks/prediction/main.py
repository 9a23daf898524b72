"""Predicted against measured peaks, for every model that the tests know, down to the smallest budget."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))

import _paths  # noqa: F401
from _steps import Make, computed, take, under_budgets
from _tables import bar, markdown, mib, publish, yes

import models
import torchremat
import zoo

MODELS: dict[str, Make] = {
    "GPT": models.gpt_step,
    "GPT, dropout": lambda: models.gpt_step(dropout=0.1),
    "U-Net": models.unet_step,
    "ResNet": models.resnet_step,
    "gpt2, with its cache": lambda: zoo.gpt2(use_cache=True),
    **{name: lambda make=make: make() for name, make in zoo.ZOO.items()},
    **{f"{name}, dropout": lambda make=make: make(dropout=0.1) for name, make in zoo.ZOO.items()},
}
SHARES = (0.8, 0.6, 0.4, 0.2)  # of what the plain step needs beside the bytes that lie there before it


def run(smoke: bool) -> dict[str, object]:
    found: dict[str, object] = {"models": {}}
    chosen = {"ResNet": lambda: models.resnet_step(batch=4, width=8)} if smoke else MODELS
    for name, make in chosen.items():
        plain, values = take(*make()), computed(*make())
        planner = torchremat.Planner(*make())
        shares = SHARES[:2] if smoke else SHARES
        budgets = [plain.before_bytes + int(share * plain.step_bytes) for share in shares]
        rows = under_budgets(make, planner, budgets, values)
        found["models"][name] = {
            "plain": asdict(plain),
            "plain_predicted_bytes": planner.profiled.peak_of(planner.solver.plain),
            "rows": rows,
        }
    found["bars"] = bars(found["models"])
    return found


def bars(results: dict[str, dict[str, object]]) -> list[dict[str, object]]:
    rows = [row for result in results.values() for row in result["rows"]]
    worst = max(abs(error(row)) for row in rows)
    above = sum(row["ours"]["peak_bytes"] > row["budget_bytes"] for row in rows)
    unequal = sum(bool(row["differs"]) for row in rows)
    return [
        bar("measured within 1% of predicted, of the step's own bytes", f"worst {worst:.3%}", worst <= 0.01),
        bar("never above the budget", f"{above} of {len(rows)} above", not above),
        bar("loss, gradients and buffers equal bit for bit", f"{unequal} of {len(rows)} differ", not unequal),
    ]


def error(row: dict[str, object]) -> float:
    """Measured over predicted, less 1, both without what lies there before the step: stricter than with it."""
    before = row["ours"]["before_bytes"]
    return (row["ours"]["peak_bytes"] - before) / (row["predicted_bytes"] - before) - 1


HEAD = ("plain", "smallest", "budgets", "exact to the byte", "largest error", "most above budget", "equal")


def tables(results: dict[str, object]) -> dict[str, str]:
    rows = []
    for name, result in results["models"].items():
        made, before = result["rows"], result["plain"]["before_bytes"]
        largest = max((error(row) for row in made), key=abs)
        above = max(row["ours"]["peak_bytes"] - row["budget_bytes"] for row in made)
        rows.append(
            [
                name,
                mib(result["plain"]["peak_bytes"] - before),
                mib(made[-1]["ours"]["peak_bytes"] - before),
                len(made),
                sum(row["ours"]["peak_bytes"] == row["predicted_bytes"] for row in made),
                f"{largest:+.4%}",
                f"{max(0, above)} B",
                yes(not any(row["differs"] for row in made)),
            ]
        )
    return {"prediction": markdown(["", *HEAD], rows)}


if __name__ == "__main__":
    sys.exit(publish(Path(__file__).parent, run, tables))
