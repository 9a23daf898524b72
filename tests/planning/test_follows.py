"""The executor does, event by event, what the simulator says, on random trees over models of every kind."""

import random

import pytest
import torch
from torch import nn

from planning.following import executed, first_difference, simulated
from planning.kinds import KINDS, SEVERAL_ROOTS, WIDTH, block, inputs, linear, square
from planning.steps import mixtures, random_tree, text
from probes.memory import run_backward

PARTS = {
    "linear": linear,
    "block": block,
    "dropout": lambda: nn.Dropout(0.1),
    "norm": lambda: nn.LayerNorm(WIDTH),
    "frozen": lambda: linear().requires_grad_(False),
    "in place": lambda: nn.Sequential(linear(), nn.ReLU(inplace=True)),
}
GLUE = {
    "nothing": lambda x, first: x,
    "skip": lambda x, first: x + first,
    "wave": lambda x, first: x.sin(),
    "view": lambda x, first: x.view(-1, 2, WIDTH).flatten(0, 1),
    "in place": lambda x, first: (x * 1).add_(1),
    "half": lambda x, first: torch.cat([x[:, :32], first[:, 32:]], 1),
}


class Made(nn.Module):
    """Parts in a row, with code between them."""

    def __init__(self, rng):
        super().__init__()
        self.parts = nn.ModuleList(rng.choice([*PARTS.values()])() for _ in range(rng.randint(4, 8)))
        self.parts.append(linear())  # something is trained
        self.inter_call = [rng.choice([*GLUE.values()]) for _ in self.parts]
        self.skips = [rng.random() < 0.3 for _ in self.parts]

    def forward(self, x):
        first = x
        for part, inter_call, skips in zip(self.parts, self.inter_call, self.skips, strict=True):
            first = x if skips else first
            x = inter_call(part(x), first)
        return x


def check(model, step, rng):
    """Run random trees, with whole units and with all that can be split apart."""
    for profile in mixtures(model, step, rng, 0):
        for _ in range(3):
            tree = random_tree(profile.units, rng)

            ours = executed(lambda: run_backward(step(model)), model, profile, tree)

            assert any(event.startswith("hold") for event in ours) or "(" not in text(tree)
            assert not (found := first_difference(ours, simulated(profile, tree))), f"{text(tree)}\n{found}"


# Regions of several calls of a root have the same names, so what each of them does is not told apart.
@pytest.mark.parametrize("name", sorted(KINDS.keys() - SEVERAL_ROOTS))
def test_a_step_is_what_the_simulator_says(name):
    model, step = KINDS[name]()

    check(model, step, random.Random(name))


@pytest.mark.parametrize("seed", range(12))
def test_a_step_of_a_random_model_is_what_the_simulator_says(seed):
    torch.manual_seed(seed)
    rng, x = random.Random(seed), inputs()
    model = Made(rng)

    check(model, lambda model: square(model(x)), rng)


def test_a_difference_is_told_where_it_arises():
    ours = ["hold 0-1/1 at 0: 3", "recompute 0-1/1", "run 0", "run 1, cut", "backward 1"]
    theirs = ["hold 0-1/1 at 0: 3", "recompute 0-1/1", "run 0, cut", "backward 1"]

    assert first_difference(ours, ours) == ""
    found = first_difference(ours, theirs)
    assert found.startswith("after 2 equal events")
    assert "the executor:  ['run 0', 'run 1, cut'" in found
    assert "the simulator: ['run 0, cut'" in found
