"""What one region adds to a step, beside running its forward twice: ours against torch's non-reentrant checkpoint."""

from __future__ import annotations

import functools
import gc
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

sys.path += map(str, Path(__file__).resolve().parents[:2])

import _paths  # noqa: F401
import torch
import whole_models
from _steps import ratio
from _tables import bar, markdown, publish
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import torchremat
from torchremat.interop import torch_checkpoint as drop_in

Function = Callable[[Tensor], Tensor]

# The bar is for the region of four operations with all defaults; the other rows say where it is lower or higher.
MOST = 0.5
BARRED = "4 operations"
ROUNDS = 41
# Tensors are so small that all of the time is that of calls, not of arithmetic.
ELEMENTS = 16
# About as many steps in each round take as long.
STEPS = 400
# Of models of layers.
LAYER_ROUNDS, LAYER_STEPS = 15, 15
PLAIN = partial(checkpoint, use_reentrant=False)


@dataclass(frozen=True)
class Case:
    """One row: a function, and how each of the two makes a region of it.

    Attributes:
        function: What runs.
        operations: About how many operations it has.
        torch: torch's way.
        ours: Ours.
        runs: How often the function runs in a step beside the run that is differentiated.
        shape: Of its input.
    """

    function: Function
    operations: int
    torch: Callable[[Function, Tensor], Tensor] = PLAIN
    ours: Callable[[Function, Tensor], Tensor] = torchremat.checkpoint
    runs: int = 1
    shape: tuple[int, ...] = (ELEMENTS,)

    def ways(self) -> dict[str, Callable[[], object]]:
        """The ways to run a step."""
        x = torch.rand(self.shape, requires_grad=True)

        def by_hand() -> None:
            with torch.no_grad():
                for _ in range(self.runs):
                    self.function(x)
            self.function(x).sum().backward()

        return {
            "by hand": by_hand,
            "torch": lambda: self.torch(self.function, x).sum().backward(),
            "ours": lambda: self.ours(self.function, x).sum().backward(),
        }


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


def encoder() -> Function:
    """A layer of a transformer in training, with three dropouts."""
    torch.manual_seed(0)
    return nn.TransformerEncoderLayer(ELEMENTS, 2, 2 * ELEMENTS, dropout=0.1, batch_first=True)


def nested(region: Callable[[Function, Tensor], Tensor], function: Function, x: Tensor) -> Tensor:
    """Three regions, one inside the other, with an operation in each but the innermost, which is the function."""

    def middle(x: Tensor) -> Tensor:
        return region(function, x.sin())

    def outer(x: Tensor) -> Tensor:
        return region(middle, x.sin())

    return region(outer, x)


def by_value(function: Function, x: Tensor) -> Tensor:
    """A region whose values are checked; the wrapper is made once, as a user would."""
    return _checked(function)(x)


@functools.cache
def _checked(function: Function) -> Function:
    return torchremat.checkpointed(function, check="values")


CASES = {
    "1 operation": Case(sines(1), 1),
    "4 operations": Case(sines(4), 4),
    "50 operations": Case(sines(50), 50),
    "500 operations": Case(sines(500), 500),
    "4 operations, the drop-in": Case(sines(4), 4, ours=partial(drop_in.checkpoint, use_reentrant=False)),
    "4 operations, reentrant": Case(
        sines(4),
        4,
        torch=partial(checkpoint, use_reentrant=True),
        ours=partial(drop_in.checkpoint, use_reentrant=True),
    ),
    "4 operations, nested 3 deep": Case(
        sines(4), 16, torch=partial(nested, PLAIN), ours=partial(nested, torchremat.checkpoint), runs=3
    ),
    "4 operations, values checked": Case(sines(4), 8, ours=by_value),
    "LayerNorm, Linear, GELU, Linear": Case(layers(), 4),
    "Dropout": Case(nn.Dropout(0.1), 1),
    "TransformerEncoderLayer": Case(encoder(), 25, shape=(1, 2, ELEMENTS)),
}


