"""What a recompute sees of its surroundings: generators, autocast, default device."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from logs import Log
from probes.regions import drawn, generator_states
from regions.comparing import leaf, live_regions, same
from torchremat import checkpoint, checkpointed


def test_dropout_draws_the_same_again():
    x = leaf(64)

    def body(x):
        return F.dropout(F.dropout(x.exp(), 0.5).sin(), 0.3).cos()

    assert same(lambda: checkpoint(body, x), lambda: body(x), [x])


def test_a_recompute_does_not_advance_the_generator():
    x = leaf(64)
    torch.manual_seed(0)
    y = checkpoint(lambda x: F.dropout(x.exp()).sin(), x).sum()
    state = torch.get_rng_state()

    y.backward()

    assert torch.equal(torch.get_rng_state(), state)


def test_the_state_is_kept_only_where_the_region_draws():
    x = leaf(64)
    others = set(map(id, live_regions()))
    kept = []
    for body in (torch.sin, F.dropout):
        y = checkpoint(body, x)
        (region,) = [one for one in live_regions() if id(one) not in others]
        kept.append([one is torch.default_generator for one in region.calls[0].generators])
        del y, region

    assert kept == [[], [True]]


@pytest.mark.parametrize("draw", [lambda: torch.rand(624), lambda: torch.randn(1), lambda: torch.randperm(3)])
def test_every_draw_is_noticed(draw):
    # 624 numbers turn the whole state of the CPU's generator once; one normal number leaves the second in a cache.
    for _ in range(3):
        before = generator_states([])
        assert drawn(before) == {}
        draw()
        assert len(drawn(before)) == 1


def test_a_generator_among_the_arguments():
    x = leaf(64)
    generator = torch.Generator()

    def body(x, generator):
        return x.exp() * torch.bernoulli(torch.full((64,), 0.5), generator=generator)

    def run(call):
        generator.manual_seed(0)
        return call(body, x, generator=generator)

    assert same(lambda: run(checkpoint), lambda: run(lambda f, *a, **k: f(*a, **k)), [x])


def test_other_numbers_are_drawn_if_nobody_asks_for_the_same():
    x = torch.ones(1000, requires_grad=True)

    checkpointed(lambda x: F.dropout(x.exp()).sin(), preserve_rng=False)(x).sum().backward()

    assert torch.rand(1) is not None


def test_autocast_is_as_in_the_forward():
    layer = nn.Linear(8, 8)
    x = leaf(4, 8)

    def body(x):
        return layer(layer(x)).exp()

    def run(call, dtype=torch.bfloat16):
        with torch.autocast("cpu", dtype):
            return call(body, x).float()

    assert same(lambda: run(checkpoint), lambda: run(lambda f, x: f(x)), [x], [layer])
    assert same(lambda: run(checkpoint, torch.float16), lambda: run(lambda f, x: f(x), torch.float16), [x], [layer])
    assert not torch.is_autocast_enabled("cpu")


def test_backward_inside_autocast_recomputes_without_it():
    layer = nn.Linear(8, 8)
    x = leaf(4, 8)
    y = checkpoint(lambda x: layer(x).exp(), x).sum()
    plain = layer(x).exp().sum()
    with torch.autocast("cpu"):
        ours, expected = torch.autograd.grad(y, x)[0], torch.autograd.grad(plain, x)[0]

    assert torch.equal(ours, expected)


def test_autocast_switched_in_the_region():
    layer = nn.Linear(8, 8)
    x = leaf(4, 8)

    def body(x):
        with torch.autocast("cpu", enabled=False):
            y = layer(x)
        return layer(y).float().exp()

    def run(call):
        with torch.autocast("cpu"):
            return call(body, x)

    assert same(lambda: run(checkpoint), lambda: run(lambda f, x: f(x)), [x], [layer])


def test_the_default_device_is_as_in_the_forward():
    seen = Log()

    def body(x):
        seen.append(torch.ones(1).device.type)
        return x.exp()

    with torch.device("meta"):
        y = checkpoint(body, torch.ones(3, device="cpu", requires_grad=True)).sum()
    y.backward()
    assert seen == ["meta", "meta"]

    seen.clear()
    y = checkpoint(body, torch.ones(3, requires_grad=True)).sum()
    with torch.device("meta"):
        y.backward()
    assert seen == ["cpu", "cpu"]


@pytest.mark.gpu
def test_generators_of_every_device():
    x = torch.randn(64, device="cuda", requires_grad=True)

    def body(x):
        return F.dropout(x.exp(), 0.5).sin() * F.dropout(torch.ones(64), 0.5).to("cuda")

    assert same(lambda: checkpoint(body, x), lambda: body(x), [x])
    state = torch.cuda.get_rng_state()
    y = checkpoint(body, x).sum()
    after = torch.cuda.get_rng_state()
    y.backward()
    assert not torch.equal(state, after) and torch.equal(torch.cuda.get_rng_state(), after)


@pytest.mark.gpu
def test_global_state_on_a_thread_of_autograds():
    layer = nn.Linear(8, 8, device="cuda")
    x = torch.randn(4, 8, device="cuda", requires_grad=True)

    def body(x):
        return (layer(x).exp() * torch.ones(8)).float()

    def run(call):
        with torch.autocast("cuda", torch.bfloat16), torch.device("cuda"):
            return call(body, x)

    assert same(lambda: run(checkpoint), lambda: run(lambda f, x: f(x)), [x], [layer])
