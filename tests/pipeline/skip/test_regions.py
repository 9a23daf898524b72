"""Skips that begin, end, or both, in regions: gradients are those of the plain run, and nothing is left behind."""

import threading
from weakref import WeakSet

import pytest
import torch
from torch import nn

from logs import Count
from pipeline.skip.modules import Between, Pop, PopValue, Stash, StashValue
from regions.comparing import leaf, live_regions, same
from torchremat import MutationError, SkipError, UnsupportedError, checkpoint, checkpointed, is_recomputing, wrap
from torchremat.interop.torch_checkpoint import checkpoint as drop_in
from torchremat.pipeline.skip import (
    CellTracker,
    SkipTracker,
    current_skip_tracker,
    inspect_skip_layout,
    pop,
    skippable,
    stash,
    use_skip_tracker,
)


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
        net[0].module.ran, net[2].module.ran = Count(), Count()
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


def test_a_second_backward_gets_the_same_skip():
    net, x = model(), leaf(3, 4)
    y = checkpoint(net[2], net[1](net[0](x))).sum()
    first = torch.autograd.grad(y, x, retain_graph=True)
    second = torch.autograd.grad(y, x)

    assert torch.equal(first[0], second[0])
    assert calls(net) == [1, 3]


def test_a_recompute_in_another_thread():
    net, x = model(), leaf(3, 4)
    (plain,) = torch.autograd.grad(net(x).sum(), x)
    found = []

    def backward(y):
        (grad,) = torch.autograd.grad(y, x)
        # The thread has a tracker of its own, since the recompute.
        found.append((grad, left_behind()))

    for way in ("both in one", "each in one of its own"):
        y = WAYS[way][0](checkpoint, net, x).sum()
        thread = threading.Thread(target=backward, args=(y,))
        thread.start()
        thread.join()

    assert [(torch.equal(grad, plain), left) for grad, left in found] == [(True, {})] * 2


@pytest.mark.parametrize(
    ("makes", "uses"),
    [
        (lambda x: (x.exp(), [None, {"b": x.cos()}]), lambda x, s: (x * s[0]).sin() * s[1][1]["b"]),
        (lambda x: None, lambda x, s: x.sin().exp() if s is None else x),
        (lambda x: torch.arange(3), lambda x, s: (x * s).exp()),
        (lambda x: x, lambda x, s: (x * s).exp()),
    ],
    ids=["nested", "None", "integers", "a leaf"],
)
@pytest.mark.parametrize("way", ["pop alone", "both in one", "pop in an inner one"])
def test_values_of_any_structure(makes, uses, way):
    net, x = nn.Sequential(StashValue(makes), nn.Tanh(), PopValue(uses)), leaf(3)
    run, _ = WAYS[way]

    assert same(lambda: run(checkpoint, net, x), lambda: run(plainly, net, x), [x])


def test_a_module_that_pops_and_stashes_the_same_name_again():
    @skippable(stash=["a"], pop=["a"])
    class Through(nn.Module):
        def forward(self, x):
            a = yield pop("a")
            yield stash("a", a.exp())
            return (x * a).sin()

    net, x = nn.Sequential(Stash(), Through(), Pop()), leaf(3, 4)

    for run in (
        lambda: net[2](checkpoint(net[1], net[0](x))),
        lambda: checkpoint(net[2], checkpoint(net[1], net[0](x))),
        lambda: checkpoint(nn.Sequential(net[1], net[2]), net[0](x)),
    ):
        assert same(run, lambda: net(x), [x], [net])


def test_a_tracker_of_the_users_own():
    tracker, net, x = SkipTracker(), model(), leaf(3, 4)

    def body(x):
        with use_skip_tracker(tracker):
            return net(x)

    assert same(lambda: checkpoint(body, x), lambda: net(x), [x], [net])
    assert tracker._carrier._values == {}


def test_wrapped_runs():
    net, x = model(), leaf(3, 4)
    (plain,) = torch.autograd.grad(net(x).sum(), x)
    net[0].module.ran, net[2].module.ran = Count(), Count()
    wrap(net, "[012]")

    assert torch.equal(torch.autograd.grad(net(x).sum(), x)[0], plain)
    assert calls(net) == [2, 2]


# ---------------------------------------------------------------------------------------------------- who holds what


class Tail(nn.Module):
    def forward(self, x):
        return x.sin()


