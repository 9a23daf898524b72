"""Sessions: one recompute for several backward calls, and ahead of the gradient."""

import threading
from weakref import WeakSet

import pytest
import torch
from torch import nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from logs import Log
from regions.comparing import Counted, Twice, Watched, leaf, live_regions, three
from torchremat import Session, UnsupportedError, checkpoint, session

# ----------------------------------------------------------------------------------------------------- rule 8


@pytest.mark.parametrize("passes", [2, None])
def test_one_recompute_serves_several_backward_calls(passes):
    body, x = Counted(three), leaf(4)
    (plain,) = torch.autograd.grad(three(x).sum(), x)

    with session(passes):
        y = checkpoint(body, x).sum()
        grads = [torch.autograd.grad(y, x, retain_graph=True)[0] for _ in range(2)]

    assert body.calls == 2
    assert all(torch.equal(grad, plain) for grad in grads)


def test_a_session_around_the_backward_alone():
    body, x = Counted(three), leaf(4)
    y = checkpoint(body, x).sum()

    with session():
        y.backward(retain_graph=True)
        y.backward()

    assert body.calls == 2


def test_the_input_and_the_weight_pass_of_a_pipeline_stage():
    blocks = [nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)) for _ in range(3)]
    weights = [parameter for block in blocks for parameter in block.parameters()]
    x = leaf(2, 4)

    def run(call):
        x.grad = None
        for weight in weights:
            weight.grad = None
        h = inputs = x.detach().requires_grad_()
        for block in blocks:
            h = call(block, h)
        _, groups = stage_backward_input([h], [torch.ones_like(h)], [inputs], iter(weights))
        stage_backward_weight(iter(weights), groups)
        return [inputs.grad, *(weight.grad for weight in weights)]

    plain = run(lambda f, x: f(x))
    counted = [Counted(block) for block in blocks]
    calls = dict(zip(blocks, counted, strict=True))
    with session(passes=2):
        ours = run(lambda f, x: checkpoint(calls[f], x))

    assert [one.calls for one in counted] == [2, 2, 2]
    assert all(map(torch.equal, ours, plain))


def test_overlapping_backward_calls():
    body, x = Counted(three), leaf(4)
    y = checkpoint(body, x)
    found = Log()

    def inner(grad):
        found.append(None)
        found[0] = torch.autograd.grad(y, x, torch.ones_like(y), retain_graph=True)[0]

    y.register_hook(lambda grad: inner(grad) if not found else None)
    loss = y.sum()
    with session():
        (outer,) = torch.autograd.grad(loss, x)

    assert body.calls == 2
    assert torch.equal(outer, found[0])


def test_backward_calls_in_several_threads():
    body, x = Counted(three), leaf(4)
    (plain,) = torch.autograd.grad(three(x).sum(), x)
    found = Log()
    with session():
        y = checkpoint(body, x).sum()
        y.backward(retain_graph=True)

        def work():
            # Another thread is in no session: its backward recomputes for itself.
            found.append(torch.autograd.grad(y, x, retain_graph=True)[0])

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()

    assert body.calls == 3 and torch.equal(found[0], plain)


# ------------------------------------------------------------------------------------------- rule 4 in a session


def test_a_tensor_goes_with_the_last_declared_pass():
    layer, x = Watched(), leaf(4)
    alive = []
    with session(passes=2):
        y = checkpoint(layer, x).sum()
        for _ in range(2):
            y.backward(retain_graph=True)
            alive.append(len(layer.alive))

    assert alive == [1, 0] and layer.calls == 2


def test_tensors_go_when_the_session_closes():
    layer, x = Watched(), leaf(4)
    with session():
        y = checkpoint(layer, x).sum()
        y.backward(retain_graph=True)
        y.backward(retain_graph=True)
        assert len(layer.alive) == 1
    assert len(layer.alive) == 0 and layer.calls == 2

    y.backward()
    assert layer.calls == 3


def test_tensors_go_when_the_session_is_left_by_an_error():
    layer, x = Watched(), leaf(4)
    y = checkpoint(layer, x).sum()

    def work():
        with session():
            y.backward(retain_graph=True)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        work()

    assert len(layer.alive) == 0
    with session():
        pass


