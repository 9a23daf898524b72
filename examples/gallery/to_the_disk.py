"""Backpropagation through a simulation, on a disk.

A pond is disturbed, and after 60 steps of the wave equation its surface is seen: what was the disturbance?
The gradient needs what each step has saved, and with enough steps that is more than there is room for.
`offload` lets it wait elsewhere: here a first MiB in host memory, the rest on a disk.
Each tensor comes back with its bits, so the gradient is the plain one.
"""

import torch
from torch.nn import functional as F

import torchremat

SIZE, STEPS = 64, 60
LAPLACE = torch.tensor([[0.0, 1.0, 0.0], [1.0, -4.0, 1.0], [0.0, 1.0, 0.0]]).view(1, 1, 3, 3)


def simulate(start):
    """Return the surface after all steps; waves slow down where they are high."""
    before, now = start, start
    for _ in range(STEPS):
        force = F.conv2d(F.pad(now, (1, 1, 1, 1), mode="circular"), LAPLACE)
        before, now = now, 2 * now - before + 0.2 * force / (1 + now * now)
    return now


def bump(row, column):
    i, j = torch.meshgrid(torch.arange(SIZE), torch.arange(SIZE), indexing="ij")
    return torch.exp(-((i - row) ** 2 + (j - column) ** 2) / 18.0).view(1, 1, SIZE, SIZE)


seen = simulate(bump(20, 40))
guess = bump(30, 32).requires_grad_()


def step():
    return F.mse_loss(simulate(guess), seen)


(expected,) = torch.autograd.grad(step(), guess)
kept = torchremat.measure(step).kept_bytes
print(f"{kept / 2**20:.2f} MiB are kept for backward")

host, disk = torchremat.Host("1MiB"), torchremat.Disk()
with torchremat.offload(torchremat.Tiers(host, disk)):
    loss = step()
for store in (host, disk):
    print(f"{store.statistics.stored_bytes / 2**20:.2f} MiB of them wait in the {type(store).__name__}")
(gradient,) = torch.autograd.grad(loss, guess)
print("the gradient is equal bit for bit:", torch.equal(gradient, expected))
print(f"{host.statistics.stored_bytes + disk.statistics.stored_bytes} bytes are left in the stores")
