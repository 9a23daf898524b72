"""Generators: wherever a region reaches them, the recompute draws the same, and they are left as they were."""

import functools

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from regions.comparing import backward_at_once, leaf
from torchremat import checkpoint, checkpointed

of_module = torch.Generator()


def noise(generator):
    return torch.rand(64, generator=generator)


def by_global_name(x):
    return x.exp() * noise(of_module)


class Noisy(nn.Module):
    def __init__(self, generator):
        super().__init__()
        self.generator = generator

    def forward(self, x):
        return x.exp() * noise(self.generator)

    def other(self, x):
        return self(x)


class Holder:
    def __init__(self, generator):
        self.generator = generator

    def run(self, x):
        return x.exp() * noise(self.generator)


class Slotted:
    __slots__ = ("generator",)

    def __init__(self, generator):
        self.generator = generator


def places(g):
    """Return a call of something for each place that a generator may be in."""
    holder = Holder(g)
    return {
        "argument": lambda call, x: call(lambda x, g: x.exp() * noise(g), x, g),
        "keyword": lambda call, x: call(lambda x, g: x.exp() * noise(g), x, g=g),
        "container": lambda call, x: call(lambda x, more: x.exp() * noise(more["a"][0]), x, {"a": [g]}),
        "attribute": lambda call, x: call(lambda x, one: x.exp() * noise(one.generator), x, holder),
        "slot": lambda call, x: call(lambda x, one: x.exp() * noise(one.generator), x, Slotted(g)),
        "closure": lambda call, x: call(lambda x: x.exp() * noise(g), x),
        "default": lambda call, x: call(lambda x, g=g: x.exp() * noise(g), x),
        "keyword default": lambda call, x: call(lambda x, *, g=g: x.exp() * noise(g), x),
        "partial": lambda call, x: call(functools.partial(lambda g, x: x.exp() * noise(g), g), x),
        "self": lambda call, x: call(holder.run, x),
        "module": lambda call, x: call(Noisy(g), x),
        "inner module": lambda call, x: call(nn.Sequential(nn.Identity(), Noisy(g)), x),
        "method of a module": lambda call, x: call(Noisy(g).other, x),
        "guard": lambda call, x: (
            checkpointed(holder_in_a_list([holder]), guard=[g])(x)
            if call is checkpoint
            else holder_in_a_list([holder])(x)
        ),
    }


def holder_in_a_list(holders):
    return lambda x: holders[0].run(x)


@pytest.mark.parametrize("place", places(torch.Generator()))
def test_a_generator_is_found(place):
    g = torch.Generator()
    x = leaf(64)

    def run(call):
        g.manual_seed(0)
        y = places(g)[place](call, x).sum()
        state = g.get_state()
        noise(g)  # somebody else draws in between
        moved = g.get_state()
        (grad,) = torch.autograd.grad(y, x)
        return grad, torch.equal(g.get_state(), moved) and not torch.equal(state, moved)

    (ours, is_left), (plain, _) = run(checkpoint), run(lambda f, *args, **kwargs: f(*args, **kwargs))

    assert torch.equal(ours, plain)
    assert is_left


def test_a_global_generator():
    x = leaf(64)
    of_module.manual_seed(0)
    ours = torch.autograd.grad(checkpoint(by_global_name, x).sum(), x)[0]
    of_module.manual_seed(0)

    assert torch.equal(ours, torch.autograd.grad(by_global_name(x).sum(), x)[0])


def test_a_generator_with_which_nobody_draws_is_not_kept():
    from probes.regions import Region, Settings

    region = Region(Settings())
    generator = torch.Generator()
    region.call(lambda x, _: x.exp(), (leaf(3), generator), {}, [])

    assert region.calls[0].generators == {}


def test_backward_in_several_threads_draws_what_each_forward_drew():
    # The default generator is one for all threads: recomputes that draw take turns.
    xs = [leaf(200_000) for _ in range(4)]

    def body(x):
        return F.dropout(F.dropout(x.exp(), 0.5).sin(), 0.5).cos()

    torch.manual_seed(0)
    plain = [torch.autograd.grad(y, x)[0] for x, y in [(x, body(x).sum()) for x in xs]]
    torch.manual_seed(0)
    outputs = [checkpoint(body, x).sum() for x in xs]
    state = torch.get_rng_state()
    backward_at_once(outputs)

    assert [torch.equal(x.grad, grad) for x, grad in zip(xs, plain, strict=True)] == [True] * 4
    assert torch.equal(torch.get_rng_state(), state)
