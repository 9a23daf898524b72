"""The executor does, event by event, what the simulator says, on random trees over models of every kind."""

import random
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

from planning.following import executed, first_difference, simulated
from planning.kinds import KINDS, SEVERAL_ROOTS, WIDTH, block, inputs, linear, square
from planning.steps import in_parts, mixtures, profile, random_loads, random_tree, text, with_cuts, with_declared_speed
from probes.memory import run_backward, subject_of
from probes.planning import KeepNode, divisible, mix, options_of, weighed
from stages.test_split_microbatch import GRAD, STAGES, forward
from torchremat import Host, Session, session
from torchremat._compat.pipelining import run_input_pass
from torchremat.stages.samples import receive
from torchremat.stages.split_microbatch import SplitBackward
from turns import in_turn

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
    for own in mixtures(model, step, rng, 0):
        for _ in range(3):
            tree = random_tree(own.units, rng)

            ours = executed(lambda: run_backward(step(model)), model, own, tree)

            assert any(event.startswith("hold") for event in ours) or "(" not in text(tree)
            assert not (found := first_difference(ours, simulated(own, tree))), f"{text(tree)}\n{found}"


# Regions of several calls of a root have the same names, so what each of them does is not told apart.
@pytest.mark.parametrize("name", sorted(KINDS.keys() - SEVERAL_ROOTS))
def test_a_step_is_what_the_simulator_says(name):
    model, step = KINDS[name]()

    check(model, step, random.Random(name))


@in_turn("seed", range(12))
def test_a_step_of_a_random_model_is_what_the_simulator_says(seed):
    torch.manual_seed(seed)
    rng, x = random.Random(seed), inputs()
    model = Made(rng)

    check(model, lambda model: square(model(x)), rng)


@pytest.mark.parametrize("name", ["loop", "sequential in place", "attention", "shared weights"])
def test_a_step_with_a_store_is_what_the_simulator_says(name):
    model, step = KINDS[name]()
    pair, rng = profile(model, step), random.Random(name)
    with with_declared_speed():
        [stored] = weighed(model, subject_of(step, model, None), pair, [Host()])
    profiles, events = [pair.blocks, mix(pair, frozenset(divisible(pair)))], []

    for own in profiles * 3:
        tree = random_tree(own.units, rng, depth=1)
        offloads = random_loads(own, stored, tree, rng)
        transfers = {unit: choice.planned.transfer for unit, choice in offloads.items()}

        ours = executed(lambda: run_backward(step(model)), model, own, tree, transfers)

        assert not (found := first_difference(ours, simulated(own, tree, offloads))), f"{text(tree)}\n{found}"
        events += ours

    assert any(event.startswith("bring") for event in events)


@pytest.mark.parametrize("name", ["loop", "sequential in place", "attention", "transformer"])
def test_operators_that_are_held_are_what_the_simulator_says(name):
    model, step = KINDS[name]()
    own, rng = profile(model, step).blocks, random.Random(name)
    own = replace(own, options=options_of(own, "flops"))

    for _ in range(4):
        tree = tuple(KeepNode(unit, rng.randint(0, len(options))) for unit, options in enumerate(own.options))

        ours = executed(lambda: run_backward(step(model)), model, own, tree)

        assert not (found := first_difference(ours, simulated(own, tree))), f"{tree}\n{found}"


@pytest.mark.parametrize("within", [nullcontext, partial(session, 1)], ids=["alone", "session"])
@pytest.mark.parametrize("name", ["attention", "encoder layers", "loop", "transformer"])
def test_recomputes_in_parts_are_what_the_simulator_says(name, within):
    model, step = KINDS[name]()
    pair, rng, runs = profile(model, step), random.Random(name), []

    def run():
        with within():
            run_backward(step(model))

    for own in map(with_cuts, [pair.blocks, *([pair.leaves] if pair.leaves else [])] * 3):
        tree = in_parts(own, random_tree(own.units, rng), rng)

        ours = executed(run, model, own, tree)

        assert not (found := first_difference(ours, simulated(own, tree))), f"{tree}\n{found}"
        runs += [Counter(event for event in ours if event.endswith(", cut")).most_common(1)]

    assert any(most and most[0][1] > 1 for most in runs)


@pytest.mark.parametrize("name", ["loop", "sequential in place", "attention", "transformer"])
def test_regions_that_are_recomputed_ahead_are_what_the_simulator_says(name):
    model, step = KINDS[name]()
    rng = random.Random(name)

    def run():
        session = Session(serves_all=True)
        with session.active():
            loss = step(model)
        session.recompute(1000)
        session.passes = 1
        with session.active():
            run_backward(loss)
        session.close()

    for own in map(with_cuts, mixtures(model, step, rng, 0) * 2):
        tree = in_parts(own, random_tree(own.units, rng), rng)

        ours = executed(run, model, own, tree)

        assert not (found := first_difference(ours, simulated(own, tree, ahead=True))), f"{text(tree)}\n{found}"


@pytest.mark.parametrize("ahead", [False, True], ids=["asked for", "ahead"])
@pytest.mark.parametrize("name", STAGES)
def test_the_input_part_of_a_backward_is_what_the_simulator_says(name, ahead):
    torch.manual_seed(0)
    module, rng = STAGES[name](), random.Random(name)
    pair = profile(module, lambda module: receive(forward(module).outputs[0], held=True, grads=[GRAD]))
    split = SplitBackward(module, forward, pair)
    sessions, events = [], []

    def run():
        sessions.append(session := Session(serves_all=ahead))
        with session.active():
            ends = forward(module)
        session.recompute(1000 if ahead else 0)
        with session.active(), session.input_pass() if name != "tied" else nullcontext():
            return ends, run_input_pass(ends.roots, ends.grads, ends.inputs, ends.outputs, module)

    for whole in (pair.blocks, mix(pair, frozenset(divisible(pair)))) * 4:
        (own,) = split._mixtures.like(whole.units)
        tree = random_tree(own.units, rng)

        ours = executed(run, module, own, tree)
        sessions.pop().close()

        # Tensors go one by one here, and those that weights need go later: `tests/stages/test_split_microbatch.py` has
        # their bytes.
        ours, theirs = (
            [event for event in told if not event.startswith("drop")]
            for told in (ours, simulated(own, tree, ahead=ahead, split=True))
        )
        assert not (found := first_difference(ours, theirs)), f"{text(tree)}\n{found}"
        events += ours

    assert {event.partition(" ")[0] for event in events} >= {"hold", "recompute", "run", "backward"}


def test_a_difference_is_told_where_it_arises():
    ours = ["hold 0-1/1 at 0: 3", "recompute 0-1/1", "run 0", "run 1, cut", "backward 1"]
    theirs = ["hold 0-1/1 at 0: 3", "recompute 0-1/1", "run 0, cut", "backward 1"]

    assert first_difference(ours, ours) == ""
    found = first_difference(ours, theirs)
    assert found.startswith("after 2 equal events")
    assert "the executor:  ['run 0', 'run 1, cut'" in found
    assert "the simulator: ['run 0, cut'" in found
