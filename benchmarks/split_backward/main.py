"""Backward split into an input and a weight pass: one recompute by sessions, beside torch's checkpoint."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))

import _paths  # noqa: F401
import torch
import torch.distributed as dist
from _pairs import in_pair, seconds_in_turn
from _steps import ratio
from _tables import bar, markdown, publish, yes
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import torchremat
from torchremat.pipeline import attach

SPLIT = ("ScheduleInterleavedZeroBubble", "ScheduleZBVZeroBubble", "ScheduleDualPipeV")
WHOLE = "ScheduleInterleaved1F1B"
MICROBATCHES = 4
STAGES = 4
MOST = 0.7
ROUNDS = 7


class Block(nn.Module):
    """A block in the style of Llama: seven linear layers and two norms. Counts its calls."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = 4
        self.first, self.second = nn.RMSNorm(width), nn.RMSNorm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(width, 3 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(3 * width, width, bias=False)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        h = self.first(x)
        q, k, v = (one(h).unflatten(-1, (self.heads, -1)).transpose(1, 2) for one in (self.query, self.key, self.value))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2))
        h = self.second(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


def plain(_: nn.Module) -> None:
    """Nothing is recomputed."""


def by_torch(module: nn.Module) -> None:
    """Checkpoint every block by torch."""
    for block in module:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)


def by_us(module: nn.Module) -> None:
    """Make every block a region."""
    torchremat.wrap(module, Block)


WAYS = {"no checkpoint": plain, "torch's checkpoint": by_torch, "ours, attached": by_us}
PLAIN, TORCH, OURS = WAYS


class Program:
    """One schedule with the stages of this process, prepared in one way."""

    def __init__(self, schedule: str, prepare: Callable[[nn.Module], None], width: int, tokens: int) -> None:
        rank = dist.get_rank()
        looped = schedule in (WHOLE, "ScheduleInterleavedZeroBubble")
        numbers = [rank, rank + 2] if looped else [rank, 3 - rank]
        self.modules: list[nn.Module] = []
        for number in numbers:
            torch.manual_seed(number)
            self.modules.append(nn.Sequential(Block(width), Block(width)))
            prepare(self.modules[-1])
        self.stages = [
            pipelining.PipelineStage(module, number, STAGES, torch.device("cpu"))
            for module, number in zip(self.modules, numbers, strict=True)
        ]
        self.schedule = getattr(pipelining, schedule)(self.stages, MICROBATCHES, loss_fn=F.mse_loss)
        torch.manual_seed(STAGES)
        batch, target = torch.randn(2, 2 * MICROBATCHES, tokens, width)
        self.args = (batch,) if self.stages[0].is_first else ()
        self.kwargs = {"target": target} if any(stage.is_last for stage in self.stages) else {}

    @property
    def blocks(self) -> list[Block]:
        return [block for module in self.modules for block in module]

    def step(self) -> None:
        for block in self.blocks:
            block.calls = 0
        for module in self.modules:
            module.zero_grad()
        self.schedule.step(*self.args, **self.kwargs, return_outputs=False)

    def grads(self) -> list[Tensor]:
        return [parameter.grad for module in self.modules for parameter in module.parameters()]


def schedules(smoke: bool) -> tuple[str, ...]:
    return SPLIT[1:2] if smoke else (WHOLE, *SPLIT)


def work(smoke: bool) -> dict[str, object]:
    width, tokens, rounds = (16, 8, 1) if smoke else (128, 64, ROUNDS)
    return {schedule: compare(schedule, width, tokens, rounds) for schedule in schedules(smoke)}


def compare(schedule: str, width: int, tokens: int, rounds: int) -> dict[str, object]:
    programs = {way: Program(schedule, prepare, width, tokens) for way, prepare in WAYS.items()}
    found: dict[str, object] = {}
    expected: list[Tensor] = []
    with attach(programs[OURS].schedule):
        for way, program in programs.items():
            program.step()  # infers shapes as well, by calls of its own
            program.step()
            expected = expected or program.grads()
            found[way] = {
                "calls": [block.calls / MICROBATCHES for block in program.blocks],
                "equal": all(map(torch.equal, program.grads(), expected)),
            }
        seconds = seconds_in_turn({way: program.step for way, program in programs.items()}, rounds)
    for way, each in seconds.items():
        found[way] |= {"seconds": statistics.median(each), "ratio": asdict(ratio(each, seconds[TORCH]))}
    return found


def run(smoke: bool) -> dict[str, object]:
    pair = in_pair(work, smoke)
    found: dict[str, object] = {"schedules": {}, "bars": []}
    for schedule in schedules(smoke):
        found["schedules"][schedule] = {
            way: {**pair[0][schedule][way], "calls": [one[schedule][way]["calls"] for one in pair]} for way in WAYS
        }
        for way in WAYS:
            found["schedules"][schedule][way]["equal"] = all(one[schedule][way]["equal"] for one in pair)
    for schedule in (one for one in found["schedules"] if one != WHOLE):
        ours = found["schedules"][schedule][OURS]
        times = ours["ratio"]["median"]
        calls = {calls for process in ours["calls"] for calls in process}
        name = schedule.removeprefix("Schedule")
        found["bars"] += [
            bar(
                f"{name}: 2 forward calls, gradients equal",
                " to ".join(f"{one:g}" for one in sorted({min(calls), max(calls)})),
                calls == {2} and ours["equal"],
            ),
            bar(f"{name}: at most {MOST} of the time with torch's checkpoint", f"{times:.2f}", times <= MOST),
        ]
    return found


def tables(results: dict[str, object]) -> dict[str, str]:
    rows = []
    for schedule, ways in results["schedules"].items():
        for way, one in ways.items():
            calls = " / ".join(f"{statistics.mean(process):g}" for process in one["calls"])
            spread = one["ratio"]
            cell = f"{spread['median']:.2f} ({spread['low']:.2f}-{spread['high']:.2f})"
            name = schedule.removeprefix("Schedule")
            rows.append([name, way, calls, f"{1e3 * one['seconds']:.0f}", cell, yes(one["equal"])])
    head = ["schedule", "blocks", "forward calls", "ms per step", "ratio to torch's checkpoint", "gradients equal"]
    return {"steps": markdown(head, rows)}


if __name__ == "__main__":
    sys.exit(publish(Path(__file__).parent, run, tables))
