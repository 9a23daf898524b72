"""What planning costs: seconds of one core for plans, frontiers and certificates, and the profile in plain steps."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))

import _paths  # noqa: F401
import torch
from _steps import Make, ratio, seconds_in_turn, training_step
from _tables import bar, markdown, publish

import models
import torchremat
import zoo
from torchremat.measuring.step_record import Run
from torchremat.planning.plan_options import PlanOptions
from torchremat.planning.profiles.profiling import ProfilePair
from torchremat.planning.searches.flows import flow_of
from torchremat.planning.searches.search import Search
from torchremat.schedules.operator_selection import select


def small_gpt(blocks: int) -> Make:
    return lambda: models.gpt_step(blocks=blocks, width=64, context=64, vocabulary=64)


# What is planned, and for how many seconds of one core the first plan, a frontier and a certificate may take.
PLANNED: dict[str, tuple[Make, tuple[float, float, float]]] = {
    "GPT": (models.gpt_step, (2.0, 5.0, 5.0)),
    "U-Net": (models.unet_step, (2.0, 5.0, 5.0)),
    "ResNet": (models.resnet_step, (2.0, 10.0, 5.0)),
    "48 small blocks": (small_gpt(48), (2.0, 5.0, 5.0)),
    "200 small blocks": (small_gpt(200), (10.0, 30.0, 30.0)),
}
TINY = {"3 small blocks": (small_gpt(3), (2.0, 5.0, 5.0))}
COSTS = ("flops", "seconds")
SHARES = (0.7, 0.5, 0.3)  # of what the plain step needs beside the bytes that lie there before it
POINTS = 24
MOST_PROGRAM_S = 0.5

# What is profiled, and how many plain steps that may take.
PROFILED: dict[str, tuple[Make, int]] = {
    "GPT of the demo": (lambda: models.gpt_step(blocks=12, batch=12), 4),
    "GPT": (models.gpt_step, 4),
    "U-Net": (models.unet_step, 6),
    "ResNet": (models.resnet_step, 6),
    **{name: (lambda make=make: make(), 8) for name, make in zoo.ZOO.items()},
    "48 equal small blocks": (small_gpt(48), 8),
}
ROUNDS = 5
PLANS = 3


def timed(work: Callable[[], object]) -> float:
    """Return seconds of CPU time."""
    start_s = time.process_time()
    work()
    return time.process_time() - start_s


def planning_seconds(make: Make, cost: str, rounds: int) -> dict[str, object]:
    """Profile a step, and time what comes after it several times, each time from the start; the medians count."""
    planner = torchremat.Planner(*make(), cost=cost, certify=True)
    found = [planning_round(planner, cost) for _ in range(rounds)]
    seconds = {name: statistics.median(one[name] for one in found) for name in found[0]}
    operators = len(grains_runs(planner.solver.pair))
    return {"units": len(planner.profile.units.units), "operators": operators, "seconds": seconds}


def planning_round(planner: torchremat.Planner, cost: str) -> dict[str, float]:
    """Time a first plan, the certificate of it, a later plan, and a frontier from the start."""
    before, plain = planner.fixed_bytes, planner.profiled.peak_of(planner.solver.plain)
    pair = planner.solver.pair
    plans: list[torchremat.Plan] = []

    def anew() -> None:
        planner.profiled.solver = Search(pair, PlanOptions(cost=cost))

    def plan(share: float) -> None:
        plans.append(planner.plan(max(planner.floor_bytes, before + int(share * (plain - before)))))

    vars(planner.profiled).pop("_plain_step", None)
    seconds = {"operators": timed(anew)}
    # One more step under a log, which shows what backward reads: for the certificates of all plans.
    seconds["logged step"] = timed(lambda: planner.profiled.plain_step)
    seconds["search"] = timed(lambda: plan(SHARES[0]))
    seconds["first plan"] = sum(seconds.values())
    seconds["certificate"] = timed(lambda: plans[0].certificate)
    seconds["second plan"] = timed(lambda: plan(SHARES[2]))
    anew()
    seconds[f"frontier of {POINTS}"] = timed(lambda: planner.frontier(points=POINTS))
    return seconds


def grains_runs(pair: ProfilePair) -> list[Run]:
    return pair.blocks.units.trace.operators.runs


def program_seconds(make: Make) -> dict[str, object]:
    """Choose operators for all of a forward at once, as if it were one block."""
    flow = flow_of(torchremat.Planner(*make(), cost="flops").profile)
    total = sum(value.size_bytes for value in flow.values if value.needed)
    seconds = {f"{share:.0%}": timed(lambda share=share: select(flow, int(share * total))) for share in SHARES}
    return {"operators": len(flow.operators), "seconds": seconds}


def run(smoke: bool, *, profiles: bool = True) -> dict[str, object]:
    planned = TINY if smoke else PLANNED
    found: dict[str, object] = {
        "planning": {
            name: {cost: planning_seconds(make, cost, 1 if smoke else PLANS) for cost in COSTS[: 1 if smoke else 2]}
            for name, (make, _) in planned.items()
        },
        "program": program_seconds(small_gpt(3 if smoke else 48)),
        "profile": {} if profiles else earlier().get("profile", {}),
        "bars": [],
    }
    if profiles:
        found["profile"] = {
            name: profile_steps(make, 1 if smoke else ROUNDS)
            for name, (make, _) in PROFILED.items()
            if not smoke or name == "vit"
        }
    found["bars"] += [program_bar(found["program"]), *planning_bars(found["planning"], planned)]
    found["bars"] += profile_bars(found["profile"])
    return found


def earlier() -> dict[str, object]:
    """What is on disk: the seconds of planning need no idle machine, and the ratios of the profile do."""
    path = Path(__file__).with_name("results.json")
    return json.loads(path.read_text()) if path.exists() else {}


def program_bar(program: dict[str, object]) -> dict[str, object]:
    longest = max(program["seconds"].values())
    claim = f"choosing among {program['operators']} operators takes at most {MOST_PROGRAM_S} s"
    return bar(claim, f"{longest:.2f} s", longest <= MOST_PROGRAM_S)


def planning_bars(planning: dict[str, dict[str, object]], planned: dict[str, object]) -> list[dict[str, object]]:
    bars = []
    for name, (_, most) in planned.items():
        for part, most_s in zip(("first plan", f"frontier of {POINTS}", "certificate"), most, strict=True):
            longest = max(one["seconds"][part] for one in planning[name].values())
            bars.append(bar(f"{name}: {part}, at most {most_s:.0f} s", f"{longest:.2f} s", longest <= most_s))
    return bars


def profile_bars(profiles: dict[str, dict[str, object]]) -> list[dict[str, object]]:
    found = [(name, PROFILED[name][1], one["steps"]["median"]) for name, one in profiles.items()]
    return [
        bar(f"{name}: profile, at most {most} plain steps", f"{steps:.1f}", steps <= most)
        for name, most, steps in found
    ]


def profile_steps(make: Make, rounds: int) -> dict[str, object]:
    model, step = make()
    optimizer = torch.optim.AdamW(model.parameters())
    runs = {
        "plain": training_step(model, step),
        # Without parts of units, which are chosen when a planner is made: "options" has their seconds.
        "profile": lambda: torchremat.Planner(model, step, operators=False),
        "with optimizer": lambda: torchremat.Planner(model, step, optimizer=optimizer, operators=False),
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
    rows = [
        [
            f"{name}, in {cost}",
            one["units"],
            one["operators"],
            *(f"{seconds:.2f}" for seconds in one["seconds"].values()),
        ]
        for name, costs in results["planning"].items()
        for cost, one in costs.items()
    ]
    first = next(iter(next(iter(results["planning"].values())).values()))
    head = ["", "units", "operators", *("options" if part == "operators" else part for part in first["seconds"])]
    program = results["program"]
    solved = [[f"{program['operators']} operators", *(f"{seconds:.2f}" for seconds in program["seconds"].values())]]
    profiled = [
        [name, f"{1e3 * one['plain_s']:.0f} ms", spread(one["steps"]), spread(one["steps_with_optimizer"])]
        for name, one in results["profile"].items()
    ]
    return {
        "planning": markdown(head, rows),
        "program": markdown(["seconds", *(f"{share} of the bytes" for share in program["seconds"])], solved),
        "profile": markdown(["", "plain step", "profile, in plain steps", "with AdamW, in plain steps"], profiled),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--without-profiles", action="store_true")
    own, rest = parser.parse_known_args()
    sys.exit(publish(Path(__file__).parent, partial(run, profiles=not own.without_profiles), tables, rest))
