"""A budget for a compiled step: torch's, which bounds what is saved, and its tags, against ours at the same peak."""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))

import _paths  # noqa: F401
import torch
import torch._inductor.config
from _steps import Make
from _tables import bar, markdown, mflop, mib, publish, yes
from _torch_ways import WAYS
from torch import Tensor, nn

import decoders
import models
import torchremat
from torchremat._compat.inductor import compile_arguments, torch_partition_of_share
from torchremat.measuring.allocator import record_allocations
from torchremat.planning.compiling.graphs import read_graph
from torchremat.planning.compiling.partitioning import Partition
from torchremat.schedules.joint import split

MODELS: dict[str, Make] = {
    "GPT": lambda: models.gpt_step(blocks=4, width=128, context=128, batch=8, vocabulary=1000),
    "U-Net": lambda: models.unet_step(batch=4, size=32),
    "ResNet": lambda: models.resnet_step(batch=8),
}
SMALL: dict[str, Make] = {
    "GPT": lambda: models.gpt_step(blocks=3, width=64, context=64, batch=8, vocabulary=200),
    "Llama-style": decoders.tiny_step,
    "ResNet": lambda: models.resnet_step(batch=4, size=16, width=8),
}
TINY: dict[str, Make] = {"GPT": lambda: models.gpt_step(blocks=2, width=16, context=16, batch=2)}
BACKENDS = {"aot_eager": MODELS, "inductor": SMALL}
BUDGETS = {"aot_eager": (1.0, 0.75, 0.5, 0.25, 0.1, 0.0), "inductor": (1.0, 0.5, 0.25, 0.0)}
TAGS = {"aot_eager": ("checkpoint every block", "checkpoint every 2nd block"), "inductor": ("checkpoint every block",)}


@dataclass
class Seen:
    """What torch's partitioner has made of a graph."""

    recomputed_flops: int = 0
    fixed_bytes: int = 0


def torchs(step: Callable[[], Tensor], backend: str, share: float) -> tuple[Callable[[], Tensor], Seen]:
    """Compile a step under torch's own budget."""
    seen = Seen()

    def partition(joint, inputs, *, num_fwd_outputs, **options):
        forward, backward = torch_partition_of_share(share, joint, inputs, num_fwd_outputs=num_fwd_outputs, **options)
        reading = read_graph(joint.graph, num_fwd_outputs)
        made = split(reading.joint, reading.saved(forward.graph, num_fwd_outputs))
        seen.recomputed_flops = sum(reading.flops[index] for index in set(made.forward) & set(made.backward))
        seen.fixed_bytes = reading.joint.fixed_bytes
        return forward, backward

    return torch.compile(step, **compile_arguments(backend, partition, lambda: None)), seen


@dataclass
class Measured:
    """A step that was compiled: the bytes over those that lay there before it, its gradients, seconds to compile it."""

    peak_bytes: int
    gradients: list[Tensor]
    compile_s: float

    def differing(self, others: list[Tensor]) -> int:
        return sum(not torch.equal(ours, theirs) for ours, theirs in zip(self.gradients, others, strict=True))

    def largest_difference(self, others: list[Tensor]) -> float:
        """The largest over all gradients, relative to the largest entry of each."""
        pairs = zip(self.gradients, others, strict=True)
        return max(float((a - b).abs().max() / b.abs().max().clamp(min=1e-30)) for a, b in pairs)


def measure(model: nn.Module, function: Callable[[], Tensor]) -> Measured:
    start_s = time.process_time()
    with unchanged(model):
        function().backward()
    compile_s = time.process_time() - start_s
    with unchanged(model), record_allocations(torch.device("cpu")) as recorder:
        begin = recorder.mark("begin")
        loss = function()
        loss.backward()
        end = recorder.mark("end")
        del loss
        gradients = [parameter.grad for parameter in model.parameters()]
    return Measured(recorder.trace.peak_bytes_between(begin, end), gradients, compile_s)


@contextlib.contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """A step from the same buffers and random numbers each time, without gradients from before."""
    buffers = [buffer.clone() for buffer in model.buffers()]
    model.zero_grad()
    torch.manual_seed(0)
    yield
    for buffer, before in zip(model.buffers(), buffers, strict=True):
        buffer.copy_(before)


def rows_of(make: Make, backend: str, smoke: bool) -> list[dict[str, object]]:
    """One row for each way of torch: what it takes, and what ours takes at its peak."""
    model, step = make()
    eager = measure(model, lambda: step(model))
    plain = None
    rows = []
    budgets = BUDGETS[backend][:1] if smoke else BUDGETS[backend]
    ways = [(f"{share:g}", share, None) for share in budgets]
    ways += [(f"{name}, compiled", 1.0, WAYS[name]) for name in (TAGS[backend][:1] if smoke else TAGS[backend])]
    for name, share, way in ways:
        model, step = make()
        if way is not None:
            way(model)
        torch.compiler.reset()
        function, seen = torchs(partial(step, model), backend, share)
        theirs = measure(model, function)
        plain = plain or theirs  # torch's first budget is none

        budget = seen.fixed_bytes + theirs.peak_bytes
        ours, found = within(make, backend, budget)
        budget = found.budget_bytes
        rows.append(
            {
                "way": name,
                "torch": shown(theirs, eager, plain) | {"recomputed_flops": seen.recomputed_flops},
                "ours": shown(ours, eager, plain) | {"recomputed_flops": found.recomputed_flops},
                "budget_bytes": budget - seen.fixed_bytes,
                "predicted_bytes": found.peak_bytes - seen.fixed_bytes,
                "flops": found.flops,
            }
        )
        print(f"{backend}, {name}: {theirs.compile_s + ours.compile_s:.0f} s", file=sys.stderr)
    return rows


