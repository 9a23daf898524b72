"""Recomputing while a gradient is on its way: 1F1B with transfers and stages of 40 ms, simulated by sleeping."""

from __future__ import annotations

import statistics
import sys
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import asdict
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
from torch.distributed.pipelining import schedules
from torch.nn import functional as F

import torchremat
from torchremat.pipeline import attach, detach

STAGES = ("Schedule1F1B", "ScheduleGPipe")
BARRED = STAGES[0]
LAYERS = 4
MICROBATCHES = 6
WIDTH = 16
TRANSFER_S = 0.040
STAGE_S = 0.040  # a forward, and a recompute; a backward takes twice that
STEP_LESS, BLOCKED_LESS = 0.06, 0.25
ROUNDS = 9
WITH, WITHOUT = "with look-ahead", "without"


class Sleeps(torch.autograd.Function):
    """Takes a while in both directions, and no core."""

    @staticmethod
    def forward(ctx, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        time.sleep(2 * ctx.seconds)
        return grad, None


class Layer(nn.Module):
    """A layer that takes a share of the stage's time. Counts its calls."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.seconds = seconds
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        # What saves a tensor comes last, so that a recompute runs all of it.
        return x + Sleeps.apply(self.linear(x), self.seconds).tanh().sin()


# A transfer takes a time from its sending, whether or not its receiver waits for it by then. So each has a message
# beside it that says when it was sent; the clock is one for all processes of a machine.
STAMP = 1  # the tag of that message


class Arriving:
    """A receive whose data is there `seconds` after it was sent, and that can be asked."""

    blocked_s = 0.0  # spent in waits by this process

    def __init__(self, operation: dist.P2POp, work: dist.Work, seconds: float) -> None:
        self.sent_s = torch.zeros(1, dtype=torch.float64)
        works = (work, dist.irecv(self.sent_s, operation.peer, tag=STAMP))
        self.arrived = threading.Event()
        self.thread = threading.Thread(target=self.arrive, args=(works, seconds))
        self.thread.start()

    def arrive(self, works: tuple[dist.Work, ...], seconds: float) -> None:
        for work in works:
            work.wait()
        time.sleep(max(0.0, self.sent_s.item() + seconds - time.perf_counter()))
        self.arrived.set()

    def is_completed(self) -> bool:
        return self.arrived.is_set()

    def wait(self) -> None:
        start_s = time.perf_counter()
        self.thread.join()
        Arriving.blocked_s += time.perf_counter() - start_s


class Sent:
    """A send, which nobody waits for: what is sent is kept until it has gone."""

    def __init__(self, operation: dist.P2POp, work: dist.Work) -> None:
        stamp = torch.tensor([time.perf_counter()], dtype=torch.float64)
        self.kept = operation, stamp
        works = (work, dist.isend(stamp, operation.peer, tag=STAMP))
        threading.Thread(target=lambda: [one.wait() for one in works]).start()

    def is_completed(self) -> bool:
        return True

    def wait(self) -> None:
        """Go on."""


@contextmanager
def transfers(seconds: float) -> Generator[None]:
    """Let receives take a while; schedules that are attached in the block see them too."""
    own = schedules._batch_p2p

    def batch(operations: list[dist.P2POp], desc: str | None = None) -> list[object]:
        return [
            Arriving(operation, work, seconds) if operation.op is dist.irecv else Sent(operation, work)
            for operation, work in zip(operations, own(operations, desc), strict=True)
        ]

    schedules._batch_p2p = batch
    try:
        yield
    finally:
        schedules._batch_p2p = own


class Program:
    """One schedule with the stage of this process."""

    def __init__(self, schedule: str, stage_s: float) -> None:
        rank = dist.get_rank()
        torch.manual_seed(rank)
        self.module = nn.Sequential(*(Layer(stage_s / LAYERS) for _ in range(LAYERS)))
        torchremat.wrap(self.module, Layer)
        stage = pipelining.PipelineStage(self.module, rank, 2, torch.device("cpu"))
        self.schedule = getattr(pipelining, schedule)(stage, MICROBATCHES, loss_fn=F.mse_loss)
        torch.manual_seed(2)
        batch, target = torch.randn(2, MICROBATCHES, 4, WIDTH)
        self.args = (batch,) if stage.is_first else ()
        self.kwargs = {"target": target} if stage.is_last else {}
        self.blocked_s: list[float] = []

    def step(self) -> None:
        for layer in self.module:
            layer.calls = 0
        self.module.zero_grad()
        Arriving.blocked_s = 0.0
        self.schedule.step(*self.args, **self.kwargs)
        self.blocked_s.append(Arriving.blocked_s)


def work(smoke: bool) -> dict[str, object]:
    scale, rounds = (0.05, 1) if smoke else (1.0, ROUNDS)
    with transfers(TRANSFER_S * scale):
        return {schedule: compare(schedule, STAGE_S * scale, rounds) for schedule in STAGES}


def compare(schedule: str, stage_s: float, rounds: int) -> dict[str, object]:
    programs = {way: Program(schedule, stage_s) for way in (WITHOUT, WITH)}
    for way, program in programs.items():
        attach(program.schedule, lookahead=way == WITH)
        program.step()  # infers shapes as well, by calls of its own
        program.step()
        program.blocked_s.clear()
    expected = [parameter.grad for parameter in programs[WITHOUT].module.parameters()]
    found: dict[str, object] = {}
    for way, program in programs.items():
        ours = [parameter.grad for parameter in program.module.parameters()]
        found[way] = {
            "recomputes": sum(layer.calls - MICROBATCHES for layer in program.module),
            "equal": all(map(torch.equal, ours, expected)),
        }
    seconds = seconds_in_turn({way: program.step for way, program in programs.items()}, rounds)
    for way, each in seconds.items():
        blocked_s = programs[way].blocked_s[-rounds:]
        found[way] |= {
            "seconds": statistics.median(each),
            "ratio": asdict(ratio(each, seconds[WITHOUT])),
            "blocked_s": statistics.median(blocked_s),
        }
        detach(programs[way].schedule)
    return found


def run(smoke: bool) -> dict[str, object]:
    pair = in_pair(work, smoke)
    found: dict[str, object] = {"schedules": {}, "bars": []}
    for schedule in STAGES:
        found["schedules"][schedule] = {
            way: {
                **pair[0][schedule][way],
                "recomputes": [one[schedule][way]["recomputes"] for one in pair],
                "equal": all(one[schedule][way]["equal"] for one in pair),
            }
            for way in (WITHOUT, WITH)
        }
    ways = found["schedules"][BARRED]
    shorter = 1 - ways[WITH]["ratio"]["median"]
    blocked = 1 - ways[WITH]["blocked_s"] / ways[WITHOUT]["blocked_s"]
    same = ways[WITH]["recomputes"] == ways[WITHOUT]["recomputes"] == [LAYERS * MICROBATCHES] * 2
    found["bars"] = [
        bar(f"1F1B: the step is at least {STEP_LESS:.0%} shorter", f"{shorter:.1%}", shorter >= STEP_LESS),
        bar(
            f"1F1B: the first process is blocked at least {BLOCKED_LESS:.0%} less",
            f"{blocked:.0%}",
            blocked >= BLOCKED_LESS,
        ),
        bar(
            "1F1B: as many recomputes, gradients equal",
            f"{ways[WITH]['recomputes'][0]} each",
            same and ways[WITH]["equal"],
        ),
    ]
    return found


def tables(results: dict[str, object]) -> dict[str, str]:
    rows = []
    for schedule, ways in results["schedules"].items():
        for way, one in ways.items():
            spread = one["ratio"]
            rows.append(
                [
                    schedule.removeprefix("Schedule"),
                    way,
                    f"{1e3 * one['seconds']:.0f}",
                    f"{spread['median']:.3f} ({spread['low']:.3f}-{spread['high']:.3f})",
                    f"{1e3 * one['blocked_s']:.0f}",
                    " / ".join(map(str, one["recomputes"])),
                    yes(one["equal"]),
                ]
            )
    head = ["schedule", "", "ms per step", "ratio", "ms blocked", "recomputes", "gradients equal"]
    return {"steps": markdown(head, rows)}


if __name__ == "__main__":
    sys.exit(publish(Path(__file__).parent, run, tables))
