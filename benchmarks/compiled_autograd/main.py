"""The peak of a backward that compiled autograd compiles: hooks of Python, torch's checkpoint, and ours."""

from __future__ import annotations

import contextlib
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import cast

sys.path.append(str(Path(__file__).resolve().parents[1]))

import _paths  # noqa: F401
import torch
from _tables import bar, markdown, publish, yes
from torch import Tensor
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

import torchremat
from torchremat.measuring.allocator import record_allocations

BACKENDS = (None, "eager", "aot_eager", "inductor")
LAYERS = 8
WIDTH = 64
ROWS = 163_840  # 40 MiB of float32
TINY = 64


class _File:
    """A tensor in a file, by torch's own functions."""

    def __init__(self, tensor: Tensor) -> None:
        self._folder = tempfile.TemporaryDirectory()
        torch.save(tensor, self._path)

    @property
    def _path(self) -> str:
        return self._folder.name + "/tensor"

    def get(self) -> Tensor:
        return torch.load(self._path)


class _Array:
    """A tensor outside of torch's memory, so that what comes back is all that counts."""

    def __init__(self, tensor: Tensor) -> None:
        self._array = tensor.numpy().copy()

    @property
    def stored_bytes(self) -> int:
        return self._array.nbytes

    def get(self) -> Tensor:
        return torch.from_numpy(self._array).clone()

    def prefetch(self) -> None:
        pass


class _Arrays:
    def put(self, tensor: Tensor) -> _Array:
        return _Array(tensor)


Layer = Callable[[Tensor, Tensor], Tensor]
Run = Callable[[Layer, Tensor, Sequence[Tensor]], Tensor]


def product(x: Tensor, weight: Tensor) -> Tensor:
    return x @ weight


def with_relu(x: Tensor, weight: Tensor) -> Tensor:
    return torch.relu(x @ weight)


# The bars are for the first.
LAYER_KINDS: dict[str, Layer] = {"x @ weight": product, "relu(x @ weight)": with_relu}


def plain(layer: Layer, x: Tensor, weights: Sequence[Tensor]) -> Tensor:
    for weight in weights:
        x = layer(x, weight)
    return x


def of_python(layer: Layer, x: Tensor, weights: Sequence[Tensor]) -> Tensor:
    with torch.autograd.graph.saved_tensors_hooks(_File, _File.get):
        return plain(layer, x, weights)


def stored(layer: Layer, x: Tensor, weights: Sequence[Tensor]) -> Tensor:
    with torchremat.offload(_Arrays(), window_bytes=0):
        return plain(layer, x, weights)


def in_regions(region: Callable[..., Tensor], layer: Layer, x: Tensor, weights: Sequence[Tensor]) -> Tensor:
    for weight in weights:
        x = region(layer, x, weight)
    return x


WAYS: dict[str, Run] = {
    "plain": plain,
    "hooks of Python": of_python,
    "torchremat.offload": stored,
    "torch's checkpoint, each layer": partial(in_regions, partial(checkpoint, use_reentrant=False)),
    "torchremat.checkpoint, each layer": partial(in_regions, torchremat.checkpoint),
}
OURS = ("torchremat.offload", "torchremat.checkpoint, each layer")


def measured(way: Run, layer: Layer, backend: str | None, rows: int) -> dict[str, object]:
    """The peak of the third step's backward, with what its forward has kept, and what dynamo counted."""
    torch.compiler.reset()
    counters.clear()
    torch.manual_seed(0)
    weights = [(torch.randn(WIDTH, WIDTH) / WIDTH**0.5).requires_grad_() for _ in range(LAYERS)]
    start = torch.randn(rows, WIDTH, requires_grad=True)
    graphs: list[int] = []
    for step in range(3):
        for one in (start, *weights):
            one.grad = None
        block = contextlib.nullcontext()
        if backend is not None:
            block = torch._dynamo.compiled_autograd._enable(torch.compile(backend=backend))
        if step < 2:
            loss = way(layer, start, weights).sum()
            with block:
                loss.backward()
            del loss
            graphs.append(counters["stats"]["unique_graphs"])
            continue
        with record_allocations(torch.device("cpu")) as recorder:
            loss = way(layer, start, weights).sum()
            before = recorder.mark("backward")
            with block:
                loss.backward()
            after = recorder.mark("end")
    peak_bytes = recorder.trace.peak_bytes_between(before, after)
    gradients = [one.grad for one in (start, *weights) if one.grad is not None]
    return {
        "peak_tensors": peak_bytes / start.nbytes,
        "graph_breaks": sum(counters["graph_break"].values()),
        "recompiled": graphs[1] - graphs[0],
        "gradients": gradients,
    }


def run(smoke: bool) -> dict[str, object]:
    rows = TINY if smoke else ROWS
    # Compiling takes most of the time, and most of that where a graph breaks.
    backends = BACKENDS[:2] if smoke else BACKENDS
    kinds = list(LAYER_KINDS)[: 1 if smoke else None]
    ways = {name: way for name, way in WAYS.items() if name in ("plain", *OURS) or not smoke}
    table: list[dict[str, object]] = []
    for kind in kinds:
        layer = LAYER_KINDS[kind]
        plainly: dict[str | None, list[Tensor]] = {}
        for name, way in ways.items():
            for backend in backends:
                found = measured(way, layer, backend, rows)
                gradients = cast("list[Tensor]", found.pop("gradients"))
                plainly.setdefault(backend, gradients)
                # Inductor rounds as it likes; with and without us it has to round in the same way.
                equal = len(gradients) == LAYERS + 1 and all(map(torch.equal, gradients, plainly[backend]))
                table.append({"layer": kind, "way": name, "backend": backend or "the engine", **found, "equal": equal})
    bars: list[dict[str, object]] = []
    barred = next(iter(LAYER_KINDS))
    for name in OURS:
        mine = {str(row["backend"]): row for row in table if row["way"] == name and row["layer"] == barred}
        engine = float(str(mine["the engine"]["peak_tensors"]))
        compiled = [row for backend, row in mine.items() if backend != "the engine"]
        most = max(float(str(row["peak_tensors"])) for row in compiled)
        claim = f"{name}: peak at most 1 tensor above the engine's with every backend"
        bars.append(bar(claim, f"{most:.2f}, engine {engine:.2f}", most <= engine + 1.01))
        quiet = not any(row["graph_breaks"] or row["recompiled"] for row in compiled)
        claim = f"{name}: no graph breaks, nothing compiled in the second step, equal gradients"
        bars.append(bar(claim, yes(quiet), quiet and all(bool(row["equal"]) for row in compiled)))
    return {"tensor_bytes": 4 * rows * WIDTH, "rows": table, "bars": bars}


HEAD = ("layer", "way", "backend", "peak, tensors", "graph breaks", "compiled again", "equal")


def tables(results: dict[str, object]) -> dict[str, str]:
    rows = results["rows"]
    assert isinstance(rows, list)
    return {
        "peaks": markdown(
            HEAD,
            [
                [
                    row["layer"],
                    row["way"],
                    row["backend"],
                    f"{row['peak_tensors']:.2f}",
                    row["graph_breaks"],
                    row["recompiled"],
                    yes(row["equal"]),
                ]
                for row in rows
            ],
        )
    }


if __name__ == "__main__":
    sys.exit(publish(Path(__file__).parent, run, tables))
