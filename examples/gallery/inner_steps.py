"""Learn from a hundred inner steps.

Meta-learning differentiates through an optimizer that runs inside of the model.
Each inner step runs a backward of its own, whose graph autograd keeps for the second derivatives, so memory grows with
the number of inner steps, and most methods stop after five.
Here a starting point and a learning rate are learned from what a hundred inner steps of gradient descent reach.
"""

import torch
from torch import nn
from torch.func import functional_call

import torchremat

STEPS = 100

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 1))
names = [name for name, _ in net.named_parameters()]
rate = torch.tensor(0.05, requires_grad=True)
x = torch.linspace(-2, 2, 40)[:, None]
y, other = torch.sin(2 * x), torch.sin(2 * x + 0.3)


def loss_of(weights, target):
    return (functional_call(net, dict(zip(names, weights, strict=True)), (x,)) - target).square().mean()


def learn(weights, _):
    """A step of gradient descent; its own gradient is what the outer loss needs."""
    loss = loss_of(weights, y)
    gradients = torch.autograd.grad(loss, weights, create_graph=True)
    return tuple(one - rate * gradient for one, gradient in zip(weights, gradients, strict=True)), loss


def plain(_):
    weights = tuple(net.parameters())
    for _ in range(STEPS):
        weights, _ = learn(weights, None)
    return loss_of(weights, other)


def within(**options):
    weights, losses = torchremat.loop(learn, tuple(net.parameters()), length=STEPS, **options)
    print(f"inner loss {losses[0].item():.2f} at first, {losses[-1].item():.2f} at last")
    return loss_of(weights, other)


def gradients(loss):
    return torch.autograd.grad(loss, [*net.parameters(), rate])


saved = torchremat.saved(net, plain).saved_bytes
print(f"plain: autograd saves {saved:,} bytes")
expected = gradients(plain(net))
found = gradients(within(budget=saved // 20, on_schedule=print))
print("gradients equal, bit for bit:", all(map(torch.equal, expected, found)))
