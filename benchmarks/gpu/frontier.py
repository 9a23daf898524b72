"""Whether a plan beats what people do by hand at the memory that they take, by the device's own counters."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
from findings import IS_SMALL, section
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import llama
import torchremat
from models import GPT

DEVICE = torch.device("cuda", 0)
ROUNDS = 2 if IS_SMALL else 5
BLOCKS, WIDTH, CONTEXT, BATCH = (3, 64, 64, 2) if IS_SMALL else (24, 1024, 1024, 8)
Step = Callable[[nn.Module], Tensor]
Way = Callable[[nn.Module], Callable[[], None]]

# The first steps of a plan are watched: they say whether memory and state are as they were planned.
_STEPS_BEFORE = 3
# A plan leaves a page of its budget free.
_ROOM_BYTES = 4096

# What SAC recipes save: products and attention.
_SAVED = {
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
}


def gpt(width: int = WIDTH) -> tuple[nn.Module, list[nn.Module], Step]:
    torch.manual_seed(0)
    model = GPT(context=CONTEXT, blocks=BLOCKS, width=width, heads=width // 32 if IS_SMALL else 16).to(DEVICE)
    tokens = torch.randint(model.embed.num_embeddings, (BATCH, CONTEXT + 1), device=DEVICE)

    def step(model: nn.Module) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten())

    return model, list(model.blocks), step


def llama_like() -> tuple[nn.Module, list[nn.Module], Step]:
    torch.manual_seed(0)
    model = nn.Sequential(*(llama.Llama(WIDTH) for _ in range(BLOCKS))).to(DEVICE)
    x = torch.randn(BATCH, CONTEXT, WIDTH, device=DEVICE)

    def step(model: nn.Module) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            return model(x).float().square().mean()

    return model, list(model), step


def _choose(_: object, operator: object, *args: object, **kwargs: object) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in _SAVED else CheckpointPolicy.PREFER_RECOMPUTE


def _wrapped(blocks: list[nn.Module], **options: object) -> Callable[[], None]:
    """Let torch checkpoint each block; return what undoes it."""
    for block in blocks:
        block.forward = partial(checkpoint, type(block).forward.__get__(block), use_reentrant=False, **options)

    def undo() -> None:
        for block in blocks:
            del block.forward

    return undo


def _in_regions(model: nn.Module, blocks: list[nn.Module]) -> Callable[[], None]:
    """Make each block a region; return what undoes it."""
    torchremat.wrap(model, lambda _, module: module in blocks)
    return lambda: torchremat.unwrap(model)


def taken(model: nn.Module, step: Step) -> tuple[float, float, dict[str, int]]:
    """Milliseconds of the device and of the host, and bytes by its counters; the step's gradients are dropped."""
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.reset_peak_memory_stats()
    begins, ends = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start_s = time.perf_counter()
    begins.record()
    step(model).backward()
    ends.record()
    host_s = time.perf_counter() - start_s
    torch.cuda.synchronize()
    counted = torch.cuda.memory_stats()
    model.zero_grad()
    return (
        begins.elapsed_time(ends),
        1e3 * host_s,
        {
            "allocated": counted["allocated_bytes.all.peak"],
            "requested": counted["requested_bytes.all.peak"],
            "reserved": counted["reserved_bytes.all.peak"],
        },
    )


def compared(make: Callable[[], tuple[nn.Module, list[nn.Module], Step]]) -> object:
    model, blocks, step = make()
    by_hand: dict[str, Callable[[], Callable[[], None]]] = {
        "plain": lambda: lambda: None,
        "per block": lambda: _wrapped(blocks),
        "selective": lambda: _wrapped(blocks, context_fn=partial(create_selective_checkpoint_contexts, _choose)),
    }
    budgets = {}
    for name, apply in by_hand.items():
        undo = apply()
        for _ in range(2):
            budgets[name] = taken(model, step)[2]["allocated"] + _ROOM_BYTES
        undo()
    del budgets["plain"]  # what a plan does there is nothing, or little for the workspace of a recompute
    start_s = time.perf_counter()
    planner = torchremat.Planner(model, step)
    profiled_s = time.perf_counter() - start_s
    ways, plans, seconds = dict(by_hand), {}, {}
    ways["per block, our regions"] = lambda: _in_regions(model, blocks)
    for name, budget in budgets.items():
        start_s = time.perf_counter()
        try:
            plan = plans[name] = planner.plan(budget)
        except torchremat.BudgetError as error:
            seconds[f"ours at {name}"] = str(error)[:200]
            continue
        seconds[f"ours at {name}"] = round(time.perf_counter() - start_s, 2)

        def applied(plan: torchremat.Plan = plan) -> Callable[[], None]:
            plan.apply(model)
            return lambda: plan.remove(model)

        ways[f"ours at {name}"] = applied
    times: dict[str, list[list[float]]] = {name: [] for name in ways}
    peaks: dict[str, dict[str, int]] = {}
    for turn in range(ROUNDS + 1):
        for name, apply in ways.items():
            undo = apply()
            for _ in range(_STEPS_BEFORE):
                taken(model, step)
            *took_ms, peaks[name] = taken(model, step)
            undo()
            if turn:
                times[name].append(took_ms)
    verified = {}
    for name in plans.keys() & {"per block"}:
        plan = plans[name]
        plan.apply(model)
        report = torchremat.verify(model, step)
        plan.remove(model)
        verified[name] = {
            "exact": report.is_exact,
            "deterministic": report.is_deterministic,
            "noise": report.noise[:3],
            "differences": report.differences[:3],
        }
    return {
        "milliseconds of the device, of the host": {
            name: [round(statistics.median(one), 3) for one in zip(*each, strict=True)] for name, each in times.items()
        },
        "bytes": peaks,
        "predicted": {name: plan.peak_bytes for name, plan in plans.items()},
        "predicted milliseconds": {
            name: [round(1e3 * one, 3) for one in (plan.plain_seconds, plan.recompute_seconds)]
            for name, plan in plans.items()
        },
        "plans": {name: str(plan)[:3000] for name, plan in plans.items()},
        "over budget": {name: peaks[f"ours at {name}"]["allocated"] - budgets[name] for name in plans},
        "before": {name: dict(plan.before_bytes) for name, plan in plans.items()},
        "verified": verified,
        "profiling, seconds": round(profiled_s, 2),
        "planning, seconds": seconds,
    }


if __name__ == "__main__":
    section(
        gpt=lambda: compared(gpt), wide=lambda: compared(lambda: gpt(2 * WIDTH)), llama=lambda: compared(llama_like)
    )