def skips_alive(run):
    """How many skips are alive after the forward, and after the backward."""
    made = WeakSet()

    def makes(x):
        value = x.exp()
        made.add(value.untyped_storage())
        return value

    net = nn.Sequential(StashValue(makes), Tail(), PopValue(lambda x, s: (x * s).sin()), Tail())
    x = leaf(3)
    y = run(net, x).sum()
    before = len(made)
    y.backward()
    del y
    return before, len(made)


def test_a_region_around_both_ends_does_not_hold_the_skip():
    assert skips_alive(lambda net, x: net(x)) == (1, 0)
    assert skips_alive(lambda net, x: checkpoint(net, x)) == (0, 0)


@pytest.mark.usefixtures("no_collector")
def test_a_region_holds_what_it_pops_until_its_backward():
    assert skips_alive(lambda net, x: checkpoint(net[2], net[1](checkpoint(net[0], x)))) == (1, 0)
    # The region of the two drops what its forward makes, the skip included, but for what is popped by an inner one.
    assert skips_alive(lambda net, x: checkpoint(lambda x: net[2](net[1](checkpoint(net[0], x))), x)) == (0, 0)
    assert skips_alive(lambda net, x: checkpoint(lambda x: checkpoint(net[2], net[1](net[0](x))), x)) == (1, 0)


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("goes_backward", [True, False])
def test_regions_go_without_the_collector(way, goes_backward):
    run, _ = WAYS[way]
    net, x = model(), leaf(3, 4)
    before = len(live_regions())
    for _ in range(3):
        y = run(checkpoint, net, x).sum()
        if goes_backward:
            y.backward()
        del y
    assert len(live_regions()) == before


def test_nothing_is_left_by_a_recompute_that_raises():
    made, net = WeakSet(), model()
    turns = iter([False, True])

    def body(x):
        h = net[0](x)
        made.add(h.untyped_storage())
        if next(turns):
            raise ValueError("given up")
        return h.sin()

    y = checkpoint(body, leaf(3, 4)).sum()
    current_skip_tracker().load(None, "a")

    with pytest.raises(ValueError, match="given up"):
        y.backward()
    assert left_behind() == {}


# ------------------------------------------------------------------------------------------------------------ errors


def test_a_skip_that_is_written_in_place_is_an_error():
    net, kept = nn.Sequential(StashValue(lambda x: x.exp()), PopValue(lambda x, s: kept.append(s) or (x * s).sin())), []
    y = checkpoint(net[1], net[0](leaf(3))).sum()
    with torch.no_grad():
        kept[0].add_(1)

    with pytest.raises(MutationError, match=r"the tensor of pop\('s'\) was written in place .* version 0 then, 1 now"):
        y.backward()


def test_a_pop_that_the_forward_did_not_make_is_an_error():
    net, x = model(), leaf(3, 4)

    def body(x):
        return net[2](x) if is_recomputing() else (x * 2).tanh() * x.exp()

    y = checkpoint(body, net[0](x)).sum()

    with pytest.raises(SkipError, match="'a' has not been stashed"):
        y.backward()
    assert list(left_behind()) == [(None, "a")]  # the forward's own, which nobody has popped
    current_skip_tracker().load(None, "a")


def reentrant(function, *args):
    return drop_in(function, *args, use_reentrant=True)


def test_a_reentrant_region_around_both_ends():
    net, x = model(), leaf(3, 4)

    assert same(lambda: reentrant(net, x), lambda: net(x), [x], [net])
    assert left_behind() == {}


@pytest.mark.parametrize("way", ["stash alone", "pop alone", "each in one of its own"])
def test_a_skip_does_not_pass_the_edge_of_a_reentrant_region(way):
    with pytest.raises(UnsupportedError, match=r"^pop\('a'\): its value enters or leaves a reentrant region"):
        WAYS[way][0](reentrant, model(), leaf(3, 4))


def test_nor_does_one_that_leaves_the_cell():
    net = model()
    layout = inspect_skip_layout([nn.Sequential(net[0]), nn.Sequential(net[1], net[2])])
    tracker = CellTracker(layout, 0, {})
    with use_skip_tracker(tracker):
        reentrant(net[0], leaf(3, 4))

    with pytest.raises(UnsupportedError, match=r"^stash\('a'\): its value enters or leaves a reentrant region"):
        _ = tracker.outgoing
