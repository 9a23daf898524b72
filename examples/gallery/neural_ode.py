"""Differentiate through a solver, exactly.

The adjoint method integrates backward in time, which needs no memory and gives other gradients than the solver's own.
A loop with slots needs little memory and gives the solver's own gradients, bit for bit, whatever the solver is.
Here 200 steps of Runge and Kutta's method are taken back from 12 states, and then an adaptive solver whose number of
steps is not known before it ends: states are kept and dropped as it goes on.
"""

import torch
from torch import nn

import torchremat

STEPS, END = 200, 2.0

torch.manual_seed(0)
field = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 2))
start = torch.randn(16, 2)


def runge_kutta(x, size):
    a = field(x)
    b = field(x + size / 2 * a)
    c = field(x + size / 2 * b)
    d = field(x + size * c)
    return x + size / 6 * (a + 2 * b + 2 * c + d)


def fixed(x, _):
    return runge_kutta(x, END / STEPS), None


def adaptive(carry, _):
    """A step of a size that the difference of one step and two halves allows."""
    x, time, size = carry
    whole, halves = runge_kutta(x, size), runge_kutta(runge_kutta(x, size / 2), size / 2)
    error = (whole - halves).abs().max().detach()
    good = error < 1e-6
    following = torch.minimum(size * torch.where(good, 1.05, 0.5), END - torch.where(good, time + size, time))
    return (torch.where(good, halves, x), torch.where(good, time + size, time), following), None


def gradients(last):
    field.zero_grad()
    last.square().mean().backward()
    return [parameter.grad for parameter in field.parameters()]


def plain(body, carry, goes_on):
    steps = 0
    while goes_on(carry, steps):
        carry, _ = body(carry, None)
        steps += 1
    return carry, steps


last, _ = plain(fixed, start, lambda _, steps: steps < STEPS)
expected = gradients(last)
last, _ = torchremat.loop(fixed, start, length=STEPS, slots=12, on_schedule=print)
print("gradients equal, bit for bit:", all(map(torch.equal, expected, gradients(last))))

begin = start, torch.zeros(()), torch.tensor(0.01)
(last, *_), steps = plain(adaptive, begin, lambda carry, _: bool(carry[1] < END - 1e-6))
expected = gradients(last)
(last, *_), _ = torchremat.loop(
    adaptive, begin, condition=lambda carry: carry[1] < END - 1e-6, max_length=1000, slots=12, on_schedule=print
)
print(f"{steps} adaptive steps, gradients equal, bit for bit:", all(map(torch.equal, expected, gradients(last))))
