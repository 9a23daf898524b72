"""Two optimizers: a GAN.

Each loss has a step of its own, and each model a plan for that step.
A GAN learns to draw points of a spiral, plainly and with 75% of the memory of each of its steps.
The generator's step holds the critic too, as its gradient passes through it.
"""

import torch
from torch import nn
from torch.nn.functional import softplus

import torchremat

STEPS, POINTS = 4, 512


def network(first, last, width=64):
    layers = [nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width), nn.GELU()) for _ in range(3)]
    return nn.Sequential(nn.Linear(first, width), *layers, nn.Linear(width, last))


def spiral(number):
    turn = 9 * torch.rand(POINTS, generator=torch.Generator().manual_seed(number)).sqrt()
    return torch.stack([turn * turn.cos(), turn * turn.sin()], 1) / 9


def noise(number):
    return torch.randn(POINTS, 8, generator=torch.Generator().manual_seed(1000 + number))


def train(budget=None):
    torch.manual_seed(0)
    generator, critic = network(8, 2), network(2, 1)

    def of_critic(critic, number=0):
        with torch.no_grad():
            drawn = generator(noise(number))
        return softplus(critic(drawn)).mean() + softplus(-critic(spiral(number))).mean()

    def of_generator(generator, number=0):
        return softplus(-critic(generator(noise(number)))).mean()

    turns = [
        (critic, of_critic, torch.optim.Adam(critic.parameters(), 1e-3, (0.0, 0.99))),
        (generator, of_generator, torch.optim.Adam(generator.parameters(), 1e-3, (0.0, 0.99))),
    ]
    if budget is not None:
        for model, step, optimizer in turns:
            torchremat.fit(model, step, budget=budget, optimizer=optimizer, cost="flops")
    losses = []
    for number in range(STEPS):
        for model, step, optimizer in turns:
            optimizer.zero_grad()
            loss = step(model, number)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses, [torchremat.measure(model, step, optimizer=optimizer) for model, step, optimizer in turns]


plain_losses, plain = train()
losses, fitted = train(budget="75%")

for name, before, after in zip(("critic", "generator"), plain, fitted, strict=True):
    print(
        f"step of the {name:9}  plain {before.peak_bytes / 2**20:5.2f} MiB, fitted {after.peak_bytes / 2**20:5.2f} MiB"
    )
print(f"{sum(map(float.__eq__, plain_losses, losses))} of {2 * STEPS} losses are equal bit for bit")
