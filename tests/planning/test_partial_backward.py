"""A unit that holds some of what it saves recomputes in the midst of its backward: what each piece of a step needs."""

import random
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import pairwise
from weakref import WeakKeyDictionary

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import decoders
import mixtures
import models
import zoo
from planning.kinds import KINDS
from planning.steps import CPU, differences, in_parts, outcome, profile, random_tree, under, with_cuts
from planning.test_options import in_place
from probes.memory import record_allocations, run_backward, subject_of
from probes.planning import (
    KeepNode,
    Live,
    MemorySimulator,
    ProfilePair,
    ProgramPoint,
    RegionNode,
    calls_of,
    divisible,
    evaluate,
    fitted,
    flow_of,
    held_of,
    installed,
    kept,
    mix,
    options_of,
    options_with,
    over_bytes,
)
from probes.regions import Observer, Settings


@dataclass
class Recomputes(Observer):
    """An observer that marks where recomputes begin and end.

    What a recompute recomputes around it is in the same piece, and a backward until the last part of a unit is one.
    """

    mark: object
    marks: list[int] = field(default_factory=list)
    begun: WeakKeyDictionary = field(default_factory=WeakKeyDictionary)  # by region, how many there were
    running: list[bool] = field(default_factory=list)  # whether each of them is marked

    def recomputing(self, region):
        self.begun[region] = self.begun.get(region, -1) + 1
        self.running.append(not any(self.running) and self.begun[region] >= len(region.settings.cuts))
        if self.running[-1]:
            self.marks.append(self.mark("recomputing"))

    def recomputed(self, region):
        if self.running.pop():
            self.marks.append(self.mark("recomputed"))


def measured_pieces(model, step, own, tree):
    """Highest bytes of the forward, and of backward before, in and after each recompute in turn."""
    subject = subject_of(step, model, None)
    with subject.untouched(), record_allocations(CPU) as recorder:
        watching = Recomputes(recorder.mark)
        with installed(model, calls_of(own.units), tree, Settings(observer=watching), held_of(own, tree)):
            begins = recorder.mark("begins")
            loss = subject.forward()
            forward = recorder.mark("forward")
            run_backward(loss)
            ends = recorder.mark("ends")
            del loss
    marks = [begins, forward, *watching.marks, ends]
    return [recorder.trace.peak_bytes_between(*pair) for pair in pairwise(marks)]


def predicted_pieces(own, tree):
    """The same, predicted."""
    pieces, running = [own.start_bytes], None
    for state in MemorySimulator(own.units, own.sizes, own.order, own.lifetimes, tree, own.options):
        if not isinstance(state, Live):
            continue
        # What runs before a recompute in the backward of its unit is no part of it.
        now = state.key if state.key[0] is ProgramPoint.RECOMPUTE and state.unit >= 0 else None
        if state.key[0] is ProgramPoint.END or now != running:
            pieces.append(0)
        running = now
        pieces[-1] = max(pieces[-1], own.extra_bytes[state.key] + state.held_bytes + over_bytes(own, state))
    return pieces


# ------------------------------------------------------------------------------------------------------------- by hand

SIDE = 64
ONE = 4 * SIDE * SIDE  # bytes of a tensor


class Chain(nn.Module):
    """Saves what each of its last four operators returns."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return (x * self.scale).tanh().sigmoid().exp().sigmoid()


class Narrowing(nn.Module):
    """Its gradient becomes wide again before any tensor is asked for that it saves early."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x):
        wide = x * self.scale
        wide = (wide + wide.flip(0) + wide.flip(1)).tanh()
        return wide[:, :1].exp()


def with_option(module, held):
    """A model of one unit, its step and the profile in which that unit may hold the outputs of some operators."""
    torch.manual_seed(0)
    model, x = nn.Sequential(module), torch.randn(SIDE, SIDE)

    def step(model):
        return model(x).sum()

    own = profile(model, step).blocks
    (options,) = options_with([own], ((evaluate(flow_of(own, 0), held),),), "flops")
    return model, step, replace(own, options=options)


