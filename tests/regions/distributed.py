"""The model of the tests of wrapping, and what each process of a distributed run does with it."""

import os

import torch
import torch.distributed as dist
from torch import nn

from logs import Count, Log
from torchremat import wrap


class Block(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.norm = nn.BatchNorm1d(width)
        self.calls = Count()

    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        self.calls.up()
        return x + self.norm(self.linear(x)).tanh().exp() * scale


class Net(nn.Module):
    def __init__(self, blocks=4):
        super().__init__()
        self.inp = nn.Linear(4, 4)
        self.layers = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(4, 4)

    def forward(self, x):
        h = self.inp(x)
        for number, layer in enumerate(self.layers):
            h = layer(h, scale=0.5) * (1 + number)
        return self.head(h)


def net():
    torch.manual_seed(0)
    return Net()


def train(rank, path):
    """Compare wrapped with plain gradients, and those of the two processes."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    try:
        found = Log()
        for wrapped in (False, True):
            model = net()
            if wrapped:
                wrap(model, "layers.*")
            model = nn.parallel.DistributedDataParallel(model)
            torch.manual_seed(rank)
            for _ in range(2):
                model(torch.randn(8, 4)).sum().backward()
            found.append([parameter.grad for parameter in model.parameters()])
        assert all(map(torch.equal, *found))
        gathered = [None, None]
        dist.all_gather_object(gathered, found[1])
        assert all(map(torch.equal, *gathered))
        assert [layer.calls.value for layer in model.module.layers] == [4] * 4
        # Gloo's thread drops the tensors of a collective some time after it, and needs the interpreter for that; who
        # ends the group waits for that thread and may hold the interpreter. After a barrier they are gone.
        dist.barrier()
        del model
    finally:
        dist.destroy_process_group()