def within(make: Make, backend: str, budget: int) -> tuple[Measured, Partition]:
    """Our split for a budget; if none fits, that for the smallest budget that works."""
    model, step = make()
    torch.compiler.reset()
    function = torchremat.compiled(partial(step, model), budget=budget, backend=backend, cost="flops")
    try:
        return measure(model, function), function.partitions[0]
    except torchremat.BudgetError as error:
        least = int(re.search(r"works: (\d+) bytes", str(error))[1])
        return within(make, backend, least)


def shown(one: Measured, eager: Measured, plain: Measured) -> dict[str, object]:
    return {
        "peak_bytes": one.peak_bytes,
        "compile_s": one.compile_s,
        "differs_from_plain": one.differing(plain.gradients),
        "largest_difference_from_plain": one.largest_difference(plain.gradients),
        "differs_from_eager": one.differing(eager.gradients),
        "largest_difference_from_eager": one.largest_difference(eager.gradients),
    }


def run(smoke: bool, pieces: Sequence[tuple[str, str]] = ()) -> dict[str, object]:
    torch._inductor.config.force_disable_caches = True
    if smoke:
        found = {"aot_eager": {"GPT": rows_of(TINY["GPT"], "aot_eager", smoke=True)}}
    else:
        made = {piece: rows_of(BACKENDS[piece[0]][piece[1]], piece[0], smoke=False) for piece in pieces}
        path = Path(__file__).with_name("results.json")
        found = json.loads(path.read_text())["backends"] if path.exists() else {}
        for (backend, model), rows in made.items():
            found.setdefault(backend, {})[model] = rows
    return {"backends": found, "bars": [one for backend, table in found.items() for one in bars(backend, table)]}


def bars(backend: str, table: dict[str, list[dict[str, dict[str, float]]]]) -> Iterator[dict[str, object]]:
    rows = [row for rows in table.values() for row in rows]
    fewer = [
        row["ours"]["recomputed_flops"] <= row["torch"]["recomputed_flops"]
        and row["ours"]["peak_bytes"] <= row["torch"]["peak_bytes"]
        for row in rows
    ]
    kept = [row["ours"]["peak_bytes"] <= row.get("budget_bytes", row["torch"]["peak_bytes"]) for row in rows]
    yield bar(f"{backend}: no more recomputed flops than torch at its peak", of(fewer), all(fewer))
    yield bar(f"{backend}: the measured peak is never above the budget", of(kept), all(kept))
    over = [row["predicted_bytes"] / row["ours"]["peak_bytes"] - 1 for row in rows]
    figure = f"{100 * min(over):.2f}% to {100 * max(over):.2f}% above it"
    if backend == "aot_eager":
        yield bar(f"{backend}: the predicted peak is the measured one", figure, max(map(abs, over)) == 0)
        equal = [not row["ours"]["differs_from_plain"] for row in rows]
        yield bar(f"{backend}: gradients are equal to those without a budget, bit for bit", of(equal), all(equal))
    else:
        yield bar(
            f"{backend}: the predicted peak is within 1% of the measured one", figure, max(map(abs, over)) <= 0.01
        )


def of(facts: list[bool]) -> str:
    return f"{sum(facts)} of {len(facts)}"


HEAD = (
    "peak, torch",
    "peak, ours",
    "predicted",
    "recomputed, torch",
    "recomputed, ours",
    "equal to plain, torch",
    "equal to plain, ours",
    "from eager, ours",
)


def tables(results: dict[str, object]) -> dict[str, str]:
    return {
        f"{name}, {backend}": markdown((name, *HEAD), map(_row, rows))
        for backend, models_ in results["backends"].items()
        for name, rows in models_.items()
    }


def _row(row: dict[str, dict[str, float]]) -> list[object]:
    torchs_, ours = row["torch"], row["ours"]
    worse = ours["recomputed_flops"] > torchs_["recomputed_flops"]
    return [
        row["way"],
        mib(torchs_["peak_bytes"]),
        f"**{mib(ours['peak_bytes'])}**" if ours["peak_bytes"] > torchs_["peak_bytes"] else mib(ours["peak_bytes"]),
        mib(row["predicted_bytes"]),
        mflop(torchs_["recomputed_flops"]),
        f"**{mflop(ours['recomputed_flops'])}**" if worse else mflop(ours["recomputed_flops"]),
        off(torchs_["differs_from_plain"], torchs_["largest_difference_from_plain"]),
        off(ours["differs_from_plain"], ours["largest_difference_from_plain"]),
        off(ours["differs_from_eager"], ours["largest_difference_from_eager"]),
    ]


def off(count: int, largest: float) -> str:
    return f"{largest:.0e}" if count else yes(fact=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--backend", choices=BACKENDS)
    parser.add_argument("--model", choices=[*MODELS, *SMALL])
    own, rest = parser.parse_known_args()
    chosen = [
        (backend, model)
        for backend, all_ in BACKENDS.items()
        for model in all_
        if own.backend in (None, backend) and own.model in (None, model)
    ]
    sys.exit(publish(Path(__file__).parent, partial(run, pieces=chosen), tables, rest))
