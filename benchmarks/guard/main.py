"""Steps that run out of memory at random places, run again by a guard, against steps that never do."""

from __future__ import annotations

import gc
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))

import _paths  # noqa: F401
import torch
from _steps import Step, training_step
from _tables import bar, markdown, mib, publish, yes
from torch import Tensor, nn

import models
import torchremat
from planning.guarding.faults import Faults, differing, guarded, state

FAILURES = 25  # for each model, without a plan and with one
LIMITS = (0.8, 0.6, 0.45)
# What a guard adds does not depend on the size of the tensors, so it is measured on narrow models of as many modules,
# where it is no small difference of large numbers.
ROUNDS = 200
LARGE_ROUNDS = 5
PHASES = ("forward", "recompute", "backward")

Make = Callable[[], tuple[nn.Module, Step]]

MODELS: dict[str, Make] = {
    "GPT": partial(models.gpt_step, blocks=4, width=64, context=64, batch=2, dropout=0.1),
    "ResNet": partial(models.resnet_step, width=8, batch=8, size=16),
}
SMOKE: dict[str, Make] = {"GPT": partial(models.gpt_step, blocks=1, width=16, context=16, batch=1, dropout=0.1)}
NARROW: dict[str, Make] = {
    "GPT": partial(models.gpt_step, width=16, context=8, batch=1),
    "ResNet": partial(models.resnet_step, width=4, batch=2, size=8),
}
LARGE: dict[str, Make] = {"GPT": models.gpt_step, "ResNet": models.resnet_step}


def run(smoke: bool) -> dict[str, object]:
    chosen = SMOKE if smoke else MODELS
    failures = [
        failed_at_random(name, make, with_plan=with_plan, count=1 if smoke else FAILURES)
        for name, make in chosen.items()
        for with_plan in (False, True)
    ]
    limits = [row for name, make in chosen.items() for row in under_limits(name, make, LIMITS[:1] if smoke else LIMITS)]
    overheads = [
        overhead(name, make, LARGE[name], rounds=2 if smoke else ROUNDS, large_rounds=1 if smoke else LARGE_ROUNDS)
        for name, make in (chosen if smoke else NARROW).items()
    ]
    injected = sum(row["injected"] for row in failures)
    ended = sum(row["equal"] + row["reported"] for row in failures)
    phases = sum((Counter(row["phases"]) for row in failures), Counter[str]())
    return {
        "failures": failures,
        "limits": limits,
        "overheads": overheads,
        "bars": [
            bar(
                "100 injected failures all end bit-identical or in the final report",
                f"{sum(row['equal'] for row in failures)} equal, {sum(row['reported'] for row in failures)} reported, "
                f"of {injected}",
                ended == injected >= 100,
            ),
            bar(
                "in forward, recompute and backward",
                ", ".join(f"{phases[phase]} in {phase}" for phase in PHASES),
                all(phases[phase] for phase in PHASES),
            ),
            bar(
                "no tensor stays behind",
                f"{sum(row['left_bytes'] for row in failures)} bytes",
                not any(row["left_bytes"] for row in failures),
            ),
        ],
    }


def stepped(model: nn.Module, step: Step, faults: Faults) -> tuple[dict[str, Tensor], int]:
    """Run a step that adds to the gradients of one before it; return what it leaves behind, and bytes beside that."""
    torch.manual_seed(9)
    step(model).backward()
    with faults:
        faults.armed = True
        loss = step(model)
        loss.backward()
    found = state(model, loss)
    del loss
    gc.collect()
    return found, faults.live_bytes


def failed_at_random(name: str, make: Make, *, with_plan: bool, count: int) -> dict[str, object]:
    model, step = make()
    plan = None
    if with_plan:
        planner = torchremat.Planner(model, step, cost="flops")
        plan = planner.plan(planner.floor_bytes)
        plan.apply(model)
    faults = Faults()
    expected, beside_bytes = stepped(model, step, faults)
    generator = random.Random(f"{name} {with_plan}")
    row = {"model": name, "planned": with_plan, "operators": faults.count, "injected": 0, "equal": 0, "reported": 0}
    phases, left_bytes = Counter[str](), 0
    for _ in range(count):
        at = {generator.randint(1, faults.count)}
        if generator.random() < 0.2:
            at.add(generator.randint(1, 3 * faults.count))  # one more, in planning or in the next attempt
        one, step = make()
        torch.manual_seed(9)
        with guarded(one, step, at, batches=[()], plan=plan) as (guarded_step, injecting):
            row["injected"] += 1
            try:
                loss = guarded_step()
            except torchremat.GuardError:
                row["reported"] += 1
            else:
                injecting.armed = False
                row["equal"] += not differing(state(one, loss), expected)
                del loss
            phases.update(attempt.phase for attempt in guarded_step.attempts[:1])
            gc.collect()
            left_bytes += injecting.live_bytes - beside_bytes
    return {**row, "phases": dict(phases), "left_bytes": left_bytes}


