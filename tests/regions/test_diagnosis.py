"""What the message for a recompute that is not its forward says, and that finding it out leaves no trace."""

import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from regions.comparing import leaf
from torchremat import CheckpointError, checkpoint, checkpointed, wrap

TOO_FEW = "A different number of tensors was saved during the original forward and recomputation"
TOO_MANY = "trying to save more tensors during recomputation than during the original forward pass"
METADATA = "Recomputed values for the following tensors have different metadata than during the forward pass"


def message(run):
    """The message of a forward and backward that fails, under 30 lines."""
    with pytest.raises(CheckpointError) as caught:
        run().sum().backward()
    text = str(caught.value)
    assert text.count("\n") + 1 < 30
    return text


class Between:
    """A forward whose backward finds something changed."""

    def __init__(self, function, change, *inputs, **options):
        self.function = function
        self.change = change
        self.inputs = inputs or (leaf(3, 4),)
        self.options = options

    def __call__(self):
        y = checkpointed(self.function, **self.options)(*self.inputs)
        self.change()
        return y


# --------------------------------------------------------------------------------------------------- torch's sentences


def test_too_few():
    flags = [True]

    def body(x):
        y = x.exp()
        return y.sin().tanh() if flags[0] else y.sin()

    text = message(Between(body, lambda: flags.__setitem__(0, False)))

    assert text.splitlines()[:3] == [
        f"region of test_too_few.<locals>.body: {TOO_FEW}.",
        "Number of tensors saved during forward: 3",
        "Number of tensors saved during recomputation: 2.",
    ]
    assert "The last operator that both ran:\n    aten.sin.default(float32[3, 4])\n" in text
    assert "the forward saved shape (3, 4), torch.float32, cpu, the recompute saved nothing" in text


def test_too_many():
    flags = [False]

    def body(x):
        y = x.exp()
        if flags[0]:
            y = y * y.cos()
        return y[:2].tanh()

    text = message(Between(body, lambda: flags.__setitem__(0, True), check="none", early_stop=False))

    assert text.splitlines()[:2] == [
        f"region of test_too_many.<locals>.body: {TOO_MANY}.",
        "Number of tensors saved during forward: 2",
    ]
    assert "First operator that differs, as the recompute runs it:\n    aten.cos.default(float32[3, 4])\n" in text
    assert "in test_too_many.<locals>.body: `y = y * y.cos()`" in text


def test_metadata():
    flags = [2]

    def body(x):
        return x.exp()[: flags[0]].sin()

    text = message(Between(body, lambda: flags.__setitem__(0, 1)))

    assert text.splitlines()[:4] == [
        f"region of test_metadata.<locals>.body: {METADATA}.",
        "tensor at position 1:",
        "saved metadata: {'shape': torch.Size([2, 4]), 'dtype': torch.float32, 'device': device(type='cpu')}",
        "recomputed metadata: {'shape': torch.Size([1, 4]), 'dtype': torch.float32, 'device': device(type='cpu')}",
    ]
    assert "    aten.sin.default(float32[1, 4])\n    at tests/regions/test_diagnosis.py:" in text


# -------------------------------------------------------------------------------------------------------------- causes


def test_a_cache_in_the_closure_that_grew():
    cache = []

    def body(x):
        cache.append(x.detach())
        return torch.cat([x, *cache]).exp()

    text = message(lambda: checkpoint(body, leaf(3, 4)))

    assert "Likely cause: `cache` changes each time that the region runs: 2 items before, 3 items after." in text
    assert "`guard=[...]`" in text
    assert len(cache) == 2


def test_a_counter_of_a_module():
    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.calls = 0

        def forward(self, x):
            self.calls += 1
            return x[: self.calls].exp()

    model = nn.Sequential(nn.Identity(), Counts())
    wrap(model, "1")

    text = message(lambda: model(leaf(3, 4)))

    assert text.startswith(f"region 1: {METADATA}")
    assert "aten.exp.default(float32[3, 4]) in `1`" in text
    assert "Likely cause: `1.calls` changes each time that the region runs: 2 before, 3 after." in text
    assert model[1].calls == 2


def test_a_flag_that_was_flipped_where_the_region_cannot_see():
    hidden = {"net": nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))}

    def body(x):
        return hidden["net"](x).sin()

    text = message(Between(body, hidden["net"].eval))

    assert (
        "Likely cause: train/eval was flipped: a Sequential, which the region cannot see, is in eval mode now" in text
    )
    assert not hidden["net"].training
    assert not hidden["net"][1].training


@pytest.mark.parametrize(("then", "now"), [(True, False), (False, True)])
def test_a_flag_of_dropout(then, now):
    flags = {"training": then}

    def body(x):
        return F.dropout(x.exp(), 0.5, flags["training"]).sin()

    text = message(Between(body, lambda: flags.update(training=now), check="none", early_stop=False))

    assert ("dropout, batch norm or another random operator ran in the recompute alone" in text) == now


def test_autocast_by_a_flag():
    flags = {"on": True}

    def body(x):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=flags["on"]):
            return (x @ x.t()).sin()

    text = message(Between(body, lambda: flags.update(on=False)))

    assert "autocast: the forward saved torch.bfloat16, the recompute torch.float32" in text


def test_a_dtype_by_a_flag():
    flags = {"dtype": torch.float64}

    def body(x):
        return x.to(flags["dtype"]).exp()

    text = message(Between(body, lambda: flags.update(dtype=torch.float32)))

    assert "the dtype: the forward saved torch.float64, the recompute torch.float32" in text


def test_a_branch_on_data():
    x = leaf(3, 4)
    x.data.abs_()

    def body(x):
        return x.exp().tanh() if x.sum().item() > 0 else x.cos()

    text = message(Between(body, x.data.neg_, x, early_stop=False))

    assert (
        "Likely cause: a branch on data: aten._local_scalar_dense.default at tests/regions/test_diagnosis.py:" in text
    )


@pytest.mark.parametrize(
    ("draw", "seed", "entry"),
    [(random.random, random.seed, "python_random"), (np.random.rand, np.random.seed, "numpy_random")],
)
def test_random_draws_that_torch_knows_nothing_of(draw, seed, entry):
    def body(x):
        return x[: 1 + int(draw() * 1000)].exp()

    seed(0)

    text = message(lambda: checkpoint(body, leaf(1000)))

    assert f"which a recompute restores only if `torchremat.extend.{entry}` is registered" in text


def test_a_generator_in_the_closure():
    generator = torch.Generator()

    def body(x):
        return x[: torch.randint(1, 1000, (), generator=generator).item()].exp()

    text = message(lambda: checkpoint(body, leaf(1000)))

    assert "Likely cause: the region draws from the generator `generator`, which it does not get as an argument" in text


def test_a_generator_that_is_not_preserved():
    def body(x):
        return x[: torch.randint(1, 1000, ()).item()].exp()

    text = message(lambda: checkpointed(body, preserve_rng=False)(leaf(1000)))

    assert "the region draws from torch's default generator of cpu, and `preserve_rng=False`" in text


def test_a_global_counter_that_nobody_sees():
    turns = iter(range(1, 10))

    def body(x):
        return x[: next(turns)].exp()

    text = message(lambda: checkpoint(body, leaf(9)))

    assert "Likely cause: each run does something else" in text


def test_what_is_not_found_says_where_to_look(monkeypatch):
    monkeypatch.setenv("ROWS", "2")

    def body(x):
        import os

        return x[: int(os.environ["ROWS"])].exp()

    text = message(Between(body, lambda: monkeypatch.setenv("ROWS", "1")))

    assert "Likely cause: not found. What the function reads besides its arguments" in text
