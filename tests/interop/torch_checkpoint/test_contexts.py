from contextlib import nullcontext, suppress
from functools import partial

import pytest
import torch
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from logs import Log
from regions.comparing import leaf, same, three
from torchremat import is_recomputing
from torchremat.interop.torch_checkpoint import checkpoint, create_selective_checkpoint_contexts


class Noted:
    """A context manager that can be entered again and notes what happens to it."""

    def __init__(self, name, log, swallows=False):
        self.name = name
        self.log = log
        self.swallows = swallows

    def __enter__(self):
        self.log.append(f"{self.name}+")

    def __exit__(self, kind, *_):
        self.log.append(f"{self.name}-" if kind is None else f"{self.name}!")
        return self.swallows


def run(function, *args, log, swallows=(False, False), **options):
    pair = Noted("F", log, swallows[0]), Noted("R", log, swallows[1])
    return checkpoint(function, *args, use_reentrant=False, context_fn=lambda: pair, **options)


def test_the_first_is_entered_in_the_forward_and_the_second_in_the_recompute():
    log = Log()
    x = leaf(3)

    def function(a):
        log.append("f")
        return three(a)

    y = run(function, x, log=log, early_stop=False)
    log.append("|")
    y.sum().backward()

    assert "".join(log) == "F+fF-|R+fR-"


def test_the_end_of_a_recompute_that_stops_early_passes_through_as_an_exception():
    log = Log()

    run(three, leaf(3), log=log).sum().backward()

    assert "".join(log) == "F+F-R+R!"


def test_a_context_that_swallows_that_changes_nothing():
    log = Log()
    x = leaf(3)

    assert same(lambda: run(three, x, log=log, swallows=(False, True)), lambda: three(x), [x])
    assert "".join(log) == "F+F-R+R!"


def test_the_second_is_entered_again_for_each_backward():
    log = Log()
    y = run(three, leaf(3), log=log).sum()

    y.backward(retain_graph=True)
    y.backward()

    assert "".join(log) == "F+F-R+R!R+R!"


def test_a_function_that_makes_the_contexts_is_called_once_per_region():
    calls = []

    def context_fn():
        calls.append(1)
        return nullcontext(), nullcontext()

    y = checkpoint(three, leaf(3), use_reentrant=False, context_fn=context_fn)
    y.sum().backward(retain_graph=True)
    y.sum().backward()

    assert len(calls) == 1


def test_without_grad_they_are_made_and_not_entered():
    log = Log()

    with torch.no_grad():
        run(three, leaf(3), log=log)

    assert log == []


def test_nested_ones_are_entered_in_order():
    log = Log()
    x = leaf(3)

    def outer(a):
        b = a.exp()
        pair = Noted("f", log), Noted("r", log)
        return checkpoint(three, b, use_reentrant=False, context_fn=lambda: pair).sin()

    y = run(outer, x, log=log)
    log.append("|")
    y.sum().backward()

    # The outer recompute runs up to the last tensor that it saved: past the inner forward, which is one of its own.
    assert "".join(log) == "F+f+f-F-|R+f+f-R!r+r!"
    assert same(lambda: run(outer, x, log=log), lambda: three(x.exp()).sin(), [x])


def test_autocast_random_numbers_and_the_default_device_are_the_forwards_inside_of_them():
    seen = []

    class Looks:
        def __enter__(self):
            seen.append((torch.is_autocast_enabled("cpu"), torch.rand(1).item(), is_recomputing()))

        def __exit__(self, *_):
            pass

    x = leaf(3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = checkpoint(
            lambda a: (a * torch.rand(3)).exp(), x, use_reentrant=False, context_fn=lambda: (Looks(), Looks())
        )
    y.sum().backward()

    assert [(one[0], one[2]) for one in seen] == [(True, False), (True, True)]
    assert seen[0][1] == seen[1][1]


def test_a_context_can_have_saved_tensor_hooks_of_its_own():
    packed = []

    def pack(tensor):
        packed.append(tensor)
        return tensor

    def hooks():
        return torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)

    x = leaf(3)
    y = checkpoint(three, x, use_reentrant=False, context_fn=lambda: (hooks(), nullcontext()), determinism_check="none")

    # They are inside of the region's, so the region has saved nothing and there is nothing to recompute.
    assert len(packed) == 3
    y.sum().backward()
    plain = leaf(3)
    with torch.no_grad():
        plain.copy_(x)
    three(plain).sum().backward()
    assert torch.equal(x.grad, plain.grad)


def test_a_forward_context_that_swallows_an_exception_is_an_error():
    def function(a):
        raise ValueError("in the forward")

    with pytest.raises(RuntimeError, match="the forward context provided by context_fn suppressed an exception"):
        checkpoint(function, leaf(3), use_reentrant=False, context_fn=lambda: (suppress(ValueError), nullcontext()))


def test_what_a_forward_raises_arrives():
    log = Log()

    def function(a):
        raise ValueError("in the forward")

    with pytest.raises(ValueError, match="in the forward"):
        run(function, leaf(3), log=log)
    assert "".join(log) == "F+F!"


@pytest.mark.parametrize("made", [None, nullcontext(), (nullcontext(),)])
def test_what_is_no_pair_is_an_error(made):
    with pytest.raises(ValueError, match=r"context_fn: expected a function that returns a pair of context managers"):
        checkpoint(three, leaf(3), use_reentrant=False, context_fn=lambda: made)


@pytest.mark.parametrize("preserves", [True, False])
def test_a_policy_under_torchs_own_checkpoint_leaves_the_generator_where_it_is(preserves):
    # What was kept of a draw left the generator where that draw had, and the next step drew the same numbers again.
    x = leaf(3)
    pair = partial(create_selective_checkpoint_contexts, [torch.ops.aten.rand_like.default])

    y = torch_checkpoint(
        lambda a: (a * torch.rand_like(a)).exp(),
        x,
        use_reentrant=False,
        context_fn=pair,
        preserve_rng_state=preserves,
    )
    torch.rand(5)
    before = torch.get_rng_state()
    y.sum().backward()

    assert torch.equal(torch.get_rng_state(), before)
