"""Plans for the stages of pipelines: predicted and measured peaks of each device, and flops recomputed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))

import _paths  # noqa: F401
import torch
import torch.distributed as dist
from _pairs import alone, in_pair
from _tables import bar, markdown, mflop, mib, publish, yes
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.nn import functional as F

from pipeline.inline import cells_inline
from torchremat import Pipe, unwrap, wrap
from torchremat.measuring.allocator import record_allocations
from torchremat.pipeline import DevicePlan, StagePlanner, attach

CPU = torch.device("cpu")
SINGLE = ("ScheduleGPipe", "Schedule1F1B")
LOOPED = ("ScheduleInterleaved1F1B", "ScheduleInterleavedZeroBubble")
IN_A_V = ("ScheduleZBVZeroBubble", "ScheduleDualPipeV")
MICROBATCHES = 4
# Budgets: shares of the way from the lowest for which there is a plan to the plain peak.
SHARES = (0.75, 0.5, 0.25, 0.0)
LOWEST = "plan, 0% of the way up"
NEVER, ALWAYS, AT_ALWAYS = "nothing recomputed", "every stage wholly", "plan, the peak of every stage wholly"
# Of the way up, for plans of schedules that run without the look-ahead.
SHARE_WITHOUT = 0.25
LEAST = 0.98


class Block(nn.Module):
    """A block of a transformer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        heads = (one.unflatten(-1, (4, -1)).transpose(1, 2) for one in self.qkv(self.first(x)).chunk(3, dim=-1))
        x = x + self.out(F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(-2))
        return x + self.down(F.gelu(self.up(self.second(x))))


