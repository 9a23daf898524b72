"""`torchgpipe.balance`: counts for `GPipe`, from seconds or bytes. Letters and numbers are the rows of the facts."""

from functools import partial

import pytest
import torch
from torch import nn

from pipeline.balance.clocks import wound
from torchremat.interop.torchgpipe import GPipe
from torchremat.interop.torchgpipe.balance import balance_by_size, balance_by_time
from torchremat.interop.torchgpipe.skip import pop, skippable, stash

FINDS = {"time": partial(balance_by_time, timeout=0.0), "size": balance_by_size}


class Delay(nn.Module):
    def __init__(self, clock, seconds):
        super().__init__()
        self.clock, self.seconds = clock, seconds

    def __deepcopy__(self, memo):
        return self  # with its clock

    def forward(self, x):
        self.clock.now += self.seconds
        return x


def test_b2_by_time(monkeypatch):
    clock = wound(monkeypatch)
    model = nn.Sequential(*(Delay(clock, seconds) for seconds in (1, 2, 3, 4, 5, 6)))

    balance = balance_by_time(2, model, torch.rand(1), timeout=0.0)

    assert balance == [4, 2] and type(balance) is list
    assert GPipe(model, balance, devices=["cpu", "cpu"]).balance == [4, 2]


class Training(nn.Module):
    def forward(self, x):
        assert self.training
        return x


def test_b2_the_module_stays_as_it_is():
    model = nn.Sequential(nn.BatchNorm2d(3), Training()).eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}

    balance_by_time(1, model, torch.rand(1, 3, 4, 4), timeout=0.0)

    assert not any(module.training for module in model.modules())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_b2_each_round_begins_with_the_sample():
    model = nn.Sequential(nn.Conv2d(3, 2, 1), nn.Flatten(), nn.Linear(128, 10))

    assert sum(balance_by_time(2, model, torch.rand(10, 3, 8, 8), timeout=0.05)) == 3


class Twin(nn.Module):
    def forward(self, x):
        return x, x.detach()


class Add(nn.Module):
    def forward(self, a_and_b):
        a, b = a_and_b
        return a + b


@pytest.mark.parametrize("find", FINDS.values(), ids=FINDS)
def test_b2_tuples_and_outputs_without_grad(find):
    assert find(1, nn.Sequential(Twin(), Add()), torch.rand(1, requires_grad=True)) == [2]


@pytest.mark.parametrize("find", FINDS.values(), ids=FINDS)
def test_b2_gradients_are_refused(find):
    model = nn.Sequential(nn.Conv2d(3, 3, 1))
    sample = torch.rand(1, 3, 4, 4)
    model(sample).sum().backward()

    with pytest.raises(ValueError, match=r"some parameter already has gradient: '0\.weight'"):
        find(1, model, sample)


class Expand(nn.Module):
    def __init__(self, times):
        super().__init__()
        self.times = times

    def forward(self, x):
        for _ in range(self.times):
            x = x.exp()
        return x


def test_b3_by_size_on_any_device():
    # Each exp keeps its result: 1 + 2 + 3 + 4 against 5 + 6 times the sample's bytes.
    sample = torch.zeros(10, 10, requires_grad=True)

    assert balance_by_size(2, nn.Sequential(*map(Expand, (1, 2, 3, 4, 5, 6))), sample) == [4, 2]
    assert balance_by_size(2, nn.Sequential(*map(Expand, (6, 5, 4, 3, 2, 1))), sample) == [2, 4]


def test_b3_parameters_count_as_often_as_is_said():
    class Tradeoff(nn.Module):
        def __init__(self, parameters, times):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(parameters, 100))
            self.expand = Expand(times)

        def forward(self, x):
            return self.expand(x + self.weight.mean())

    model = nn.Sequential(*(Tradeoff(size, 7 - size) for size in (1, 2, 3, 4, 5, 6)))
    sample = torch.zeros(100, requires_grad=True)

    assert balance_by_size(2, model, sample, param_scale=0) == [2, 4]
    assert balance_by_size(2, model, sample, param_scale=100) == [4, 2]


@pytest.mark.parametrize("find", FINDS.values(), ids=FINDS)
def test_b1_partitions(find):
    with pytest.raises(ValueError, match=r"partitions must be a positive integer \(0 < 1\)"):
        find(0, nn.Sequential(nn.ReLU()), torch.rand(1))
    with pytest.raises(ValueError, match=r"sequence is shorter than intended partitions \(1 < 2\)"):
        find(2, nn.Sequential(nn.ReLU()), torch.rand(1))


@skippable(stash=["skip"])
class Stash(nn.Module):
    def forward(self, x):
        yield stash("skip", x)
        return x + 1


@skippable(pop=["skip"])
class Pop(nn.Module):
    def forward(self, x):
        return x + (yield pop("skip"))


@pytest.mark.parametrize("find", FINDS.values(), ids=FINDS)
def test_b4_skips_work(find):
    assert find(3, nn.Sequential(Stash(), nn.ReLU(), Pop()), torch.rand(1, requires_grad=True)) == [1, 1, 1]
