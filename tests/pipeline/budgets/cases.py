"""What two processes do with plans for the stages of schedules."""

from functools import partial
from importlib import import_module

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from torchremat import BudgetError, PipelineError, PlanError, UnsupportedError, unwrap, wrap
from torchremat.measuring.allocator import record_allocations
from torchremat.pipeline import StagePlanner, attach, plan_stages

WIDTH, BLOCKS, MICROBATCHES, ROWS = 32, 4, 4, 32
CPU = torch.device("cpu")


class Block(nn.Module):
    """Counts its calls."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return x + self.down(functional.gelu(self.up(x)))


class Program:
    """A schedule with two stages, one in each process, or four, two in each."""

    def __init__(self, name):
        pipelining = import_module("torch.distributed.pipelining")
        rank = dist.get_rank()
        is_single = name in ("ScheduleGPipe", "Schedule1F1B")
        here, count = ([rank], 2) if is_single else ([rank, rank + 2], 4)
        self.modules = []
        for number in here:
            torch.manual_seed(number)
            self.modules.append(nn.Sequential(*(Block() for _ in range(BLOCKS))))
        self.stages = [
            pipelining.PipelineStage(module, number, count, CPU)
            for module, number in zip(self.modules, here, strict=True)
        ]
        self.schedule = getattr(pipelining, name)(
            self.stages[0] if is_single else self.stages, MICROBATCHES, loss_fn=functional.mse_loss
        )
        self.x, self.target = torch.randn(2, MICROBATCHES * ROWS, WIDTH, generator=torch.Generator().manual_seed(1))

    def step(self, schedule):
        first = (self.x,) if self.stages[0].is_first else ()
        last = {"target": self.target} if any(one.is_last for one in self.stages) else {}
        return schedule.step(*first, **last)

    def peak_bytes(self):
        """The measured peak of a step, with what lies there before it."""
        parameters = [parameter for module in self.modules for parameter in module.parameters()]
        for one in parameters:
            one.grad = torch.zeros_like(one)
        with record_allocations(CPU) as recorder:
            self.step(self.schedule)
        there = 2 * sum(one.nbytes for one in parameters)
        for stage in self.stages:
            # Inputs, and gradients or targets: of four microbatches, in buffers that are made once or in the batch.
            there += 2 * self.x.nbytes
        return recorder.trace.peak_bytes + there

    def gradients(self):
        for module in self.modules:
            module.zero_grad()
        for block in (block for module in self.modules for block in module):
            block.calls = 0
        self.step(self.schedule)
        return [parameter.grad for module in self.modules for parameter in module.parameters()]


def show(name):
    program = Program(name)
    planner = StagePlanner(program.schedule, program.step, cost="flops")
    for budget in ("100%", "90%", "75%"):
        try:
            plans = planner.plan(budget)
        except BudgetError as e:
            print(name, e)
            continue
        plans.apply(program.schedule)
        program.step(program.schedule)
        with attach(program.schedule, lookahead=False):
            m = program.peak_bytes()
        plans.remove(program.schedule)
        one = plans.devices[dist.get_rank()]
        print(
            name,
            budget,
            dist.get_rank(),
            "pred",
            one.peak_bytes,
            "meas",
            m,
            m / one.peak_bytes - 1,
            one.where,
            [(s.in_flight, s.kept_bytes) for s in plans],
            "\n",
        )


CASES = {name: partial(show, name) for name in ("ScheduleGPipe", "Schedule1F1B", "ScheduleInterleaved1F1B")}
