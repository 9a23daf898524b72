"""Scripted modules in a region. Their state is in C++, where no dict of Python shows it."""

import copy

import pytest
import torch
from torch import nn

from torchremat import checkpoint, plan, verify

pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script` is not supported"),
]


class Changing(nn.Module):
    """Changes a buffer, a large buffer, a number, a list and the statistics of a norm in each forward."""

    calls: int
    seen: list[int]

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 4)
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("scale", torch.ones(4))
        self.register_buffer("large", torch.ones(4, 2000))
        self.calls = 0
        self.seen = [1]

    def forward(self, x):
        self.scale.add_(1)
        self.large.mul_(1.5)
        self.calls += 1
        self.seen.append(self.calls)
        factor = self.scale * self.large[:, 0] * self.calls * len(self.seen)
        return nn.functional.dropout(self.norm(self.linear(x) * factor), 0.5, self.training)


def scripted():
    torch.manual_seed(0)
    net = torch.jit.script(Changing())
    for _ in range(2):  # TorchScript rewrites its code in the first two calls
        net(torch.ones(5, 3)).sum().backward()
    net.zero_grad()
    return net


def trained(call, after=lambda net: None):
    """Return the gradients of two calls in one step, and the state after each of three steps."""
    net = scripted()
    found = []
    for _ in range(3):
        x = torch.randn(5, 3)
        loss = (call(net, x) + call(net, x.exp())).square().sum()
        after(net)
        loss.backward()
        found += [copy.deepcopy([one.grad for one in net.parameters()]), copy.deepcopy(net.state_dict())]
        found += [net.calls, net.seen, net.training]
        net.train()
        net.zero_grad()
    return found


def test_the_state_of_a_scripted_module():
    # Copies were made of its buffers and could not be shown to the recompute, so that no write was noticed either.
    torch.testing.assert_close(trained(checkpoint), trained(lambda net, x: net(x)), rtol=0, atol=0)


def test_the_mode_of_a_scripted_module():
    plain = trained(lambda net, x: net(x), after=lambda net: net.eval())

    torch.testing.assert_close(trained(checkpoint, after=lambda net: net.eval()), plain, rtol=0, atol=0)


def test_a_plan_for_a_model_with_a_scripted_module():
    # Its class has a forward that cannot be read from the class.
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Sequential(scripted(), nn.Tanh()), nn.Linear(4, 4))

    def step(model):
        return model(torch.ones(5, 3)).square().sum()

    plan(model, step, budget="min", cost="flops").apply(model)

    assert verify(model, step).is_exact