def added(case: Case, rounds: int, steps: int) -> dict[str, object]:
    """Run the ways in turn; seconds are those of one step, the ratio that of what is added to `by hand`."""
    seconds: dict[str, list[float]] = {name: [] for name in case.ways()}
    gc.collect()
    gc.disable()  # a collection in the middle is nobody's
    try:
        for turn in range(rounds + 1):
            for name, run in case.ways().items():
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


def checks(rounds: int, *, width: int, tokens: int) -> dict[str, object]:
    """Run a block of a transformer, forward and backward, with each check in turn; return the seconds of a step."""
    torch.manual_seed(0)
    block = nn.TransformerEncoderLayer(width, 8, 4 * width, dropout=0.1, batch_first=True)
    x = torch.randn(4, tokens, width, requires_grad=True)
    runs: dict[str, Callable[[Tensor], Tensor]] = {"plain": block}
    runs |= {check: torchremat.checkpointed(block, check=check) for check in ("none", "metadata", "values")}
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(rounds + 1):
        for name, step in runs.items():
            start_s = time.perf_counter()
            step(x).sum().backward()
            if turn:
                seconds[name].append(time.perf_counter() - start_s)
    return {
        name: {"seconds": statistics.median(each), "ratio": asdict(ratio(each, seconds["metadata"]))}
        for name, each in seconds.items()
    }


def run(smoke: bool) -> dict[str, object]:
    found: dict[str, object] = {"functions": {}, "bars": []}
    found["checks"] = checks(1, width=16, tokens=8) if smoke else checks(ROUNDS, width=512, tokens=256)
    for name, case in CASES.items():
        steps = max(5, STEPS // (1 + case.operations // 10))
        result = added(case, 2 if smoke else ROUNDS, 5 if smoke else steps)
        found["functions"][name] = result
        if name == BARRED:
            median = result["ratio"]["median"]
            claim = f"{name}: a region adds at most {MOST} of what torch's adds"
            found["bars"].append(bar(claim, f"{median:.2f}", median <= MOST))
    found["layers"] = {}
    for name, (make, most) in whole_models.SUBJECTS.items():
        torch.manual_seed(0)
        result = whole_models.added(make(), 1 if smoke else LAYER_ROUNDS, 1 if smoke else LAYER_STEPS)
        found["layers"][name] = result
        median = result["ratio"]["wrap"]["median"]
        claim = f"{name}, by wrap in a model: a region adds at most {most:.2f} of what torch's adds"
        found["bars"].append(bar(claim, f"{median:.2f}", median <= most))
    return found


def tables(results: dict[str, object]) -> dict[str, str]:
    rows = []
    for name, one in results["functions"].items():
        micro = {way: f"{1e6 * one['added_s'][way]:.1f}" for way in ("torch", "ours")}
        hand = f"{1e6 * one['seconds']['by hand']:.1f}"
        rows.append([name, hand, micro["torch"], micro["ours"], _spread(one["ratio"])])
    head = ["microseconds per step", "by hand", "torch adds", "ours adds", "ours / torch's"]
    checked = [
        [name, f"{1e3 * one['seconds']:.1f}", f"{one['ratio']['median']:.2f}"]
        for name, one in results["checks"].items()
    ]
    of_layers = [
        [
            name,
            f"{1e3 * one['plain_s']:.1f}",
            *(f"{1e6 * one['added_s'][way]:.0f}" for way in ("torch", "wrap", "checkpoint")),
            *(_spread(one["ratio"][way]) for way in ("wrap", "checkpoint")),
        ]
        for name, one in results["layers"].items()
    ]
    heads = [
        "a model of six", "plain step, ms", "torch adds, us a layer", "`wrap`", "`checkpoint`",
        "`wrap` / torch's", "`checkpoint` / torch's",
    ]  # fmt: skip
    return {
        "layers": markdown(heads, of_layers),
        "overhead": markdown(head, rows),
        "checks": markdown(["check", "milliseconds per step", "ratio to `metadata`"], checked),
    }


def _spread(found: dict[str, float]) -> str:
    return f"{found['median']:.2f} ({found['low']:.2f}-{found['high']:.2f})"


if __name__ == "__main__":
    sys.exit(publish(Path(__file__).parent, run, tables))
