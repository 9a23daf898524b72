"""Why is the recompute another one?

A recompute has to give what the forward gave.
Generators of torch, buffers and attributes are looked after; what other packages keep is not, unless it is registered.
Here a block draws from a module found by name, and torch's own checkpoint computes other gradients without a word.
`verify` compares a step with regions and one without, and `check="values"` stops the backward at the first difference,
with the operator, the line and the likely cause.
"""

import random
from importlib import import_module

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import torchremat
from torchremat.extend import python_random, registered


class Block(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        h = self.up(x) * import_module("random").uniform(0.9, 1.1)
        return x + self.down(torch.tanh(h))


torch.manual_seed(0)
model = nn.Sequential(*(Block() for _ in range(3)))
x = torch.randn(64, 32)


def step(model):
    return model(x).square().mean()


def gradients(step):
    random.seed(0)
    model.zero_grad()
    step(model).backward()
    return [parameter.grad for parameter in model.parameters()]


def with_torch(model):
    h = x
    for block in model:
        h = torch_checkpoint(block, h, use_reentrant=False)
    return h.square().mean()


plain = gradients(step)
equal = sum(map(torch.equal, plain, gradients(with_torch)))
print(f"torch's checkpoint: {equal} of {len(plain)} gradients are equal")

torchremat.wrap(model, Block)
print("verify, exact:", torchremat.verify(model, step).is_exact)
torchremat.unwrap(model)

torchremat.wrap(model, Block, check="values")
try:
    gradients(step)
except torchremat.CheckpointError as error:
    print(error)

with registered(python_random):  # or `register`, once and for all
    equal = sum(map(torch.equal, plain, gradients(step)))
    print(f"registered: {equal} of {len(plain)} gradients are equal")