def under_limits(name: str, make: Make, shares: tuple[float, ...]) -> list[dict[str, object]]:
    """Steps, the first of their model, under limits that stay."""
    model, step = make()
    plain = Faults()
    torch.manual_seed(9)
    with plain:
        loss = step(model)
        loss.backward()
    expected = state(model, loss)
    rows: list[dict[str, object]] = []
    for share in shares:
        model, step = make()
        torch.manual_seed(9)
        row = {"model": name, "plain_bytes": plain.trace.peak_bytes, "share": share}
        with guarded(model, step, limit_bytes=int(share * plain.trace.peak_bytes)) as (guarded_step, limited):
            try:
                loss = guarded_step()
            except torchremat.GuardError:
                row["equal"] = None
            else:
                limited.armed = False
                row["equal"] = not differing(state(model, loss), expected)
            row["attempts"] = len(guarded_step.attempts) + (row["equal"] is not None)
        rows.append(row)
    return rows


def overhead(name: str, make: Make, large: Make, rounds: int, large_rounds: int) -> dict[str, object]:
    """Seconds that a guard adds to steps that never fail, gradients accumulating, and those of a step of real size."""
    model, step = make()
    with torchremat.guard(model, step) as guarded_step:
        seconds = cpu_seconds_in_turn({"guarded": guarded_step, "plain": training_step(model, step)}, rounds)
        held_bytes = guarded_step.held_bytes
    added = sorted(a - b for a, b in zip(seconds["guarded"], seconds["plain"], strict=True))
    plain = cpu_seconds_in_turn({"plain": training_step(*large())}, large_rounds)
    return {
        "model": name,
        "modules": len(list(model.modules())),
        "parameters": len(list(model.parameters())),
        "held_bytes": held_bytes,
        "added_s": statistics.median(added),
        "quarters_s": [added[len(added) // 4], added[3 * len(added) // 4]],
        "step_s": statistics.median(plain["plain"]),
    }


def cpu_seconds_in_turn(steps: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Run each step once per round, and return the seconds of the processor for each; the first round is left out."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(rounds + 1):
        for name, run_one in steps.items():
            start_s = time.process_time()
            run_one()
            if turn:
                seconds[name].append(time.process_time() - start_s)
    return seconds


def share(row: dict[str, object]) -> float:
    return row["added_s"] / row["step_s"]


def tables(results: dict[str, object]) -> dict[str, str]:
    failures = [
        [
            f"{row['model']}{', planned at its floor' if row['planned'] else ''}",
            row["operators"],
            row["injected"],
            *[row["phases"].get(phase, 0) for phase in PHASES],
            row["equal"],
            row["reported"],
            row["left_bytes"],
        ]
        for row in results["failures"]
    ]
    limits = [
        [
            row["model"],
            mib(row["plain_bytes"]),
            f"{100 * row['share']:.0f}%",
            row["attempts"],
            "in the report" if row["equal"] is None else yes(row["equal"]),
        ]
        for row in results["limits"]
    ]
    overheads = [
        [
            row["model"],
            row["modules"],
            row["parameters"],
            f"{1e3 * row['added_s']:.2f} ({' to '.join(f'{1e3 * one:.2f}' for one in row['quarters_s'])})",
            f"{1e3 * row['step_s']:.0f}",
            f"{share(row):.2%}",
            row["held_bytes"],
        ]
        for row in results["overheads"]
    ]
    head = ["", "operators of a step", "injected", *PHASES, "equal", "reported", "bytes left"]
    return {
        "failures": markdown(head, failures),
        "limits": markdown(["", "plain peak, MiB", "limit", "attempts", "bit-identical"], limits),
        "overhead": markdown(
            ["", "modules", "parameters", "a guard adds, ms", "a plain step, ms", "share", "bytes it holds"], overheads
        ),
    }


if __name__ == "__main__":
    sys.exit(publish(Path(__file__).parent, run, tables))