def test_what_is_not_held_is_not_there_until_it_is_asked_for():
    # It was taken to be recomputed when the unit's backward begins: 5 tensors then, the four saved and a gradient.
    model, step, own = with_option(Chain(), {3, 4})
    loss = 4 + 4  # and its gradient

    _, *measured = measured_pieces(model, step, own, (KeepNode(0, 1),))

    # The last two and a gradient; one of them and a gradient, and a product and its tanh, of which the product goes;
    # two saved tensors and the gradients before and behind one of them.
    assert measured == [3 * ONE + loss, 3 * ONE + loss, 4 * ONE + loss]
    assert predicted_pieces(own, (KeepNode(0, 1),))[1:] == measured


def test_gradients_on_their_way_are_there_during_a_recompute():
    # It was taken to begin with the narrow gradient that comes to the unit: the peak was a tensor above the prediction.
    model, step, own = with_option(Narrowing(), {7})

    _, *measured = measured_pieces(model, step, own, (KeepNode(0, 1),))

    # The wide gradient, and of the sum: its first term, the sum of two, the third term, the result.
    assert measured[1] == 5 * ONE + 4 + 4
    assert predicted_pieces(own, (KeepNode(0, 1),))[1:] == measured


class KeepsIt(torch.autograd.Function):
    """The exponential, with its result as an attribute of the context, of which no hook knows."""

    @staticmethod
    def forward(ctx, x):
        ctx.result = x.exp()
        return ctx.result.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.result


