"""Tensors that a forward writes past their version counters: put back, or an error that names them; never silent."""

import pytest
import torch
from torch import nn

from regions.comparing import leaf
from torchremat import MutationError, checkpoint

LARGE = 8192  # of 32 KiB: larger than what is copied each time


class Late(nn.Module):
    """Leaves its tensors alone in its first call."""

    def __init__(self, write):
        super().__init__()
        self.register_buffer("large", torch.ones(LARGE))
        self.weight = nn.Parameter(torch.ones(4))
        self.write, self.calls = write, 0

    def forward(self, x):
        self.calls += 1
        if self.calls > 1:
            self.write(self)
        return (x * self.large[:4] * self.weight).exp()


def by_data(module):
    module.large.data.add_(1)


def by_numpy(module):
    module.large.numpy()[:] += 1


def by_an_alias(module):
    module.large.data[:4] = 3.0


def outcome(call, write):
    model, x = Late(write), leaf(4)
    with torch.no_grad():
        x.copy_(torch.arange(4) / 4)
    for _ in range(3):
        call(model, x).sum().backward()
    return x.grad, model.weight.grad, model.large


@pytest.mark.parametrize("write", [by_data, by_numpy, by_an_alias])
def test_a_large_buffer_that_a_later_forward_writes(write):
    ours, plain = outcome(checkpoint, write), outcome(lambda model, x: model(x), write)

    assert all(map(torch.equal, ours, plain))


def in_place(module):
    module.weight.data.mul_(1.5)


def by_assignment(module):
    module.weight.data = module.weight.data * 1.5


@pytest.mark.parametrize("write", [in_place, by_assignment])
def test_a_parameter_is_an_error_before_it_is_written_again(write):
    model, x = Late(write), leaf(4)
    model(x)
    y = checkpoint(model, x).sum()
    before = model.weight.detach().clone()

    with pytest.raises(MutationError, match="its forward wrote `weight` in place"):
        y.backward()

    assert torch.equal(model.weight, before)


def test_tensors_of_no_module():
    small, large, x = torch.ones(4), torch.ones(LARGE), leaf(4)

    def body(x, tensor):
        tensor().data.add_(1)
        return (x * tensor()[:4]).exp()

    y = checkpoint(lambda x: body(x, lambda: small), x)
    y.sum().backward()
    assert torch.equal(x.grad, y.detach() * 2) and torch.equal(small, torch.full((4,), 2.0))
    with pytest.raises(MutationError, match="its forward wrote `large` in place"):
        checkpoint(lambda x: body(x, lambda: large), x).sum().backward()


def test_code_that_only_reads_data_goes_on():
    model, x = nn.Linear(4, 4), leaf(4)
    table = torch.ones(LARGE)

    checkpoint(lambda x: (model(x) * model.weight.data.norm() * table.data[:4]).exp(), x).sum().backward()

    assert x.grad is not None


def test_tensors_are_not_hashed_for_code_that_names_no_such_attribute(monkeypatch):
    hashed = []
    monkeypatch.setattr("torchremat.state.stamps.hash_here", hashed.append)
    model, x = nn.Linear(4, 4), leaf(4)

    checkpoint(lambda x: model(x).exp(), x).sum().backward()

    assert hashed == []
