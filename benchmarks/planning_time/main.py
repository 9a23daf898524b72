"""What planning costs: seconds of the solver by number of blocks, and the profile in plain steps."""

from __future__ import annotations

import statistics
import sys
import time
from dataclasses import asdict
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))

import _paths  # noqa: F401
import torch
from _steps import Make, ratio, seconds_in_turn, training_step
from _tables import bar, markdown, publish

import models
import torchremat
import zoo
from torchremat.planning.solving import Search

BLOCKS = {48: 1.0, 200: 10.0}
SHARES = (0.7, 0.3)  # of what the plain step needs beside the bytes that lie there before it
REPEATS = 1

PROFILED: dict[str, Make] = {
    "GPT of the demo": lambda: models.gpt_step(blocks=12, batch=12),
    "GPT": models.gpt_step,
    "U-Net": models.unet_step,
    "ResNet": models.resnet_step,
    **{name: lambda make=make: make() for name, make in zoo.ZOO.items()},
    "48 equal small blocks": lambda: models.gpt_step(blocks=48, width=64, context=64, vocabulary=64),
}
ROUNDS = 5
MOST_STEPS = 8


def planning_seconds(planner: torchremat.Planner) -> dict[str, float]:
    """Forget all that the planner has worked out, and time its first plan; then the same in parts."""
    found: dict[str, float] = {}
    before, plain = planner.fixed_bytes, planner.peak_of(planner.solver.plain)

    def timed(name: str, work) -> object:
        start_s = time.process_time()
        result = work()
        found[name] = time.process_time() - start_s
        return result

    def budget_of(share: float) -> int:
        return before + int(share * (plain - before))

    planner.solver = Search(planner.solver.grains, planner.solver.cost_unit)
    timed("first plan", lambda: planner.plan(budget_of(SHARES[0])))
    planner.solver = Search(planner.solver.grains, planner.solver.cost_unit)
    timed("mixtures", lambda: planner.solver.solvers)
    timed("tables", lambda: [solver.table for solver in planner.solver.solvers])
    timed("uniform plans", lambda: [solver.uniform for solver in planner.solver.solvers])
    floor = timed("floor", lambda: planner.floor_bytes)
    for share in SHARES:
        budget = max(floor, budget_of(share))
        timed(f"plan at {share:.0%}", lambda budget=budget: planner.plan(budget))
    timed("plan at the floor", lambda: planner.plan(floor))
    return found


def run(smoke: bool) -> dict[str, object]:
    found: dict[str, object] = {"planning": {}, "profile": {}, "bars": []}
    for blocks, most_s in ({3: 1.0} if smoke else BLOCKS).items():
        model, step = models.gpt_step(blocks=blocks, width=64, context=64, vocabulary=64)
        planner = torchremat.Planner(model, step)
        each = [planning_seconds(planner) for _ in range(1 if smoke else REPEATS)]
        seconds = {part: statistics.median(one[part] for one in each) for part in each[0]}
        found["planning"][str(blocks)] = {"units": len(planner.profile.units.units), "seconds": seconds}
        figure = f"{seconds['first plan']:.2f} s"
        claim = f"planning {blocks} blocks after the profile takes at most {most_s:.0f} s"
        found["bars"].append(bar(claim, figure, seconds["first plan"] <= most_s))
    found["profile"] = {
        name: profile_steps(make, 1 if smoke else ROUNDS)
        for name, make in PROFILED.items()
        if not smoke or name == "vit"
    }
    found["bars"] += profile_bars(found["profile"])
    return found


def profile_bars(profiles: dict[str, dict[str, object]]) -> list[dict[str, object]]:
    medians = {name: one["steps"]["median"] for name, one in profiles.items()}
    worst = max(medians, key=medians.get)
    first = next(iter(medians))
    return [
        bar(
            f"a profile costs at most {MOST_STEPS} plain steps: {first}",
            f"{medians[first]:.1f}",
            medians[first] <= MOST_STEPS,
        ),
        bar("the same on every model here", f"at most {medians[worst]:.1f} ({worst})", medians[worst] <= MOST_STEPS),
    ]


def profile_steps(make: Make, rounds: int) -> dict[str, object]:
    model, step = make()
    optimizer = torch.optim.AdamW(model.parameters())
    runs = {
        "plain": training_step(model, step),
        "profile": lambda: torchremat.Planner(model, step),
        "with optimizer": lambda: torchremat.Planner(model, step, optimizer=optimizer),
    }
    seconds = seconds_in_turn(runs, rounds)
    return {
        "plain_s": statistics.median(seconds["plain"]),
        "steps": asdict(ratio(seconds["profile"], seconds["plain"])),
        "steps_with_optimizer": asdict(ratio(seconds["with optimizer"], seconds["plain"])),
    }


def spread(steps: dict[str, float]) -> str:
    return f"{steps['median']:.1f} ({steps['low']:.1f}-{steps['high']:.1f})"


def tables(results: dict[str, object]) -> dict[str, str]:
    planning = results["planning"]
    parts = list(next(iter(planning.values()))["seconds"])
    rows = [
        [f"{blocks} blocks, {one['units']} units", *(f"{one['seconds'][part]:.2f}" for part in parts)]
        for blocks, one in planning.items()
    ]
    profiled = [
        [name, f"{1e3 * one['plain_s']:.0f} ms", spread(one["steps"]), spread(one["steps_with_optimizer"])]
        for name, one in results["profile"].items()
    ]
    return {
        "planning": markdown(["seconds", *parts], rows),
        "profile": markdown(["", "plain step", "profile, in plain steps", "with AdamW, in plain steps"], profiled),
    }


if __name__ == "__main__":
    sys.exit(publish(Path(__file__).parent, run, tables))
