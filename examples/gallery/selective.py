"""Selective checkpointing, by hand and planned.

What is worth keeping?
A region computes everything again in backward, and a policy says which results it keeps instead.
Here are four well-known choices on a transformer with attention that is written out: Megatron recomputes the core of
attention, which is large and cheap, and others keep what linear layers return.
Each line has the peak, the flops that are recomputed, and whether all gradients are equal bit for bit.
The last line is a plan for the bytes of Megatron's choice, which recomputes a quarter of the flops.
"""

import torch
from torch import nn
from torch.nn import functional as F

import torchremat
from torchremat.policies import everything_saved, nothing_saved, save_in_modules, save_unbatched_matmuls

WIDTH, HEADS = 64, 4


class Core(nn.Module):
    def forward(self, q, k, v):
        return F.softmax(q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5, -1) @ v


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.qkv, self.core, self.out = nn.Linear(WIDTH, 3 * WIDTH), Core(), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(self.core(q, k, v).transpose(1, 2).flatten(-2))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


torch.manual_seed(0)
model = nn.Sequential(*(Block() for _ in range(4)))
x = torch.randn(4, 128, WIDTH)


def step(model):
    return model(x).square().mean()


def gradients():
    model.zero_grad()
    step(model).backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


plain = gradients()
choices = {
    "keep everything": everything_saved,
    "recompute attention's core": ~save_in_modules("core"),
    "keep linear layers": save_unbatched_matmuls,
    "recompute everything": nothing_saved,
}
for name, policy in choices.items():
    torchremat.wrap(model, Block, policy=policy)
    found = torchremat.measure(model, step)
    equal = all(map(torch.equal, plain, gradients()))
    torchremat.unwrap(model)
    print(f"{name:27}{found.peak_bytes / 2**20:6.2f} MiB {found.recomputed_flops / 1e6:7.1f} MFLOP  equal: {equal}")
    if policy is choices["recompute attention's core"]:
        budget = found.peak_bytes

plan = torchremat.plan(model, step, budget=budget, cost="flops")
print(f"{'a plan for the same bytes':27}{plan.peak_bytes / 2**20:6.2f} MiB {plan.recomputed_flops / 1e6:7.1f} MFLOP")
