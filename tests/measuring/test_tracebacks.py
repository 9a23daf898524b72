"""An error of a user's step is shown as the plain step shows it; one of ours at the line that called us."""

import traceback

import numpy as np
import pytest
import torch
from torch import nn

import torchremat
from probes.memory import OURS, without_our_frames
from torchremat import Adaptive, Planner, StepError, fit, frontier, guard, measure, plan, saved, verify
from torchremat.errors import bug


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return self.linear(x)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def guarded(model, step):
    with guard(model, step) as run:
        run()


CALLS = {
    "plan": lambda m, s: plan(m, s, budget="90%"),
    "fit": lambda m, s: fit(m, s, budget="90%"),
    "frontier": frontier,
    "Planner": Planner,
    "verify": verify,
    "measure": lambda m, s: measure(m, s),
    "saved": lambda m, s: saved(m, s),
    "Adaptive": lambda m, s: Adaptive(m, lambda m, _: s(m), budget="1GiB")(torch.zeros(1)),
    "learn": lambda m, s: Adaptive(m, lambda m, _: s(m), budget="1GiB").learn(torch.zeros(1)),
    "guard": guarded,
}


@pytest.fixture(autouse=True)
def _shortened(monkeypatch):
    monkeypatch.delenv("TORCHREMAT_FULL_TRACEBACKS", raising=False)


def frames(error):
    return traceback.extract_tb(error.__traceback__)


def ours(error):
    return [one for one in frames(error) if one.filename.startswith(OURS)]


@pytest.mark.parametrize("call", CALLS)
def test_the_frames_of_a_users_error_are_those_of_the_plain_step(call):
    # 39 frames, of which 24 were ours.
    model = Net()

    def step(model):
        return model(torch.zeros(2, 7)).sum()

    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as plain:
        step(model)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as found:
        CALLS[call](model, step)

    assert ours(found.value) == []
    own = [one.name for one in frames(found.value) if one.filename == __file__]
    assert (
        own[-3:]
        == ["step", "forward", "forward"]
        == [one.name for one in frames(plain.value) if one.filename == __file__][1:]
    )


@pytest.mark.parametrize("call", CALLS)
def test_an_error_of_ours_ends_at_the_line_of_the_caller(call):
    with pytest.raises(StepError, match="returned None") as found:
        CALLS[call](Net(), lambda model: None)

    assert ours(found.value) == []
    assert frames(found.value)[-1].filename == __file__ or call == "guard"


def test_what_an_error_came_from_is_shortened_too():
    batches = iter([torch.zeros(2, 8)])

    with pytest.raises(StepError, match="ended") as found:
        measure(Net(), lambda model: model(next(batches)).sum())

    assert isinstance(found.value.__cause__, StopIteration)
    assert ours(found.value.__cause__) == []


def test_all_frames_are_there_if_the_environment_says_so(monkeypatch):
    monkeypatch.setenv("TORCHREMAT_FULL_TRACEBACKS", "1")

    with pytest.raises(StepError) as found:
        measure(Net(), lambda model: None)

    assert len(ours(found.value)) > 2


def test_an_error_that_is_a_bug_keeps_its_frames(monkeypatch):
    def broken(*_, **__):
        raise bug("2 is not 3")

    broken.__code__ = broken.__code__.replace(co_filename=f"{OURS}broken.py")

    with pytest.raises(AssertionError, match="This is a bug in torchremat") as found:
        without_our_frames(broken)()

    assert [one.filename for one in ours(found.value)][-1].endswith("broken.py")


def test_a_bug_that_ends_in_numpy_keeps_its_frames():
    def broken(*_, **__):
        return np.zeros(0).max()

    broken.__code__ = broken.__code__.replace(co_filename=f"{OURS}broken.py")

    with pytest.raises(ValueError, match="zero-size array") as found:
        without_our_frames(broken)()

    assert [one.filename for one in ours(found.value)][-1].endswith("broken.py")


def test_the_signatures_are_those_of_the_functions():
    assert torchremat.plan.__doc__.startswith("Return the fastest plan")
    assert torchremat.plan.__name__ == "plan"
