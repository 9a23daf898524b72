"""Models with skips: each layer is run on its own, with the skips that it pops."""

import pytest
import torch
from torch import nn

from pipeline.balance.clocks import wound
from pipeline.balance.test_time import Takes
from pipeline.skip.modules import Between, Pop, PopValue, Stash, StashValue
from torchremat import wrap
from torchremat.errors import SkippableError
from torchremat.pipeline.balance import balance_by_size, balance_by_time
from torchremat.pipeline.skip import Namespace, current_skip_tracker, pop, skippable, stash


def test_backward_of_what_is_stashed_counts_where_it_is_stashed(monkeypatch):
    clock = wound(monkeypatch)

    @skippable(stash=["s"])
    class Branches(nn.Module):
        def __deepcopy__(self, memo):
            return self

        def forward(self, x):
            clock.now += 1
            yield stash("s", {"branch": Takes.apply(x, clock, 7), "nothing": None})
            return x * 2

    @skippable(pop=["s"])
    class Joins(nn.Module):
        def __deepcopy__(self, memo):
            return self

        def forward(self, x):
            skip = yield pop("s")
            assert skip["branch"].requires_grad and not skip["branch"].is_leaf and skip["nothing"] is None
            clock.now += 2
            return Takes.apply(x * skip["branch"].mul_(2), clock, 3)

    model = nn.Sequential(Branches(), nn.ReLU(), Joins())

    found = balance_by_time(2, model, torch.rand(2, requires_grad=True), timeout=0)

    assert found.costs == (8, 0, 5)
    assert found == [2, 1]


@pytest.mark.parametrize("is_wrapped", [False, True])
def test_skips_jump_over_layers(is_wrapped):
    model = nn.Sequential(Stash(), Between(), Between(), Pop())
    if is_wrapped:
        wrap(model, "*")
    waiting = current_skip_tracker()

    timed = balance_by_time(4, model, torch.rand(2, 4), timeout=0.01)
    sized = balance_by_size(4, model, torch.rand(2, 4), param_scale=0)

    assert timed == [1, 1, 1, 1]
    # A tensor has 2*4*4 = 32 B. The first layer saves x, what its sine is of, and its output. Those between save what
    # their sine is of, and their input, unless the layer before has saved it. The last one saves its input, the skip,
    # the linear output, the tanh and the exp. A region keeps its input and the skip that it pops.
    assert sized.costs == ((32, 32, 32, 64) if is_wrapped else (96, 32, 64, 160))
    assert current_skip_tracker() is waiting
    assert not model[0].module.calls and not model[3].module.calls


def test_namespaces_and_skips_inside_of_one_layer():
    one, other = Namespace(), Namespace()
    model = nn.Sequential(
        Stash().isolate(one),
        nn.Sequential(Stash().isolate(other), Between(), Pop().isolate(other)),
        Stash(),
        Pop().isolate(one),
        nn.Sequential(nn.Sequential(Pop())),
    )

    assert balance_by_time(5, model, torch.rand(2, 4), timeout=0) == [1, 1, 1, 1, 1]
    assert sum(balance_by_size(2, model, torch.rand(4, 4), chunks=2)) == 5


def test_a_skip_that_nobody_uses_and_one_without_a_tensor():
    other = Namespace()
    model = nn.Sequential(
        StashValue(lambda x: x.exp()),
        PopValue(lambda x, _: x.sin()),
        StashValue(lambda _: None).isolate(other),
        PopValue(lambda x, _: x).isolate(other),
    )

    assert balance_by_time(4, model, torch.rand(2, requires_grad=True), timeout=0) == [1, 1, 1, 1]


def test_a_skip_that_is_saved_by_the_layer_that_pops_it_alone():
    # A sum saves nothing. The product saves both factors, of which the first layer has saved none: 2 times 32 B.
    model = nn.Sequential(StashValue(lambda x: x + 1), nn.Identity(), PopValue(lambda x, skip: (x + 1) * skip))

    found = balance_by_size(1, model, torch.rand(8, requires_grad=True), param_scale=0)

    # The sine of the first layer saves its input.
    assert found.costs == (32, 0, 64)


def test_skips_that_do_not_fit_together():
    with pytest.raises(SkippableError, match="no module declared 'a' as poppable but stashed"):
        balance_by_time(1, nn.Sequential(Stash(), Between()), torch.rand(2, 4))
    with pytest.raises(SkippableError, match="declared 'a' as poppable but it was not stashed"):
        balance_by_size(1, nn.Sequential(Between(), Pop()), torch.rand(2, 4))