class Hidden(nn.Module):
    """Its graph keeps a tensor in a context, and twice a number in a tensor of 8 bytes."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return (KeepsIt.apply(2 * x * self.scale) * 0.1).tanh() * 0.5


class Conditional(nn.Module):
    """Its graph keeps a tensor that it also saves through hooks."""

    def __init__(self):
        super().__init__()
        self.wide, self.narrow = nn.Linear(SIDE, 4 * SIDE), nn.Linear(4 * SIDE, SIDE)

    def forward(self, x):
        y = self.wide(x)
        return self.narrow(torch.cond(y.sum() > 0, torch.sin, torch.cos, (y,)))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_what_graphs_keep_and_hooks_save_is_there_once():
    torch.manual_seed(0)
    model, x = nn.Sequential(*(Conditional() for _ in range(4))), torch.randn(SIDE, SIDE)
    own = profile(model, lambda model: model(x).sum()).blocks
    tree = (KeepNode(0), RegionNode((KeepNode(1), KeepNode(2))), KeepNode(3))

    _, *measured = measured_pieces(model, lambda m: m(x).sum(), own, tree)

    assert predicted_pieces(own, tree)[1:] == measured


def test_what_graphs_keep_without_a_hook_is_there_in_a_recompute_of_several_units():
    # Each of these was taken to be there in the forward alone: the peak was a tensor and 24 bytes above the prediction
    # for each unit that the recompute passes.
    torch.manual_seed(0)
    model, x = nn.Sequential(*(Hidden() for _ in range(4))), torch.randn(SIDE, SIDE)
    own = profile(model, lambda model: model(x).sum()).blocks
    units = [KeepNode(unit) for unit in range(4)]
    trees = [(RegionNode(tuple(units)),), (units[0], RegionNode((units[1], RegionNode((units[2],)), units[3])))]

    pieces = [(measured_pieces(model, lambda m: m(x).sum(), own, one), predicted_pieces(own, one)) for one in trees]

    assert [size.graph_bytes for size in own.sizes] == [ONE + 2 * 8, *[ONE + 3 * 8] * 3]
    assert [measured[1:] for measured, _ in pieces] == [predicted[1:] for _, predicted in pieces]


# ---------------------------------------------------------------------------------------------------------- all models


def llama():
    torch.manual_seed(0)
    sizes = {"blocks": 3, "width": 32, "heads": 4, "key_heads": 2, "vocabulary": 64}
    tokens_bt = torch.randint(64, (2, 33))
    model = decoders.Decoder(decoders.Config(**sizes, hidden=96))
    return model, lambda m: F.cross_entropy(m(tokens_bt[:, :-1]).flatten(0, 1), tokens_bt[:, 1:].flatten())


def experts():
    torch.manual_seed(0)
    sizes = {"blocks": 3, "width": 32, "heads": 4, "key_heads": 2, "vocabulary": 64}
    tokens_bt = torch.randint(64, (2, 33))
    model = mixtures.Mixture(mixtures.MixtureConfig(**sizes, hidden=64))
    return model, lambda m: mixtures.mixture_loss(m, tokens_bt=tokens_bt)


MODELS = {
    "gpt dropout": lambda: models.gpt_step(blocks=3, width=32, context=32, batch=2, vocabulary=64, dropout=0.1),
    "unet": lambda: models.unet_step(batch=1, size=32, width=8),
    "resnet": lambda: models.resnet_step(batch=4, size=16, width=8),
    "in place": in_place,
    "llama": llama,
    "experts": experts,
    "t5": lambda: zoo.t5(blocks=2, width=32),
    "vit": lambda: zoo.vit(blocks=3, width=32),
    "attention": KINDS["attention"],
    "transformer": KINDS["transformer"],
    "recurrent": KINDS["recurrent"],
}


# No memory of theirs is saved on one side of a cut alone.
NOT_IN_PARTS = {"resnet", "in place"}


def random_options(own, rng):
    """A tree in which units with options have one of them, and others are kept or recomputed."""
    picks = [rng.randint(0, len(options)) for options in own.options]
    nodes = (KeepNode(unit, pick) for unit, pick in enumerate(picks))
    return fitted(
        own.units, tuple(node if node.option or rng.random() < 0.6 else RegionNode((node,)) for node in nodes)
    )


@cache
def profiled(name):
    """A model, its step, their profile, and what the plain step gives."""
    model, step = MODELS[name]()
    return model, step, profile(model, step), outcome(model, step)


@pytest.mark.parametrize("name", MODELS)
def test_each_piece_of_a_step_is_predicted(name):
    model, step, pair, plain = profiled(name)
    blocks = replace(pair.blocks, options=options_of(pair.blocks, "flops"))
    profiles = [blocks]
    if pair.leaves is not None:
        leaves = replace(pair.leaves, options=options_of(pair.leaves, "flops"))
        split = sorted(divisible(pair))[::2]
        profiles.append(mix(ProfilePair(blocks=blocks, leaves=leaves), frozenset(split)))
    rng = random.Random(0)

    pieces = []
    for own in profiles * 2:
        tree = random_options(own, rng)
        pieces += zip(measured_pieces(model, step, own, tree), predicted_pieces(own, tree), strict=True)
        with under(model, own, tree):
            assert differences(outcome(model, step), plain) == []

    assert [pair for pair in pieces if not pair[0] <= pair[1] <= 1.01 * pair[0]] == []
    assert sum(measured == predicted for measured, predicted in pieces) >= 0.8 * len(pieces)


@pytest.mark.parametrize("name", MODELS)
def test_each_piece_of_a_step_with_recomputes_in_parts_is_predicted(name):
    model, step, pair, plain = profiled(name)
    profiles = [pair.blocks] if pair.leaves is None else [pair.blocks, pair.leaves]
    rng = random.Random(0)

    pieces, several = [], 0
    for own in profiles * 2:
        own = with_cuts(own)
        tree = in_parts(own, random_tree(own.units, rng), rng)
        several += sum(bool(keep.option) for keep in kept(tree))
        pieces += zip(measured_pieces(model, step, own, tree), predicted_pieces(own, tree), strict=True)
        with under(model, own, tree):
            assert differences(outcome(model, step), plain) == []

    assert several or name in NOT_IN_PARTS
    assert [pair for pair in pieces if not pair[0] <= pair[1] <= 1.01 * pair[0]] == []
    assert sum(measured == predicted for measured, predicted in pieces) >= 0.8 * len(pieces)
