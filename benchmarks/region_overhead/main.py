"""What one region adds to a step, beside running its forward twice: ours against torch's non-reentrant checkpoint."""

from __future__ import annotations

import gc
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))

import _paths  # noqa: F401
import torch
from _steps import ratio
from _tables import bar, markdown, publish
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import torchremat

Function = Callable[[Tensor], Tensor]

MOST = 0.6
ROUNDS = 41
# Tensors are so small that all of the time is that of calls, not of arithmetic.
ELEMENTS = 16
OPERATIONS = (1, 4, 50)
# About as many steps in each round take as long.
STEPS = 400


def sines(count: int) -> Function:
    """A function of `count` operations, each of which saves a tensor."""

    def function(x: Tensor) -> Tensor:
        for _ in range(count):
            x = x.sin()
        return x

    return function


def layers() -> Function:
    """Modules with parameters, which torch's checkpoint does not look at and ours does."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.LayerNorm(ELEMENTS), nn.Linear(ELEMENTS, ELEMENTS), nn.GELU(), nn.Linear(ELEMENTS, ELEMENTS)
    )


def drawing() -> Function:
    """One operation that draws random numbers, whose state has to be kept and put back."""
    return nn.Dropout(0.1)


FUNCTIONS: dict[str, Function] = {
    **{f"{count} operation{'s' * (count > 1)}": sines(count) for count in OPERATIONS},
    "LayerNorm, Linear, GELU, Linear": layers(),
    "Dropout": drawing(),
}


def ways(function: Function) -> dict[str, Callable[[], object]]:
    """The ways to run the function forward twice and backward once."""
    x = torch.rand(ELEMENTS, requires_grad=True)

    def by_hand() -> None:
        with torch.no_grad():
            function(x)
        function(x).sum().backward()

    return {
        "by hand": by_hand,
        "torch": lambda: checkpoint(function, x, use_reentrant=False).sum().backward(),
        "ours": lambda: torchremat.checkpoint(function, x).sum().backward(),
    }


def added(function: Function, rounds: int, steps: int) -> dict[str, object]:
    """Run the ways in turn; seconds are those of one step, the ratio that of what is added to `by hand`."""
    seconds: dict[str, list[float]] = {name: [] for name in ways(function)}
    gc.collect()
    gc.disable()  # a collection in the middle is nobody's
    try:
        for turn in range(rounds + 1):
            for name, run in ways(function).items():
                start_s = time.perf_counter()
                for _ in range(steps):
                    run()
                if turn:
                    seconds[name].append((time.perf_counter() - start_s) / steps)
    finally:
        gc.enable()
    over = {
        name: [took - hand for took, hand in zip(seconds[name], seconds["by hand"], strict=True)]
        for name in ("torch", "ours")
    }
    return {
        "seconds": {name: statistics.median(each) for name, each in seconds.items()},
        "added_s": {name: statistics.median(each) for name, each in over.items()},
        "ratio": asdict(ratio(over["ours"], over["torch"])),
    }


def run(smoke: bool) -> dict[str, object]:
    found: dict[str, object] = {"functions": {}, "bars": []}
    for name, function in FUNCTIONS.items():
        few = 50 if "50" in name else 1
        result = added(function, 2 if smoke else ROUNDS, 5 if smoke else STEPS // (1 + few // 10))
        found["functions"][name] = result
        median = result["ratio"]["median"]
        claim = f"{name}: a region adds at most {MOST} of what torch's adds"
        found["bars"].append(bar(claim, f"{median:.2f}", median <= MOST))
    return found


def tables(results: dict[str, object]) -> dict[str, str]:
    rows = []
    for name, one in results["functions"].items():
        micro = {way: f"{1e6 * one['added_s'][way]:.1f}" for way in ("torch", "ours")}
        spread = one["ratio"]
        cell = f"{spread['median']:.2f} ({spread['low']:.2f}-{spread['high']:.2f})"
        rows.append([name, f"{1e6 * one['seconds']['by hand']:.1f}", micro["torch"], micro["ours"], cell])
    head = ["microseconds per step", "by hand", "torch adds", "ours adds", "ours / torch's"]
    return {"overhead": markdown(head, rows)}


if __name__ == "__main__":
    sys.exit(publish(Path(__file__).parent, run, tables))
