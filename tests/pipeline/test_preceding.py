"""A recompute that does not wait for the gradient."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import torchremat
from logs import Log
from probes.pipelines import precede
from probes.regions import Region, Settings
from torchremat.errors import MutationError


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
    region = Region(Settings())
    return region, region.call(function, inputs, {}, [])


def cell(name: str, log: list[str], x: Tensor, *, precedes: bool) -> Tensor:
    region, y = region_of(lambda x: Step.apply(name, log, x), x)
    y = SlowCopy.apply("W", name, log, y)  # what lets the device wait for the copy
    if precedes:
        (y,) = precede(region, [y])
    return SlowCopy.apply("C", name, log, y)  # what enqueues the copy


def test_a_recompute_is_enqueued_before_the_wait_for_the_gradient():
    orders = []
    for precedes in (False, True):
        log = Log()
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
        log = Log()
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
    log = Log()
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
    log = Log()

    (first,) = torch.autograd.grad(cell("a", log, x, precedes=True).sum(), x, create_graph=True)
    first.sum().backward()

    assert torch.equal(x.grad, torch.full((3,), 2.0, dtype=torch.float64))


def test_a_session_gets_what_is_recomputed():
    log = Log()
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
    words = Log()

    def function(x: Tensor) -> Tensor:
        words.append((torchremat.is_checkpointing(), torchremat.is_recomputing()))
        return x.exp()

    region, y = region_of(function, torch.rand(3, requires_grad=True))
    (y,) = precede(region, [y])
    words.append((torchremat.is_checkpointing(), torchremat.is_recomputing()))
    y.sum().backward()

    assert words == [(True, False), (False, False), (False, True)]


def test_a_backward_that_does_not_need_the_region_leaves_nothing_behind():
    log = Log()
    x = torch.rand(3, requires_grad=True)
    region, y = region_of(lambda x: Step.apply("a", log, x), x)
    (end,) = precede(region, [y])
    log.clear()

    torch.autograd.grad(end.sum(), y, retain_graph=True)

    assert log == ["Fa"]
    assert [slot().task for slot in region.slots] == [None]


def test_inputs_go_when_a_backward_that_frees_its_graph_has_recomputed():
    alive = []
    popped = torch.rand(3).exp()
    x = torch.rand(3, requires_grad=True)
    region, y = region_of(lambda x, popped: Step.apply("a", [], x * 1 + popped), x, popped)
    watch = StorageWeakRef(popped.untyped_storage())
    del popped
    y.register_hook(lambda _: alive.append(not watch.expired()))
    x.register_hook(lambda _: alive.append(not watch.expired()))

    (y,) = precede(region, [y])
    assert not watch.expired()
    y.sum().backward()

    # The sum alone is saved, so nobody but the region has needed what was popped.
    assert alive == [False, False]


def test_inputs_stay_for_a_backward_that_keeps_its_graph():
    x = torch.rand(3, requires_grad=True)
    region, y = region_of(lambda x: Step.apply("a", [], x * 1), x)
    (y,) = precede(region, [y])

    y.sum().backward(retain_graph=True)
    first, x.grad = x.grad, None
    assert len(region.held) == 1
    y.sum().backward()

    assert torch.equal(x.grad, first)
    assert region.held == []


def test_another_backward_through_other_nodes_gets_what_was_recomputed():
    log = Log()
    x = torch.rand(3, requires_grad=True)
    region, outputs = region_of(lambda x: [Step.apply(str(n), log, x * 1) for n in range(3)], x)
    outputs = precede(region, outputs[:1]) + outputs[1:]
    log.clear()

    outputs[0].sum().backward()
    first, x.grad = x.grad, None
    outputs[2].sum().backward()

    assert " ".join(log) == "F0 F1 F2 B0 B2"
    assert torch.equal(first, 2 * x)
    assert torch.equal(x.grad, 2 * x)


def test_what_was_recomputed_and_written_since_is_refused():
    saved = []
    x = torch.rand(3, requires_grad=True)

    def function(x):
        copies = [x * 1, x * 1]
        saved[:] = copies
        return [one * one for one in copies]

    region, outputs = region_of(function, x)
    outputs = precede(region, outputs[:1]) + outputs[1:]
    outputs[0].sum().backward()
    saved[1].detach().add_(1)

    with pytest.raises(MutationError, match="at version 0 and is at 1 now"):
        outputs[1].sum().backward()


def test_a_nested_region_asks_a_region_without_inputs():
    log = Log()
    x = torch.rand(3, requires_grad=True)

    def inner(x):
        return Step.apply("i", log, x * 2)

    region, y = region_of(lambda x: torchremat.checkpoint(inner, Step.apply("o", log, x)), x)
    (y,) = precede(region, [y])
    log.clear()

    y.sum().backward()

    expected = torch.autograd.grad((x.square() * 2).square().sum(), x)[0]
    assert region.held == []
    assert " ".join(log) == "Fo Fi Bi Bo"
    assert torch.equal(x.grad, expected)
