"""Kinds of devices that are there and not used, or that lack what others have."""

import pytest
import torch
from torch import nn

import torchremat
from probes.memory import accelerators
from probes.regions import calls
from torchremat import Pipe, UnsupportedError


@pytest.fixture
def on_a_mac(monkeypatch):
    """A machine whose accelerator is MPS, and a program that computes on its CPU."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: torch.device("mps"))
    monkeypatch.setattr(calls, "_ACCELERATED", True)


@pytest.mark.usefixtures("on_a_mac")
def test_a_device_that_nobody_uses_is_asked_for_nothing():
    # A region asked for the state of its generator, which MPS gives in another way: a TypeError.
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)), torch.randn(4, 4, requires_grad=True)
    torch.manual_seed(0)
    expected = torch.autograd.grad(model(x).sum(), x)
    torch.manual_seed(0)

    assert torch.equal(*torch.autograd.grad(torchremat.checkpoint(model, x).sum(), x), *expected)
    assert torchremat.measure(model, lambda model: model(x).sum()).device == torch.device("cpu")
    assert Pipe(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), [1, 1]).devices == [torch.device("cpu")] * 2


def test_what_a_kind_lacks_is_said_by_name():
    with pytest.raises(UnsupportedError, match="memory is counted on cpu and cuda, not on mps"):
        accelerators.accelerator_of(torch.device("mps")).counters(torch.device("mps"))
