"""What is written in place between a stash and its pop."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from torchremat import MutationError, Pipe
from torchremat.pipeline.skip import pop, skippable, stash


@skippable(stash=["skip"])
class Stash(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        y = self.linear(x)
        yield stash("skip", y)
        return y


class Relu(nn.Module):
    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.in_place = in_place

    def forward(self, x):
        return x.relu_() if self.in_place else x.relu()


@skippable(pop=["skip"])
class Pop(nn.Module):
    def forward(self, x):
        skip = yield pop("skip")
        return x * skip


@pytest.mark.parametrize("mode", ["always", "except_last", "never"])
def test_a_stage_that_writes_to_what_another_has_stashed_raises(mode):
    pipe = Pipe(nn.Sequential(Stash(), Relu(True), Pop()), [1, 1, 1], devices=["cpu"] * 3, checkpoint=mode)

    # On one device no copy lies between: the skip would have the written values, without their gradient.
    with pytest.raises(MutationError, match="from stage 0 to stage 2 shares its memory"):
        pipe(torch.randn(8, 4))


def test_out_of_place_it_works():
    torch.manual_seed(0)
    layers = Stash(), Relu(False), Pop()
    x = torch.randn(8, 4)
    pipe = Pipe(nn.Sequential(*layers), [1, 1, 1], devices=["cpu"] * 3, checkpoint="always")

    pipe(x).sum().backward()
    found = layers[0].module.linear.weight.grad.clone()
    pipe.zero_grad()
    y = layers[0].module.linear(x)
    (y.relu() * y).sum().backward()

    assert torch.equal(found, layers[0].module.linear.weight.grad)
