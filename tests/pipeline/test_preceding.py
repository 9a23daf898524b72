"""A recompute that does not wait for the gradient."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import torchremat
from torchremat.pipeline.preceding import precede
from torchremat.regions.calls import Body
from torchremat.regions.region import Region
from torchremat.regions.settings import Settings


class Step(torch.autograd.Function):
    """Multiplies, saves its input and says when it runs."""

    @staticmethod
    def forward(ctx, name, log, x):
        ctx.save_for_backward(x)
        ctx.name, ctx.log = name, log
        log.append(f"F{name}")
        return x * x

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        ctx.log.append(f"B{ctx.name}")
        return None, None, 2 * x * grad


class SlowCopy(torch.autograd.Function):
    """The copy from one device to the next, of which backward enqueues one part and waits for it in another."""

    @staticmethod
    def forward(ctx, what, name, log, x):
        ctx.words, ctx.log = (what, name), log
        return x.detach()

    @staticmethod
    def backward(ctx, grad):
        what, name = ctx.words
        ctx.log.append(f"{what}{name}")
        return None, None, None, grad


def region_of(function, *inputs: Tensor):
    body: Body = lambda args, kwargs: function(*args)  # noqa: E731
    region = Region(Settings())
    return region, region.call(body, inputs, {}, [])


def cell(name: str, log: list[str], x: Tensor, *, precedes: bool) -> Tensor:
    region, y = region_of(lambda x: Step.apply(name, log, x), x)
    y = SlowCopy.apply("W", name, log, y)  # what lets the device wait for the copy
    if precedes:
        (y,) = precede(region, [y])
    return SlowCopy.apply("C", name, log, y)  # what enqueues the copy


def test_a_recompute_is_enqueued_before_the_wait_for_the_gradient():
    orders = []
    for precedes in (False, True):
        log = []
        x = torch.rand(3, requires_grad=True)
        y = cell("b", log, cell("a", log, x, precedes=precedes), precedes=precedes)

        y.sum().backward()

        orders.append(" ".join(log))
        assert torch.equal(x.grad, 2 * x.square() * 2 * x)

    assert orders == [
        "Fa Fb Cb Wb Fb Bb Ca Wa Fa Ba",
        "Fa Fb Cb Fb Wb Bb Ca Fa Wa Ba",
    ]


def test_a_loss_on_any_output_is_preceded():
    for used in range(3):
        log = []
        x = torch.rand(3, requires_grad=True)
        region, outputs = region_of(lambda x: [Step.apply(str(n), log, x * 1) for n in range(3)], x)  # noqa: B023
        outputs = precede(region, [SlowCopy.apply("W", "", log, one) for one in outputs])
        log.clear()

        outputs[used].sum().backward()

        assert log[:3] == ["F0", "F1", "F2"][:3]
        assert log.count("F0") == 1
        assert torch.equal(x.grad, 2 * x)


def test_what_requires_no_grad_goes_past():
    x = torch.rand(3, requires_grad=True)
    region, outputs = region_of(lambda x: (x.detach() > 0.5, x.exp(), x.argmax(), torch.ones(1)), x)

    found = precede(region, outputs)

    assert [one is other for one, other in zip(found, outputs, strict=True)] == [True, False, True, True]
    assert found[1].grad_fn.name() == "RecomputeBackward"


def test_each_backward_recomputes_once_and_none_is_left():
    log = []
    x = torch.rand(3, requires_grad=True)
    y = cell("a", log, x, precedes=True)
    log.clear()

    y.sum().backward(retain_graph=True)
    first, x.grad = x.grad, None
    y.sum().backward(retain_graph=True)

    assert " ".join(log) == "Ca Fa Wa Ba Ca Fa Wa Ba"
    assert torch.equal(x.grad, first)


def test_second_derivatives_are_right():
    x = torch.rand(3, dtype=torch.float64, requires_grad=True)
    log = []

    (first,) = torch.autograd.grad(cell("a", log, x, precedes=True).sum(), x, create_graph=True)
    first.sum().backward()

    assert torch.equal(x.grad, torch.full((3,), 2.0, dtype=torch.float64))


def test_a_session_gets_what_is_recomputed():
    log = []
    x = torch.rand(3, requires_grad=True)
    with torchremat.session():
        y = cell("a", log, x, precedes=True)
        y.sum().backward(retain_graph=True)
        y.sum().backward()

    assert log.count("Fa") == 2


def test_random_numbers_are_those_of_the_forward():
    torch.manual_seed(0)
    dropout = nn.Dropout()
    x = torch.rand(100, requires_grad=True)
    region, y = region_of(lambda x: dropout(x).square(), x)
    (y,) = precede(region, [y])

    y.sum().backward()

    kept = y != 0
    assert torch.equal(x.grad != 0, kept)
    assert 20 < int(kept.sum()) < 80


def test_the_words_for_where_code_runs():
    words = []

    def function(x: Tensor) -> Tensor:
        words.append((torchremat.is_checkpointing(), torchremat.is_recomputing()))
        return x.exp()

    region, y = region_of(function, torch.rand(3, requires_grad=True))
    (y,) = precede(region, [y])
    words.append((torchremat.is_checkpointing(), torchremat.is_recomputing()))
    y.sum().backward()

    assert words == [(True, False), (False, False), (False, True)]


def test_a_backward_that_does_not_need_the_region_leaves_nothing_behind():
    log = []
    x = torch.rand(3, requires_grad=True)
    region, y = region_of(lambda x: Step.apply("a", log, x), x)
    (end,) = precede(region, [y])
    log.clear()

    torch.autograd.grad(end.sum(), y, retain_graph=True)

    assert log == ["Fa"]
    assert [slot().task for slot in region.slots] == [None]