def test_a_python_node_reads_twice_in_the_last_pass():
    body, x = Counted(lambda x: Twice.apply(x.exp())), leaf(4)
    with session(passes=1):
        checkpoint(body, x).sum().backward()

    assert body.calls == 2


def test_nested_regions_in_a_session():
    inner, x = Counted(three), leaf(4)
    outer = Counted(lambda x: checkpoint(inner, x.sin()).cos())
    (plain,) = torch.autograd.grad(three(x.sin()).cos().sum(), x)
    with session(passes=2):
        y = checkpoint(outer, x).sum()
        grads = [torch.autograd.grad(y, x, retain_graph=True)[0] for _ in range(2)]

    # The recompute of the outer one runs the inner one again.
    assert (outer.calls, inner.calls) == (2, 3)
    assert all(torch.equal(grad, plain) for grad in grads)


# ----------------------------------------------------------------------------------------------------- rule 9


def test_a_recompute_ahead_of_the_gradient():
    bodies = [Counted(three) for _ in range(3)]
    x = h = leaf(4)
    with session() as s:
        for body in bodies:
            h = checkpoint(body, h)
        assert s.recompute() == 1
        assert [body.calls for body in bodies] == [1, 1, 2]
        assert s.recompute(count=5) == 2
        assert s.recompute() == 0
        h.sum().backward()

    assert [body.calls for body in bodies] == [2, 2, 2]
    plain = x
    for _ in range(3):
        plain = three(plain)
    assert torch.equal(x.grad, torch.autograd.grad(plain.sum(), x)[0])


def test_what_was_recomputed_ahead_goes_node_by_node():
    alive = WeakSet()

    def body(x):
        y = x.exp()
        alive.add(y.untyped_storage())
        return y.sin()

    x = leaf(4)
    h = x * 1
    left = []
    h.register_hook(lambda _: left.append(len(alive)))
    with session(passes=1) as s:
        y = checkpoint(body, h).sum()
        s.recompute()
        assert len(alive) == 1
        y.backward()

    assert left == [0]


def test_what_is_nested_is_recomputed_once_ahead_of_a_backward():
    # Once a session that was not active recomputed the outer region for the input of the inner one alone, and then once
    # more for itself.
    inner, outer, x = Counted(three), Counted(torch.exp), leaf(4)
    own = Session()
    with own.active():
        y = checkpoint(lambda x: outer(checkpoint(inner, outer(x))), x).sum()

    assert own.recompute(count=5) == 1
    assert (outer.calls, inner.calls) == (4, 3)
    with own.active():
        y.backward()
    own.close()

    assert (outer.calls, inner.calls) == (4, 3)
    assert torch.equal(x.grad, torch.autograd.grad(three(x.exp()).exp().sum(), x)[0])


def test_nothing_is_recomputed_for_a_dropped_graph_or_after_backward():
    body, x = Counted(three), leaf(4)
    with session() as s:
        checkpoint(body, x)
        assert s.recompute() == 0
        checkpoint(body, x).sum().backward()
        assert s.recompute() == 0

    assert body.calls == 3


def test_no_region_outlives_its_session():
    x = leaf(4)
    before = len(live_regions())
    with session() as s:
        y = checkpoint(three, x).sum()
        s.recompute()
        y.backward()
        del y
        assert len(live_regions()) == before


# ------------------------------------------------------------------------------------------------------ errors


@pytest.mark.parametrize("passes", [0, -1])
def test_passes_must_be_positive(passes):
    with pytest.raises(UnsupportedError, match=f"passes={passes!r}: expected an int of at least 1"), session(passes):
        pass


def test_sessions_do_not_nest():
    with session():
        with pytest.raises(UnsupportedError, match="sessions do not nest"), session():
            pass
        y = checkpoint(three, leaf(3)).sum()
        y.backward(retain_graph=True)
        y.backward()


@pytest.mark.gpu
def test_a_session_reaches_the_threads_of_autograd():
    body, x = Counted(three), torch.randn(4, device="cuda", requires_grad=True)
    with session():
        y = checkpoint(body, x).sum()
        y.backward(retain_graph=True)
        y.backward()

    assert body.calls == 2
