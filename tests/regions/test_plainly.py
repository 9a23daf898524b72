"""Regions that are switched off for a while."""

import pytest
import torch
from torch import nn

from probes.regions import plainly
from regions.comparing import Counted, live_regions, three
from torchremat import Keep, checkpoint, wrap
from torchremat.interop.torch_checkpoint import checkpoint as drop_in


@pytest.mark.parametrize("call", [checkpoint, lambda body, x: drop_in(body, x, use_reentrant=False)])
def test_a_call_makes_no_region(call):
    body, x = Counted(three), torch.randn(3, requires_grad=True)
    before = len(live_regions())

    with plainly():
        y = call(body, x)
        assert len(live_regions()) == before
    y.sum().backward()

    assert body.calls == 1


@pytest.mark.parametrize("options", [{}, {"store": Keep()}])
def test_a_wrapped_module_is_called_plainly(options):
    model = wrap(nn.Sequential(nn.Sequential(nn.Linear(3, 3), nn.Tanh())), "0", **options)
    body = model[0][0].forward = Counted(model[0][0].forward)
    x = torch.randn(2, 3)

    with plainly():
        model(x).sum().backward()
    assert body.calls == 1

    model(x).sum().backward()
    assert body.calls == (2 if options else 3)


def test_a_recompute_inside_is_as_its_forward():
    inner, x = Counted(three), torch.randn(3, requires_grad=True)
    y = checkpoint(lambda x: checkpoint(inner, x.sin()), x)

    with plainly():
        y.sum().backward()

    # Forward, the recompute of the outer region that stops at the input of the inner one, and the inner recompute.
    assert inner.calls == 2 and x.grad is not None


def test_a_reentrant_recompute_inside_makes_its_regions():
    # It used to begin with what was around the backward: `plainly` there made plain calls of the regions inside of it,
    # which then kept all that they saved until its own backward had passed them.
    inner, x = Counted(three), torch.randn(3, requires_grad=True)
    y = drop_in(lambda x: checkpoint(inner, x.sin()), x, use_reentrant=True)

    with plainly():
        y.sum().backward()

    # Forward, the recompute of the outer region, which makes a region of the inner one, and the inner recompute.
    assert inner.calls == 3 and x.grad is not None


def test_it_ends_with_the_block_also_if_that_raises():
    body, x = Counted(three), torch.randn(3, requires_grad=True)

    def raising():
        with plainly():
            pass
        checkpoint(body, x).sum().backward()
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), plainly():
        raising()
    assert body.calls == 1

    checkpoint(body, x).sum().backward()

    assert body.calls == 3
