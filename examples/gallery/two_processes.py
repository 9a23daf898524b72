"""FSDP2 in two processes.

Parameters, gradients and optimizer state are sharded over the processes, and a budget looks after the rest.
All processes call `fit`, and agree on one plan; the budget is for each of them.
The processes are started here, over gloo; with `torchrun` there are as many as it starts.
"""

import socket

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import fully_shard

import torchremat

STEPS = 3


class Block(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


def train(batches, budget=None):
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(4)))
    for block in model:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())

    def step(model, batch=batches[0]):
        return model(batch).square().mean()

    if budget is not None:
        torchremat.fit(model, step, budget=budget, optimizer=optimizer, cost="flops")
    for batch in batches:
        optimizer.zero_grad()
        step(model, batch).backward()
        optimizer.step()
    return [parameter.to_local() for parameter in model.parameters()], torchremat.measure(model, step)


def work(rank, port, told):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    batches = torch.randn(STEPS, 512, 64, generator=torch.Generator().manual_seed(rank))
    plain, before = train(batches)
    fitted, after = train(batches, budget="75%")
    equal = sum(map(torch.equal, plain, fitted))
    told.put((rank, before.peak_bytes, after.peak_bytes, f"{equal} of {len(plain)}"))
    dist.barrier()  # a process that ends while gloo lets go of a tensor is aborted
    dist.destroy_process_group()


def free_port():
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]


if __name__ == "__main__":
    told = mp.get_context("spawn").SimpleQueue()
    mp.spawn(work, (free_port(), told), nprocs=2)
    for rank, before_bytes, after_bytes, equal in sorted(told.get() for _ in range(2)):
        print(f"process {rank}: plain {before_bytes / 2**20:.2f} MiB, fitted {after_bytes / 2**20:.2f} MiB")
        print(f"           {equal} shards of parameters are equal bit for bit")
