"""Steps with threads of their own: what those allocate is told, or it is said that it is not."""

from concurrent.futures import ThreadPoolExecutor
from threading import Event

import pytest
import torch
from torch import nn

import torchremat
from torchremat import Pipe, UnsupportedError


class Towers(nn.Module):
    """Two halves, each in a thread of a pool."""

    def __init__(self):
        super().__init__()
        self.left, self.right = (nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(2))

    def forward(self, x):
        with ThreadPoolExecutor(2) as pool:
            left, right = pool.map(lambda tower: tower(x), (self.left, self.right))
        return left + right


def pipe():
    layers = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    return Pipe(layers, [2, 2], devices=["cpu", "cpu"], chunks=2)


def loss_of(model):
    return model(torch.ones(8, 64)).square().mean()


CALLS = {
    "measure": lambda model: torchremat.measure(model, loss_of),
    "verify": lambda model: torchremat.verify(model, loss_of),
    "plan": lambda model: torchremat.plan(model, loss_of, budget="50%"),
    "fit": lambda model: torchremat.fit(model, loss_of, budget="50%"),
    "frontier": lambda model: torchremat.frontier(model, loss_of),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("model", [Towers, pipe])
def test_threads_of_the_steps_own_are_named(call, model):
    with pytest.raises(UnsupportedError, match=r"the step calls .* in a thread of its own\. .* in one thread"):
        CALLS[call](model())


def test_a_model_that_another_thread_trains_is_nobodys_business():
    model, ended = nn.Sequential(nn.Linear(64, 64), nn.ReLU()), Event()

    def train():
        other, steps = nn.Linear(64, 64), 0
        while not ended.is_set() or not steps:
            loss_of(other).backward()
            steps += 1

    with ThreadPoolExecutor(1) as pool:
        training = pool.submit(train)
        try:
            assert torchremat.measure(model, loss_of).peak_bytes > 0
        finally:
            ended.set()
        training.result()