def blocks(seed: int, count: int, width: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(*(Block(width) for _ in range(count)))


def batch(tokens: int, width: int) -> Tensor:
    return torch.randn(2, 2 * MICROBATCHES, tokens, width, generator=torch.Generator().manual_seed(0))


class Program:
    """What a pipeline is measured by."""

    modules: Sequence[nn.Module]
    beside_bytes: int  # what lies there before a step beside parameters and gradients
    last_flops: int  # of the last layer of a stage, for a microbatch
    lookahead: bool | None = None  # whether schedules recompute ahead of gradients; a pipe has no such choice

    def step(self) -> object:
        raise NotImplementedError

    def measured(self) -> dict[str, object]:
        """Run two steps; the gradients and the peak are those of the second."""
        parameters = [parameter for module in self.modules for parameter in module.parameters()]
        self.step()  # infers shapes as well, by calls of its own
        for one in parameters:
            one.grad = torch.zeros_like(one)
        with record_allocations(CPU) as recorder:
            self.step()
        self.grads = [one.grad.clone() for one in parameters]
        there = 2 * sum(one.nbytes for one in parameters) + self.beside_bytes
        return {"peak_bytes": recorder.trace.peak_bytes + there}


class Piped(Program):
    """A `Pipe` with two stages on one device."""

    def __init__(self, count: int, width: int, tokens: int) -> None:
        self.x, _ = batch(tokens, width)
        self.pipe = Pipe(
            blocks(0, 2 * count, width), [count] * 2, devices=[CPU] * 2, chunks=MICROBATCHES, checkpoint="never"
        )
        self.modules = [self.pipe]
        self.beside_bytes = self.x.nbytes
        self.last_flops = 2 * self.x.numel() // MICROBATCHES * 4 * width

    def step(self) -> object:
        loss = self.loss(self.pipe)
        loss.backward()
        return loss

    def loss(self, pipe: Pipe) -> Tensor:
        return pipe(self.x).square().mean()

    @property
    def planner(self) -> StagePlanner:
        return StagePlanner(self.pipe, self.loss, cost="flops")

    @contextmanager
    def always(self) -> Iterator[None]:
        self.pipe.checkpoint = "always"
        yield
        self.pipe.checkpoint = "never"

    @contextmanager
    def under(self, plans) -> Iterator[None]:
        plans.apply(self.pipe)
        yield
        plans.remove(self.pipe)

    def measured(self) -> dict[str, object]:
        with cells_inline():
            return super().measured()


class Scheduled(Program):
    """A schedule of torch, with the stages of this process."""

    lookahead = True

    def __init__(self, name: str, count: int, width: int, tokens: int) -> None:
        rank, world = dist.get_rank(), dist.get_world_size()
        numbers = [rank] if name in SINGLE else [rank, rank + 2 if name in LOOPED else 3 - rank]
        total = world if name in SINGLE else 2 * world
        self.modules = [blocks(number, count, width) for number in numbers]
        stages = [
            pipelining.PipelineStage(module, number, total, CPU)
            for module, number in zip(self.modules, numbers, strict=True)
        ]
        kind = getattr(pipelining, name)
        self.schedule = kind(stages[0] if name in SINGLE else stages, MICROBATCHES, loss_fn=F.mse_loss)
        x, target = batch(tokens, width)
        self.args = (x,) if 0 in numbers else ()
        self.kwargs = {"target": target} if total - 1 in numbers else {}
        # Of each stage inputs, and gradients of outputs or targets: in buffers that are made once, or in the batch.
        self.beside_bytes = 2 * len(stages) * x.nbytes
        self.last_flops = 2 * x.numel() // MICROBATCHES * 4 * width

    def step(self) -> object:
        return self.run(self.schedule)

    def run(self, schedule: object) -> object:
        return schedule.step(*self.args, **self.kwargs)

    @property
    def planner(self) -> StagePlanner:
        return StagePlanner(self.schedule, self.run, cost="flops", lookahead=self.lookahead)

    @contextmanager
    def always(self) -> Iterator[None]:
        for module in self.modules:
            wrap(module, lambda name, _: name == "")
        with attach(self.schedule, lookahead=self.lookahead):
            yield
        for module in self.modules:
            unwrap(module)

    @contextmanager
    def under(self, plans) -> Iterator[None]:
        plans.apply(self.schedule)
        with attach(self.schedule, lookahead=self.lookahead):
            yield
        plans.remove(self.schedule)


def compared(
    program: Program, everywhere: Callable[[object], list[object]], rank: int, smoke: bool
) -> dict[str, object]:
    """Measure one pipeline in all ways; `everywhere` returns what each process has."""
    found = {NEVER: program.measured()}
    expected = program.grads
    with program.always():
        found[ALWAYS] = {**program.measured(), "equal": all(map(torch.equal, program.grads, expected))}
    planner = program.planner
    devices = planner.plan("100%").devices

    def under(planner: StagePlanner, budgets: list[int]) -> dict[str, object]:
        plans = planner.plan(budgets)
        with program.under(plans):
            return {
                **program.measured(),
                "predicted": plans.devices[rank].peak_bytes,
                "budget": budgets[rank],
                "recomputed": plans.recomputed_flops,
                "equal": all(map(torch.equal, program.grads, expected)),
            }

    found[NEVER] |= {"predicted": devices[rank].plain_peak_bytes, "recomputed": 0, "equal": True}
    budgets = {f"plan, {share:.0%} of the way up": up(devices, share) for share in (SHARES[-1:] if smoke else SHARES)}
    budgets[AT_ALWAYS] = [
        max(peak, one.floor_bytes) for peak, one in zip(everywhere(found[ALWAYS]["peak_bytes"]), devices, strict=True)
    ]
    for name, each in budgets.items():
        found[name] = under(planner, each)
    stages = planner.plan(budgets[LOWEST])
    # Of every stage wholly: its forward but for the last layer, whose output nobody saves.
    forward = next(one.plan.flops for one in stages if one.plan is not None)
    found[ALWAYS]["recomputed"] = MICROBATCHES * len(stages) * (forward - program.last_flops)
    if program.lookahead and not smoke:
        program.lookahead = False
        planner = program.planner
        share = up(planner.plan("100%").devices, SHARE_WITHOUT)
        found[f"plan, {SHARE_WITHOUT:.0%} of the way up, no look-ahead"] = under(planner, share)
    return found


def up(devices: Sequence[DevicePlan], share: float) -> list[int]:
    """Return for each device the budget at a share of the way up."""
    return [int(one.floor_bytes + share * (one.plain_peak_bytes - one.floor_bytes)) for one in devices]


def gathered(value: object) -> list[object]:
    values: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def sizes(smoke: bool) -> tuple[int, int, int]:
    return (1, 8, 8) if smoke else (2, 64, 64)


def schedules(smoke: bool) -> tuple[str, ...]:
    return SINGLE[:1] if smoke else (*SINGLE, *LOOPED, *IN_A_V)


def work(smoke: bool) -> dict[str, object]:
    return {
        name: compared(Scheduled(name, *sizes(smoke)), gathered, dist.get_rank(), smoke) for name in schedules(smoke)
    }


def run(smoke: bool) -> dict[str, object]:
    torch.set_num_threads(1)
    pipelines = {"Pipe": [compared(Piped(*sizes(smoke)), lambda value: [value], 0, smoke)]}
    pair = [alone(work)] if smoke else in_pair(work, smoke)
    for name in schedules(smoke):
        pipelines[name.removeprefix("Schedule")] = [one[name] for one in pair]
    found: dict[str, object] = {"pipelines": pipelines, "bars": []}
    for name, processes in pipelines.items():
        planned = [one for process in processes for way, one in process.items() if "predicted" in one]
        shares = [one["peak_bytes"] / one["predicted"] for one in planned]
        most = max(shares)
        flops = {way: processes[0][way]["recomputed"] for way in (ALWAYS, AT_ALWAYS)}
        equal = all(one["equal"] for process in processes for one in process.values())
        found["bars"] += [
            bar(f"{name}: never above the prediction, gradients equal", f"{most:.2%} of it", most <= 1 and equal),
            bar(f"{name}: at least {LEAST:.0%} of the prediction", f"{min(shares):.2%}", min(shares) >= LEAST),
            bar(
                f"{name}: at its peak no more flops than every stage wholly",
                f"{mflop(flops[AT_ALWAYS])} of {mflop(flops[ALWAYS])} MFLOP",
                flops[AT_ALWAYS] <= flops[ALWAYS],
            ),
        ]
    return found


def tables(results: dict[str, object]) -> dict[str, str]:
    rows = []
    for name, processes in results["pipelines"].items():
        for way in processes[0]:
            ours = [process[way] for process in processes]
            forward, recomputed = processes[0][ALWAYS]["recomputed"], ours[0]["recomputed"]
            peaks = " / ".join(mib(one["peak_bytes"]) for one in ours)
            predicted = " / ".join(mib(one["predicted"]) if "predicted" in one else "-" for one in ours)
            share = " / ".join(
                f"{one['peak_bytes'] / one['predicted']:.2%}" if "predicted" in one else "-" for one in ours
            )
            equal = yes(all(one["equal"] for one in ours))
            rows.append([name, way, predicted, peaks, share, mflop(recomputed), f"{recomputed / forward:.0%}", equal])
    head = [
        "pipeline",
        "way",
        "predicted, MiB",
        "measured, MiB",
        "of the prediction",
        "MFLOP recomputed",
        "of every stage wholly",
        "gradients equal",
    ]
    return {"peaks": markdown(head, rows)}


if __name__ == "__main__":
    sys.exit(publish(Path(__file__).parent, run, tables))
