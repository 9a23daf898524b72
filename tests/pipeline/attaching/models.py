"""Stages of blocks in the style of Llama, and the schedules that run them."""

from functools import cache
from importlib import import_module

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from llama import Llama
from logs import Tally
from versions import NEEDS_OWN_SENDS, skip_unless

WIDTH = 8
BLOCKS = 2  # of a stage
MICROBATCHES = 4
ROWS = 2  # of a microbatch

SINGLE = ["ScheduleGPipe", "Schedule1F1B"]
LOOPED = ["ScheduleInterleaved1F1B", "ScheduleLoopedBFS", "ScheduleInterleavedZeroBubble"]
V_SHAPED = ["ScheduleZBVZeroBubble", "ScheduleDualPipeV"]
SCHEDULES = [*SINGLE, *LOOPED, *V_SHAPED]


class Counted(Llama):
    """Counts its calls by the value that it is called with."""

    def __init__(self):
        super().__init__(WIDTH)
        self.calls = Tally()

    def forward(self, x):
        self.calls[x.detach().double().sum().item()] += 1
        return super().forward(x)


class Stage(nn.Module):
    def __init__(self, number, blocks=BLOCKS, block=Counted):
        super().__init__()
        torch.manual_seed(number)
        self.layers = nn.ModuleList(block() for _ in range(blocks))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


@cache
def group(alone):
    """The process group of a schedule: both processes, or this one alone."""
    return [dist.new_group([rank]) for rank in range(2)][dist.get_rank()] if alone else None


def numbers(name, alone):
    """The stages of this process, and how many there are."""
    rank = dist.get_rank()
    if alone:
        return ([0], 1) if name in SINGLE else ([0, 1], 2)
    if name in SINGLE:
        return [rank], 2
    return ([rank, rank + 2] if name in LOOPED else [rank, 3 - rank]), 4


def loss_of(output, target):
    return functional.mse_loss(output, target)


class Program:
    """A schedule with its stages and its batch."""

    def __init__(self, name, *prepare, build=Stage, alone=False):
        # Takes seconds to import, and the process that collects the tests has no need of it.
        pipelining = import_module("torch.distributed.pipelining")
        if name in V_SHAPED or (alone and name not in SINGLE):
            skip_unless(NEEDS_OWN_SENDS)
        self.name = name
        here, count = numbers(name, alone)
        self.modules = [build(number) for number in here]
        for each in prepare:
            for module in self.modules:
                each(module)
        self.stages = [
            pipelining.PipelineStage(module, number, count, torch.device("cpu"), group=group(alone))
            for module, number in zip(self.modules, here, strict=True)
        ]
        self.schedule = getattr(pipelining, name)(
            self.stages[0] if name in SINGLE else self.stages, MICROBATCHES, loss_fn=loss_of
        )
        generator = torch.Generator().manual_seed(1)
        self.batch = torch.randn(MICROBATCHES * ROWS, 4, WIDTH, generator=generator)
        self.target = torch.randn(MICROBATCHES * ROWS, 4, WIDTH, generator=generator)
        self.losses = []

    @property
    def layers(self):
        return [layer for module in self.modules for layer in module.layers]

    def step(self, run=None):
        """Run a step; the calls and gradients are afterwards those of this step alone."""
        for layer in self.layers:
            layer.calls.clear()
        for module in self.modules:
            module.zero_grad()
        first = (self.batch,) if self.stages[0].is_first else ()
        last = {"target": self.target, "losses": self.losses} if any(one.is_last for one in self.stages) else {}
        return (run or self.schedule.step)(*first, **last)

    def train(self):
        """Run two steps, of which the first one also infers shapes, by calls of its own; return all gradients."""
        self.step()
        self.step()
        return self.result()

    def result(self):
        grads = [parameter.grad for module in self.modules for parameter in module.parameters()]
        return [*grads, *(loss.detach() for loss in self.losses)]

    @property
    def calls(self):
        """How often each layer was called with each microbatch."""
        return [sorted(layer.calls.values()) for layer in self.layers]
