"""Layers timed by a clock that they wind themselves, so that nothing hangs on how fast a machine is."""

import random

import numpy as np
import pytest
import torch
from torch import nn

from pipeline.balance.clocks import wound
from torchremat.errors import StepError, UnsupportedError
from torchremat.pipeline.balance import balance_by_time


@pytest.fixture
def clock(monkeypatch):
    return wound(monkeypatch)


class Takes(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, clock, backward_s):
        ctx.clock, ctx.backward_s = clock, backward_s
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.clock.now += ctx.backward_s
        return grad, None, None


class Slow(nn.Module):
    """Takes some time forward, and some backward."""

    def __init__(self, clock, forward_s, backward_s=0.0):
        super().__init__()
        self.clock = clock
        self.forward_s, self.backward_s = forward_s, backward_s

    def __deepcopy__(self, memo):
        return Slow(self.clock, self.forward_s, self.backward_s)

    def forward(self, x):
        self.clock.now += self.forward_s
        self.clock.calls += 1
        return Takes.apply(x, self.clock, self.backward_s)


def test_layers_are_balanced_by_time(clock):
    model = nn.Sequential(*(Slow(clock, tenths / 100) for tenths in range(1, 7)))

    found = balance_by_time(2, model, torch.rand(1, 1))

    assert found == [4, 2]
    assert [round(cost, 9) for cost in found.costs] == [0.01, 0.02, 0.03, 0.04, 0.05, 0.06]
    assert str(found).splitlines()[1] == "    0  0 .. 3      4  100.00 ms  47.6%"


def test_backward_counts(clock):
    model = nn.Sequential(Slow(clock, 1, 5), Slow(clock, 1, 0), Slow(clock, 4, 0))

    trained = balance_by_time(2, model, torch.rand(1, requires_grad=True))
    frozen = balance_by_time(2, model, torch.rand(1))

    assert trained.costs == (6, 1, 4)
    assert trained == [1, 2]
    assert frozen.costs == (1, 1, 4)
    assert frozen == [2, 1]


def test_to_begin_a_backward_does_not_count(clock, monkeypatch):
    backward = torch.autograd.backward

    def slow_to_begin(*args):
        clock.now += 100
        backward(*args)

    monkeypatch.setattr(torch.autograd, "backward", slow_to_begin)

    found = balance_by_time(1, nn.Sequential(Slow(clock, 2, 3), nn.Identity()), torch.ones(1, requires_grad=True))

    assert found.costs == (5, 0)


def test_layers_share_the_time(clock):
    model = nn.Sequential(Slow(clock, 0.1), Slow(clock, 0.01))

    balance_by_time(2, model, torch.rand(1), timeout=1.05)
    many = clock.calls
    clock.calls = 0
    balance_by_time(2, model, torch.rand(1), timeout=0)

    # Half of it is for the first layer, which fills it with 6 runs; the other fills the 0.45 s that are left.
    assert many == 6 + 45
    assert clock.calls == 4


def test_one_slow_run_in_three_does_not_count(clock):
    class Uneven(Slow):
        def __init__(self, clock, seconds):
            super().__init__(clock, 0)
            self.seconds = seconds

        def __deepcopy__(self, memo):
            return Uneven(self.clock, iter(self.seconds))

        def forward(self, x):
            self.clock.now += next(self.seconds)
            return x

    # The first is not timed.
    found = balance_by_time(1, nn.Sequential(Uneven(clock, [9, 1, 5, 1])), torch.rand(1), timeout=16)

    assert found.costs == (1,)


