"""How low the peak can go, and what that costs: nested regions against checkpointing every block."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))

import _paths  # noqa: F401
from _steps import Make, computed, take, under_budgets
from _tables import bar, markdown, mflop, mib, publish, yes
from _torch_ways import every

import models
import torchremat

MODELS: dict[str, Make] = {
    "GPT, 8 blocks": lambda: models.gpt_step(vocabulary=1000),
    "48 equal small blocks": lambda: models.gpt_step(blocks=48, width=64, context=64, vocabulary=64),
}
TINY: dict[str, Make] = {
    "GPT, 8 blocks": lambda: models.gpt_step(width=32, context=32, vocabulary=64),
    "48 equal small blocks": lambda: models.gpt_step(blocks=6, width=32, context=32, vocabulary=64),
}
BARS = {"GPT, 8 blocks": 0.85, "48 equal small blocks": 0.40}
# Of the peak of checkpointing every block, in what the step needs beside the bytes that lie there before it.
SHARES = (1.01, 0.95, 0.90, 0.85, 0.80, 0.70, 0.60, 0.50, 0.45, 0.40, 0.38, 0.36, 0.35, 0.34, 0.33)


def run(smoke: bool) -> dict[str, object]:
    found: dict[str, object] = {"models": {}, "bars": []}
    for name, make in (TINY if smoke else MODELS).items():
        planner = torchremat.Planner(*make(), cost="flops")
        plain, values = take(*make()), computed(*make())
        model, step = make()
        every(1)(model)
        torchs = take(model, step)
        floor = planner.floor_bytes
        budgets = [torchs.before_bytes + int(share * torchs.step_bytes) for share in (SHARES[::7] if smoke else SHARES)]
        rows = under_budgets(make, planner, budgets, values)
        result = {
            "plain": asdict(plain),
            "torch": asdict(torchs),
            "forward_flops": planner.profile.units.trace.flops,
            "rows": rows,
        }
        found["models"][name] = result
        lowest = rows[-1]["ours"]
        share = step_bytes(lowest) / torchs.step_bytes
        whole = lowest["peak_bytes"] / torchs.peak_bytes
        figure = f"{share:.3f} of what the step needs; {whole:.3f} with all that lies there before it"
        claim = f"{name}: smallest peak at most {BARS[name]:.2f} of that of checkpointing every block"
        met = share <= BARS[name] and lowest["peak_bytes"] <= floor and not rows[-1]["differs"]
        found["bars"].append(bar(claim, figure, met))
    return found


def step_bytes(taken: dict[str, int]) -> int:
    return taken["peak_bytes"] - taken["before_bytes"]


HEAD = ("budget", "peak", "of every block's", "whole peak", "of every block's", "recomputed", "of a forward", "equal")


def tables(results: dict[str, object]) -> dict[str, str]:
    made = {}
    for name, result in results["models"].items():
        torchs, forward = result["torch"], result["forward_flops"]
        rows = []
        for label, budget, taken, equal in [
            ("plain", None, result["plain"], ""),
            ("torch, checkpoint every block", None, torchs, ""),
            *(("ours", row["budget_bytes"], row["ours"], yes(not row["differs"])) for row in result["rows"]),
        ]:
            rows.append(
                [
                    label,
                    "" if budget is None else mib(budget - taken["before_bytes"]),
                    mib(step_bytes(taken)),
                    f"{step_bytes(taken) / step_bytes(torchs):.3f}",
                    mib(taken["peak_bytes"]),
                    f"{taken['peak_bytes'] / torchs['peak_bytes']:.3f}",
                    mflop(taken["recomputed_flops"]),
                    f"{taken['recomputed_flops'] / forward:.2f}",
                    equal,
                ]
            )
        made[name] = markdown([name, *HEAD], rows)
    return made


if __name__ == "__main__":
    sys.exit(publish(Path(__file__).parent, run, tables))
