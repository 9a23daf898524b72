"""Steps of random lengths at a fixed budget: peaks, time, and what planning takes of it, against one plan for all."""

from __future__ import annotations

import math
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))

import _paths  # noqa: F401
import torch
from _tables import MIB, bar, markdown, mib, publish
from _torch_ways import every
from torch import Tensor, nn
from torch.nn import functional as F

import models
import torchremat
from torchremat.measuring.allocator import record_allocations
from torchremat.measuring.before import bytes_before

CPU = torch.device("cpu")
MOST_SHARE = 0.05


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A model, the lengths of its batches, and the budget."""

    blocks: int
    width: int
    batch: int
    shortest: int
    longest: int
    steps: int
    learned: tuple[int, ...]
    budget_bytes: int

    def model(self) -> models.GPT:
        torch.manual_seed(0)
        return models.GPT(blocks=self.blocks, width=self.width, context=self.longest)

    def lengths(self) -> list[int]:
        rng = random.Random(0)
        low, high = math.log(self.shortest), math.log(self.longest)
        return [round(math.exp(rng.uniform(low, high))) for _ in range(self.steps)]

    def tokens(self, length: int, seed: int = 0) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(0, 256, (self.batch, length + 1), generator=generator)

    def adaptive(self, model: nn.Module) -> torchremat.Adaptive[Tensor]:
        made = torchremat.Adaptive(model, loss_of, budget=self.budget_bytes, cost="flops")
        made.learn(*(self.tokens(length) for length in self.learned))
        return made


REAL = Setting(
    blocks=8, width=256, batch=4, shortest=16, longest=512, steps=200, learned=(16, 48, 128), budget_bytes=160 * MIB
)
SMOKE = Setting(
    blocks=2, width=32, batch=2, shortest=16, longest=64, steps=6, learned=(8, 16, 24), budget_bytes=800_000
)


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def run(smoke: bool) -> dict[str, object]:
    setting = SMOKE if smoke else REAL
    loss_of(model := setting.model(), setting.tokens(setting.longest)).backward()  # libraries make their caches now
    del model
    peaks = peaks_of(setting)
    timed = seconds_of(setting)
    over = sum(peak > setting.budget_bytes for peak in peaks["ours"])
    beside = timed["planning_s"] + timed["learning_s"]
    share = beside / (beside + timed["step_s"])
    return {
        "budget_bytes": setting.budget_bytes,
        "lengths": setting.lengths(),
        "learned": list(setting.learned),
        "peaks": peaks,
        **timed,
        "bars": [
            bar("no step of 200 is above the budget, as the allocator saw it", f"{over} of {setting.steps}", over == 0),
            bar("at most 5% of the time goes into planning, profiles included", f"{share:.1%}", share <= MOST_SHARE),
            bar(
                "gradients are equal bit for bit at every length",
                f"{timed['differing']} of {setting.steps} differ",
                not timed["differing"],
            ),
        ],
    }


def ways_of(setting: Setting) -> dict[str, tuple[nn.Module, Callable[[Tensor], object]]]:
    """Each way of running a step: its model, and what is called with a batch."""

    def plainly(model: nn.Module) -> Callable[[Tensor], object]:
        return lambda tokens: loss_of(model, tokens).backward()

    plain, planned, torchs = setting.model(), setting.model(), setting.model()
    longest = setting.tokens(setting.longest)
    torchremat.plan(planned, lambda model: loss_of(model, longest), budget=setting.budget_bytes, cost="flops").apply(
        planned
    )
    every(1)(torchs)
    return {
        "plain": (plain, plainly(plain)),
        "one plan": (planned, plainly(planned)),
        "torch": (torchs, plainly(torchs)),
    }


def peaks_of(setting: Setting) -> dict[str, list[int]]:
    """The allocator's peak of every step; none begins with gradients."""
    ours, plain = setting.model(), setting.model()
    adaptive = setting.adaptive(ours)
    batches = [setting.tokens(length) for length in setting.lengths()]
    plainly = {
        length: peak(plain, lambda tokens: loss_of(plain, tokens).backward(), setting.tokens(length))
        for length in set(setting.lengths())
    }
    return {
        "ours": [peak(ours, adaptive, batch) for batch in batches],
        "plain": [plainly[length] for length in setting.lengths()],
    }


def peak(model: nn.Module, run: Callable[[Tensor], object], tokens: Tensor) -> int:
    model.zero_grad()
    before = bytes_before(models=[model], leaves=list(model.parameters()), optimizers=[], inputs=[tokens], device=CPU)
    with record_allocations(CPU) as recorder:
        run(tokens)
    return before.total_bytes + recorder.trace.peak_bytes


def seconds_of(setting: Setting) -> dict[str, object]:
    """Every way's seconds, each length run in turn by all of them; ours with its profiles and plans."""
    ways = ways_of(setting)
    model = setting.model()
    start_s = time.process_time()
    adaptive = setting.adaptive(model)
    seconds = dict.fromkeys(ways, 0.0) | {"ours": time.process_time() - start_s}
    ways["ours"] = (model, adaptive)
    differing = 0
    for place, length in enumerate(setting.lengths()):
        tokens = setting.tokens(length, seed=place)
        found: dict[str, list[Tensor | None]] = {}
        for name, (own, run_one) in ways.items():
            own.zero_grad(set_to_none=True)
            start_s = time.process_time()
            run_one(tokens)
            seconds[name] += time.process_time() - start_s
            if name in ("plain", "ours"):
                found[name] = [parameter.grad for parameter in own.parameters()]
        differing += any(not torch.equal(a, b) for a, b in zip(found["plain"], found["ours"], strict=True))
    return {
        "seconds": seconds,
        "planning_s": adaptive.planning_seconds,
        "learning_s": adaptive.learning_seconds,
        "step_s": adaptive.step_seconds,
        "profiles": adaptive.learned,
        "classes": len(adaptive.plans),
        "differing": differing,
    }


def tables(results: dict[str, object]) -> dict[str, str]:
    seconds, peaks = results["seconds"], results["peaks"]
    words = {
        "ours": "`Adaptive`",
        "one plan": "one plan, made for the longest",
        "torch": "`torch.utils.checkpoint` on every block",
        "plain": "plain",
    }
    rows = [[words[name], f"{seconds[name]:.1f}", f"{seconds[name] / seconds['plain']:.2f}"] for name in words]
    budget = results["budget_bytes"]
    measured = [
        [words[name], mib(max(peaks[name])), sum(one > budget for one in peaks[name])] for name in ("ours", "plain")
    ]
    parts = [
        [
            results["profiles"],
            f"{results['learning_s']:.2f}",
            results["classes"],
            f"{results['planning_s']:.2f}",
            f"{1e3 * results['planning_s'] / max(1, results['classes']):.0f} ms",
        ]
    ]
    return {
        "time": markdown(["", "seconds", "x plain"], rows),
        "peaks": markdown(["", f"highest peak (MiB, the budget is {mib(budget)})", "steps above the budget"], measured),
        "planning": markdown(["profiles", "seconds in them", "plans", "seconds for them", "each"], parts),
    }


if __name__ == "__main__":
    sys.exit(publish(Path(__file__).parent, run, tables))