class Net(nn.Module):
    """Changes all that a layer can change: a buffer, an input, an attribute, generators."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.norm = nn.BatchNorm1d(3)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        x += random.random() + float(np.random.rand())
        return torch.dropout(self.norm(self.linear(x)), 0.5, True)


def model_that_changes():
    model = nn.Sequential(Net(), nn.ReLU(inplace=True), Net()).eval()
    model[2].linear.weight.requires_grad_(False)
    return model


def state_of(model):
    return (
        {name: value.clone() for name, value in model.state_dict().items()},
        [module.training for module in model.modules()],
        [parameter.grad for parameter in model.parameters()],
        [layer.calls for layer in (model[0], model[2])],
    )


def test_nothing_is_touched():
    model = model_that_changes()
    sample = torch.rand(4, 3, requires_grad=True)
    before, sample_before = state_of(model), sample.detach().clone()
    draws = (torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist())

    with torch.no_grad():
        balance_by_time(2, model, sample, timeout=0)

    after = state_of(model)
    assert all(torch.equal(after[0][name], value) for name, value in before[0].items())
    assert after[1:] == before[1:]
    assert torch.equal(sample, sample_before) and sample.grad is None
    assert torch.equal(torch.get_rng_state(), draws[0])
    assert (random.getstate(), np.random.get_state()[1].tolist()) == draws[1:]


def test_copies_run_in_training_mode_with_grad():
    seen = []

    class Watching(nn.Module):
        def forward(self, x):
            seen.append((self.training, torch.is_grad_enabled(), x.requires_grad, x.is_leaf))
            return x * 2

    with torch.inference_mode():
        balance_by_time(1, nn.Sequential(nn.Linear(2, 2), Watching()).eval(), torch.rand(2, 2), timeout=0)

    assert seen == [(True, True, True, False)] * 2


class Splits(nn.Module):
    def forward(self, x):
        return x, {"mask": x > 0, "scale": 2.0}, None


class Joins(nn.Module):
    def forward(self, values):
        x, rest, nothing = values
        assert nothing is None
        return (x * rest["mask"] * rest["scale"], x.argmax(1))


class Picks(nn.Module):
    def forward(self, values):
        return values[1]


def test_layers_pass_whatever_they_pass_in_the_pipeline():
    model = nn.Sequential(nn.Linear(3, 3), Splits(), Joins(), Picks(), nn.Embedding(3, 2))

    found = balance_by_time(5, model, torch.rand(4, 3), timeout=0)

    assert found == [1, 1, 1, 1, 1]


def test_a_tuple_is_one_argument():
    class Adds(nn.Module):
        def forward(self, pair):
            assert type(pair) is tuple
            return pair[0] + pair[1]

    assert balance_by_time(1, nn.Sequential(Adds()), (torch.rand(1), torch.rand(1)), timeout=0) == [1]


def test_one_layer_is_copied_at_a_time():
    class Copy(nn.Linear):
        now = made = most = 0

        def __deepcopy__(self, memo):
            copy = Copy(2, 2)
            copy.marker = Marker()
            return copy

    class Marker:
        def __init__(self):
            Copy.now += 1
            Copy.made += 1
            Copy.most = max(Copy.most, Copy.now)

        def __del__(self):
            Copy.now -= 1

    balance_by_time(1, nn.Sequential(*(Copy(2, 2) for _ in range(4))), torch.rand(1, 2), timeout=0)

    assert (Copy.made, Copy.most, Copy.now) == (4, 1, 0)


def test_what_cannot_be_timed():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model(torch.rand(1, 2)).sum().backward()

    with pytest.raises(StepError) as raised:
        balance_by_time(3, model, torch.rand(1, 2), timeout=float("nan"))

    assert str(raised.value) == (
        "balance_by_time: 3 problems:\n"
        "  partitions=3, but there are 2 layers, and each needs one; give at most that.\n"
        "  4 of 4 parameters have a gradient already (`0.weight`, `0.bias`, `1.weight`, ...), which copies would have "
        "as well; call `module.zero_grad(set_to_none=True)` first.\n"
        "  timeout=nan: expected seconds, at least 0."
    )
    with pytest.raises(StepError, match=r"module: expected a torch.nn.Sequential, .* got Linear"):
        balance_by_time(1, model[0], torch.rand(1, 2))
    with pytest.raises(StepError, match="meta device"):
        balance_by_time(1, nn.Sequential(nn.Linear(2, 2, device="meta")), torch.rand(1, 2))
    with pytest.raises(UnsupportedError, match="is not a device"):
        balance_by_time(1, nn.Sequential(nn.Linear(2, 2)), torch.rand(1, 2), device="nowhere")


@pytest.mark.gpu
def test_layers_are_timed_on_a_device():
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 4096), nn.Linear(4096, 64))

    found = balance_by_time(2, model, torch.rand(8, 64), timeout=0.1, device="cuda")

    assert sum(found) == 3
    assert model[0].weight.device.type == "cpu"
