"""What a training step is measured by, the same for every way of running it."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn

import torchremat

Step = Callable[[nn.Module], Tensor]
Make = Callable[[], tuple[nn.Module, Step]]


@dataclass(frozen=True, kw_only=True)
class Taken:
    """Exact bytes and flops of one step; `step_bytes` is the peak without what lies in memory before the step."""

    peak_bytes: int
    before_bytes: int
    recomputed_flops: int

    @property
    def step_bytes(self) -> int:
        return self.peak_bytes - self.before_bytes


def take(model: nn.Module, step: Step) -> Taken:
    measured = torchremat.measure(model, step)
    return Taken(
        peak_bytes=measured.peak_bytes,
        before_bytes=measured.before_bytes,
        recomputed_flops=measured.recomputed_flops,
    )


def computed(model: nn.Module, step: Step) -> dict[str, Tensor]:
    """Run a step and return all that it computes: the loss, gradients, and buffers, which it may change."""
    model.zero_grad(set_to_none=True)
    torch.manual_seed(0)
    loss = step(model)
    loss.backward()
    found = {"loss": loss.detach()}
    found |= {f"gradient of {name}": p.grad for name, p in model.named_parameters() if p.grad is not None}
    found |= {f"buffer {name}": buffer.clone() for name, buffer in model.named_buffers()}
    model.zero_grad(set_to_none=True)
    return found


def differing(ours: dict[str, Tensor], plain: dict[str, Tensor]) -> list[str]:
    """Return the names of all that is not equal bit for bit."""
    assert ours.keys() == plain.keys()
    return [name for name, expected in plain.items() if not torch.equal(ours[name], expected)]


def under_budgets(
    make: Make, planner: torchremat.Planner, budgets: list[int], plain: dict[str, Tensor]
) -> list[dict[str, object]]:
    """Return what a step takes under the plan for each budget, and for the smallest that works, and what differs."""
    floor = planner.floor_bytes
    rows: list[dict[str, object]] = []
    for budget in [*(budget for budget in budgets if budget > floor), floor]:
        plan = planner.plan(budget)
        model, step = make()
        plan.apply(model)
        rows.append(
            {
                "budget_bytes": budget,
                "predicted_bytes": plan.peak_bytes,
                "ours": asdict(take(model, step)),
                "differs": differing(computed(model, step), plain),
            }
        )
    return rows


def seconds_in_turn(steps: dict[str, Callable[[], None]], rounds: int) -> dict[str, list[float]]:
    """Run each step once per round, and return the seconds of each; a round before them is not counted.

    Each round begins with another step, so that none of them is always the one after the collector has run.
    """
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    names = list(steps)
    for turn in range(rounds + 1):
        gc.collect()
        first = turn % len(names)
        for name in (*names[first:], *names[:first]):
            start_s = _now_s()
            steps[name]()
            if turn:
                seconds[name].append(_now_s() - start_s)
    return seconds


def _now_s() -> float:
    """Return the time when the device, if this process uses any, has done what it was given."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    return time.perf_counter()


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """Median of the ratios within a round, and the quarter of them below and above it."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.low:.2f}-{self.high:.2f})"


def ratio(seconds: list[float], plain: list[float]) -> Ratio:
    ratios = [ours / theirs for ours, theirs in zip(seconds, plain, strict=True)]
    if len(ratios) < 2:
        return Ratio(median=ratios[0], low=ratios[0], high=ratios[0])
    low, median, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return Ratio(median=median, low=low, high=high)


def training_step(model: nn.Module, step: Step) -> Callable[[], None]:
    """A step as it is timed: forward and backward, gradients accumulating."""

    def run() -> None:
        step(model).backward()

    return run
