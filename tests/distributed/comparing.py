"""A training run of two processes with regions, beside the same without, and beside one process alone.

Gradients are equal bit for bit, also to those of one process: with two processes an average is one addition, which
commutes, and one halving, which is exact. The learning rate is a power of two, so that an update rounds once however
the parameters are cut.
"""

import gc
from collections import Counter
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from distributed.models import Net, batch, net
from distributed.processes import WORLD
from regions.comparing import Watched, equal, live_regions

ROUNDS = 2
RATE = 0.125

# What torch called this before 2.13.
gather = dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor


class Gathers:
    """Counts the all-gathers of one sharded module; as FSDP asks for."""

    def __init__(self, counts, name):
        self.counts = counts
        self.name = name

    def allocate(self, size, *, dtype, device):
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, async_op=False):
        self.counts[self.name] += 1
        return gather(output_tensor, input_tensor, group=group, async_op=async_op)


class Run:
    """What came out of a training run.

    `grads` of all rounds, `calls` of each block, `gathers` by the name of the sharded module.
    """

    def __init__(self, build, *transformations, micros=1):
        model = build()
        for transform in transformations:
            model = transform(model)
        self.gathers = Counter()
        for name, module in model.named_modules():
            if isinstance(module, FSDPModule):
                module.set_custom_all_gather(Gathers(self.gathers, name))
        self.grads = []
        optimizer = torch.optim.SGD(model.parameters(), RATE)
        for number in range(ROUNDS):
            optimizer.zero_grad()
            train(model, dist.get_rank(), number, micros)
            self.grads += map(whole, (parameter.grad for parameter in model.parameters()))
            optimizer.step()
        (net,) = (module for module in model.modules() if isinstance(module, Net))
        self.calls = [layer.calls for layer in dict.fromkeys(net.layers)]


def train(model, rank, number, micros):
    torch.manual_seed(10 * number + rank)
    for micro in range(micros):
        with synchronised(model, micro + 1 == micros):
            model(batch(rank, 10 * number + micro)).float().square().sum().backward()


def synchronised(model, last):
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(last)
    elif isinstance(model, DistributedDataParallel) and not last:
        return model.no_sync()
    return nullcontext()


def whole(grad):
    return grad.full_tensor() if isinstance(grad, DTensor) else None if grad is None else grad.clone()


def alone(build, micros=1):
    """The gradients of one process that has the batches of all."""
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), RATE)
    grads = []
    for number in range(ROUNDS):
        parts = []
        for rank in range(WORLD):
            optimizer.zero_grad()
            train(model, rank, number, micros)
            parts.append([parameter.grad for parameter in model.parameters()])
        for parameter, *both in zip(model.parameters(), *parts, strict=True):
            parameter.grad = None if both[0] is None else (both[0] + both[1]) / WORLD
        grads += [whole(parameter.grad) for parameter in model.parameters()]
        optimizer.step()
    return grads


def compare(build, shard, ours, *, calls, gathers=None, micros=1, as_one=True):
    """Hold a run with regions, whose transformations `ours` are, to the plain run and to one process.

    Args:
        build: Makes the model.
        shard: The transformations of the plain run.
        ours: The transformations of the run with regions.
        calls: Of each block in the run with regions.
        gathers: All-gathers of each sharded module, in both runs.
        micros: Backward passes for each step.
        as_one: Whether one process computes the same.
    """
    gc.freeze()  # what was there before is not looked at: to collect and list it takes most of a second
    gc.disable()
    try:
        plain, own = Run(build, *shard, micros=micros), Run(build, *ours, micros=micros)
        left = live_regions()
    finally:
        gc.enable()

    if as_one:
        assert equal(plain.grads, alone(build, micros)), "the plain run is not that of one process"
    assert equal(own.grads, plain.grads), "the gradients are not those of the plain run"
    assert own.calls == calls, f"calls of the blocks: {own.calls}"
    assert sum(plain.calls) < sum(own.calls) or calls == plain.calls
    if gathers is not None:
        assert plain.gathers == gathers, f"all-gathers of the plain run: {plain.gathers}"
        assert own.gathers == gathers, f"all-gathers: {own.gathers}"
    assert left == [], f"{len(left)} regions are alive"


def held(transformations, *regions):
    """Hold what the blocks save to nothing with regions, and to one tensor for each block without."""
    for ways, alive in ((transformations(), 3), (transformations(*regions), 0)):
        model = watching()
        watched = [layer.drop for layer in model.layers]
        for transform in ways:
            model = transform(model)

        loss = model(batch(dist.get_rank(), 0)).square().sum()

        assert sum(len(one.alive) for one in watched) == alive
        loss.backward()
        assert sum(len(one.alive) for one in watched) == 0


def watching():
    model = net()
    for layer in model.layers:
        layer.drop = Watched()
    return model
