"""Skips that begin, end, or both, in regions: gradients are those of the plain run, and nothing is left behind."""

import pytest
from torch import nn

from pipeline.skip.modules import Between, Pop, Stash
from regions.comparing import leaf, same
from torchremat import checkpoint, checkpointed
from torchremat.pipeline.skip import current_skip_tracker


def model():
    return nn.Sequential(Stash(), Between(), Pop())


def left_behind():
    return current_skip_tracker()._carrier._values


def calls(net):
    return [net[0].module.calls, net[2].module.calls]


def plainly(function, *args):
    return function(*args)


WAYS = {
    "stash alone": (lambda call, net, x: net[2](net[1](call(net[0], x))), [2, 1]),
    "pop alone": (lambda call, net, x: call(net[2], net[1](net[0](x))), [1, 2]),
    "each in one of its own": (lambda call, net, x: call(net[2], net[1](call(net[0], x))), [2, 2]),
    "both in one": (lambda call, net, x: call(net, x), [2, 2]),
    "pop in an inner one": (lambda call, net, x: call(lambda x: call(net[2], net[1](net[0](x))).sin(), x), [2, 3]),
    "stash in an inner one": (lambda call, net, x: call(lambda x: net[2](net[1](call(net[0], x))).sin(), x), [3, 2]),
    "pop in two": (lambda call, net, x: call(lambda x: call(net[2], net[1](x)).sin(), net[0](x)), [1, 3]),
}


@pytest.mark.parametrize("way", WAYS)
def test_gradients_are_those_of_the_plain_run(way):
    run, expected = WAYS[way]
    net, x = model(), leaf(3, 4)

    def ours():
        net[0].module.calls = net[2].module.calls = 0
        return run(checkpointed_to_its_end, net, x)

    assert same(ours, lambda: run(plainly, net, x), [x], [net])
    assert calls(net) == expected
    assert left_behind() == {}


def checkpointed_to_its_end(function, *args):
    return checkpointed(function, early_stop=False)(*args)


@pytest.mark.parametrize("way", WAYS)
def test_recomputes_that_stop_early_leave_nothing_behind(way):
    run, _ = WAYS[way]
    net, x = model(), leaf(3, 4)

    assert same(lambda: run(checkpoint, net, x), lambda: run(plainly, net, x), [x], [net])
    assert left_behind() == {}
