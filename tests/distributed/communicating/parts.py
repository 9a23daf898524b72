"""What programs that communicate are made of: blocks that may be slow, batches, groups, and a program itself."""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cache

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional

from logs import Count

BLOCKS, BATCH, LENGTH, WIDTH = 4, 4, 16, 16


@dataclass(frozen=True, kw_only=True)
class Program:
    """A model, and how it is trained.

    Attributes:
        model: The model.
        loss: Called as `loss(model, x)`.
        stream: Whose batches this process trains with: processes of one stream have the same ones.
        within: Makes the context in which the model is planned and trained.
        warmed: How many backwards come before everything: after the first one DistributedDataParallel lays its buckets
            out anew, and sums of more than two processes depend on where in a bucket a gradient lies.
        known_for: The warnings of the library that it may get: of other batches, which are larger inside of the model.
        optimizer: Makes the optimizer.
    """

    model: nn.Module
    loss: Callable[[nn.Module, Tensor], Tensor]
    stream: int = field(default_factory=dist.get_rank)
    within: Callable[[], AbstractContextManager[object]] = nullcontext
    warmed: int = 0
    known_for: tuple[type[Warning], ...] = ()
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW


def batch(seed, number, stream):
    """The `number`-th batch of a stream."""
    generator = torch.Generator().manual_seed(1000 * seed + 10 * number + stream)
    return torch.randn(BATCH, LENGTH, WIDTH, generator=generator)


def mean_square(model, x):
    return model(x).square().mean()


class Working(nn.Module):
    """Counts its calls, and takes `spin_s` longer for each."""

    def __init__(self):
        super().__init__()
        self.ran, self.spin_s = Count(), 0.0

    def work(self):
        self.ran.up()
        until = time.perf_counter() + self.spin_s
        while time.perf_counter() < until:
            pass


class Block(Working):
    """The usual one. Those that communicate replace its `mixed`."""

    def __init__(self, hidden=4 * WIDTH):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH)

    def forward(self, x):
        self.work()
        return x + self.mixed(self.norm(x))

    def mixed(self, x):
        return self.down(functional.gelu(self.up(x)))


def stack(block=Block, other=None):
    """Blocks, and a layer after them. With an `other` kind, the two kinds take turns."""
    kinds = (block, other or block)
    return nn.Sequential(*(kinds[place % 2]() for place in range(BLOCKS)), nn.Linear(WIDTH, WIDTH))


@cache
def mesh(outer, inner):
    """A mesh of all processes. It is made once, as groups have threads."""
    return init_device_mesh("cpu", (outer, inner), mesh_dim_names=("outer", "inner"))


def two_dimensions():
    """The mesh whose inner dimension has two processes, and the outer one the rest."""
    return mesh(dist.get_world_size() // 2, 2)


@cache
def group_of(*ranks):
    """The group of some processes. All of them ask, in one order."""
    return dist.new_group(ranks)


def pairs():
    """The groups of each two neighbours. A process is in two of them, or in one at the ends."""
    found = [group_of(one, one + 1) for one in range(dist.get_world_size() - 1)]
    return [one for one in found if dist.get_rank(one) >= 0]


def reduced_by_hooks(model, group):
    """Let each gradient be averaged when it is complete, as data parallelism by hand does."""

    def average(parameter):
        dist.all_reduce(parameter.grad, group=group)
        parameter.grad /= dist.get_world_size(group)

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(average)
    return model
