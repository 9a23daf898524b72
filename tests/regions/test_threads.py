"""Several threads at once: the gradients are the same, and nobody waits for ever."""

import faulthandler
import sys
import threading

import pytest
import torch
from torch import nn

from logs import Count, Log, Tally
from probes.regions import thread
from regions.comparing import Counted, Twice
from torchremat import checkpoint, checkpointed, is_checkpointing, is_recomputing, session
from torchremat.interop.torch_checkpoint import checkpoint as drop_in
from torchremat.policies import save_operators

_THREADS = 4
_PATIENCE_S = 30


@pytest.fixture(autouse=True)
def _switching_often():
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def at_once(work, *, count=_THREADS):
    """Run `work(number)` in several threads that start together; return what they return.

    Threads that wait for each other fail the test after a while, with the stacks of all; being daemons, they do not
    keep the process.
    """
    start = threading.Barrier(count)
    results, errors = {}, []

    def run(number):
        try:
            start.wait(_PATIENCE_S)
            results[number] = work(number)
            assert thread.now.recomputing == 0 and thread.now.calls == [] and thread.now.scopes == []
        except BaseException as error:  # noqa: BLE001
            errors.append(error)

    threads = [threading.Thread(target=run, args=(number,), daemon=True) for number in range(count)]
    for one in threads:
        one.start()
    for one in threads:
        one.join(_PATIENCE_S)
    if any(one.is_alive() for one in threads):
        faulthandler.dump_traceback(all_threads=True)
        pytest.fail("threads wait for each other")
    if errors:
        raise errors[0]
    return [results[number] for number in range(count)]


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 4))


def batch(number):
    return torch.linspace(-1, 1 + number, 12).view(3, 4)


def plainly(function, *args, **kwargs):
    return function(*args, **kwargs)


CALLS = {
    "checkpoint": checkpoint,
    "no early stop": lambda function, *args: checkpointed(function, early_stop=False)(*args),
    "values": lambda function, *args: checkpointed(function, check="values")(*args),
    "drop-in": lambda function, *args: drop_in(function, *args, use_reentrant=False),
}


def gradients(net, x, generator, call):
    """Those of the input and the parameters, through nested regions that share a module, dropout and a double read."""
    calls = Log()

    def inner(h):
        return Twice.apply(net(h).sin())

    def outer(h, generator):
        calls.append(1)
        h = call(inner, h)
        h = h * torch.rand(h.shape, generator=generator)
        return call(inner, h).exp()

    x = x.clone().requires_grad_()
    found = torch.autograd.grad(call(outer, x, generator).sum(), [x, *net.parameters()])
    return found, len(calls)


@pytest.mark.parametrize("kind", CALLS)
def test_forward_and_backward_in_several_threads_over_one_module(kind):
    net = model().eval()  # in training the order of forwards would matter to the statistics, with or without regions
    plain = [
        gradients(net, batch(number), torch.Generator().manual_seed(number), plainly)[0] for number in range(_THREADS)
    ]

    def work(number):
        return [gradients(net, batch(number), torch.Generator().manual_seed(number), CALLS[kind]) for _ in range(15)]

    for found, right in zip(at_once(work), plain, strict=True):
        for grads, calls in found:
            assert all(map(torch.equal, grads, right))
            assert calls == 2


def test_backward_in_several_threads_over_one_module_in_training():
    net = model()
    xs = [batch(number).requires_grad_() for number in range(_THREADS)]
    plain = [torch.autograd.grad(net(x).exp().sum(), x)[0] for x in xs]
    statistics = [one.clone() for one in net.buffers()]
    net = model()
    calls = Log()

    def body(x):
        calls.append(1)
        return net(x).exp()

    losses = [checkpoint(lambda x: checkpoint(body, x * 1).clone(), x).sum() for x in xs]

    def work(number):
        return [torch.autograd.grad(losses[number], xs[number], retain_graph=True)[0] for _ in range(10)]

    found = at_once(work)

    assert all(torch.equal(grad, right) for grads, right in zip(found, plain, strict=True) for grad in grads)
    assert all(map(torch.equal, net.buffers(), statistics))
    # The outer recompute stops at the inner region's input.
    assert len(calls) == _THREADS + 10 * _THREADS


@pytest.mark.parametrize("kind", CALLS)
def test_one_graph_in_several_threads(kind):
    net = model()
    x = batch(1).requires_grad_()
    generator = torch.Generator().manual_seed(5)

    def body(x, generator):
        return Twice.apply(net(x) * torch.rand(3, 4, generator=generator)).exp()

    plain = torch.autograd.grad(body(x, generator).sum(), [x, *net.parameters()])
    net, generator = model(), torch.Generator().manual_seed(5)
    loss = CALLS[kind](body, x, generator).sum()
    state = generator.get_state()

    def work(number):
        return [torch.autograd.grad(loss, [x, *net.parameters()], retain_graph=True) for _ in range(15)]

    for found in at_once(work):
        for grads in found:
            assert all(map(torch.equal, grads, plain))
    assert torch.equal(generator.get_state(), state)


def test_a_node_that_another_thread_has_run_keeps_what_this_one_unpacked():
    has_read, has_run = threading.Event(), threading.Event()

    class Slow(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        def backward(ctx, grad):
            (a,) = ctx.saved_tensors
            if threading.current_thread() is slow:
                has_read.set()
                assert has_run.wait(_PATIENCE_S)
            (b,) = ctx.saved_tensors
            return grad * (a + b)

    x, body = batch(1).requires_grad_(), Counted(lambda x: Slow.apply(x.sin()).exp())
    loss = checkpoint(body, x).sum()
    found = Log()

    def go_backward():
        found.extend(torch.autograd.grad(loss, x, retain_graph=True))

    slow = threading.Thread(target=go_backward, daemon=True)
    slow.start()
    assert has_read.wait(_PATIENCE_S)
    go_backward()
    has_run.set()
    slow.join(_PATIENCE_S)

    assert len(found) == 2 and torch.equal(*found)
    assert body.calls == 3  # the forward, and one recompute for each backward


def test_regions_of_one_thread_go_backward_in_another():
    net = model()
    made = at_once(lambda number: region_over(net, batch(number)))

    found = at_once(lambda number: torch.autograd.grad(made[number][1], made[number][0]))

    in_main = [torch.autograd.grad(loss, x) for x, loss in at_once(lambda number: region_over(net, batch(number)))]
    net = model()
    xs = [batch(number).requires_grad_() for number in range(_THREADS)]
    plain = [torch.autograd.grad(net(x).exp().sum(), x) for x in xs]
    assert all(torch.equal(a[0], b[0]) for a, b in zip(found, plain, strict=True))
    assert all(torch.equal(a[0], b[0]) for a, b in zip(in_main, plain, strict=True))


def region_over(net, x):
    x = x.requires_grad_()
    return x, checkpoint(lambda x: net(x).exp(), x).sum()


def test_two_regions_that_share_modules_in_opposite_order():
    first, second = model(), model()

    def one(x):
        return checkpoint(second, checkpoint(first, x)).exp()

    def other(x):
        return checkpoint(first, checkpoint(second, x)).exp()

    def grads(body, call):
        x = batch(1).requires_grad_()
        return torch.autograd.grad(call(body, x).sum(), x)[0]

    plain = [grads(one, plainly), grads(other, plainly)]

    def work(number):
        return [grads((one, other)[number % 2], checkpoint) for _ in range(15)]

    for number, found in enumerate(at_once(work)):
        assert all(torch.equal(grad, plain[number % 2]) for grad in found)


def test_a_recompute_that_waits_for_a_backward_in_another_thread():
    # With state to exchange (buffers in training, random draws) the two would wait for each other: see `EXCHANGING`.
    net = model().eval()

    def aside(x):
        y = x.detach().requires_grad_()
        loss = checkpoint(lambda y: net(y).exp(), y).sum()
        return at_once(lambda _: torch.autograd.grad(loss, y)[0], count=1)[0]

    def body(x):
        return (net(x) * aside(x)).exp()

    x = batch(1).requires_grad_()
    (plain,) = torch.autograd.grad(body(x).sum(), x)

    (found,) = torch.autograd.grad(checkpoint(body, x).sum(), x)

    assert torch.equal(found, plain)


def test_a_session_in_each_thread():
    net = model().eval()
    calls = [Count() for _ in range(_THREADS)]

    def work(number):
        def body(x):
            calls[number].up()
            return net(x).exp()

        x = batch(number).requires_grad_()
        found = Log()
        for _ in range(10):
            with session() as one:
                loss = checkpoint(body, x).sum()
                one.recompute()
                found += [torch.autograd.grad(loss, x, retain_graph=True)[0] for _ in range(2)]
        return found

    found = at_once(work)

    for number, grads in enumerate(found):
        x = batch(number).requires_grad_()
        (plain,) = torch.autograd.grad(net(x).exp().sum(), x)
        assert all(torch.equal(grad, plain) for grad in grads)
    assert [one.value for one in calls] == [20] * _THREADS


def test_one_session_serves_several_threads():
    net = model().eval()
    calls = Log()

    def body(x):
        calls.append(1)
        return net(x).exp()

    x = batch(1).requires_grad_()
    (plain,) = torch.autograd.grad(body(x).sum(), x)
    del calls[:]
    with session() as one:
        loss = checkpoint(body, x).sum()

        def work(number):
            return torch.autograd.grad(loss, x, retain_graph=True)[0]

        one.recompute()
        found = at_once(work)

    # The threads are not in the session; each backward is a session of its own.
    assert all(torch.equal(grad, plain) for grad in found)
    assert len(calls) == 2 + _THREADS


class _Nested(torch.autograd.Function):
    """`sin`, whose backward calls the backward of another one, `depth` times over."""

    @staticmethod
    def forward(ctx, x, depth, seen):
        ctx.save_for_backward(x)
        ctx.depth, ctx.seen = depth, seen
        return x.sin()

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        ctx.seen[threading.get_ident(), is_checkpointing(), is_recomputing()] += 1
        if ctx.depth == 0:
            return grad * x.cos(), None, None
        with torch.enable_grad():
            inner = x.detach().requires_grad_()
            _Nested.apply(inner, ctx.depth - 1, ctx.seen).sum().backward()
        return grad * inner.grad, None, None


@pytest.mark.parametrize("policy", [None, save_operators("aten.cos")], ids=["all again", "a policy"])
def test_what_goes_on_follows_a_backward_into_threads_of_autograd(policy):
    # From a depth of 60 on, torch runs a backward in a thread of its own, as it does all that runs on a device.
    seen, runs = Tally(), Count()

    def function(x):
        inner = x.detach().requires_grad_()
        _Nested.apply(inner, 70, seen).sum().backward()
        runs.up()
        return (x * inner.grad).sin()

    x = torch.rand(8, requires_grad=True)
    plain = torch.autograd.grad(function(x).sum(), x)
    seen.clear()
    ours = torch.autograd.grad(checkpointed(function, policy=policy)(x).sum(), x)
    assert torch.equal(*plain, *ours)
    assert runs.value == 3  # plainly, in the forward, in the recompute
    assert len({ident for ident, *_ in seen}) > 1
    assert {tuple(goes_on) for _, *goes_on in seen} == {(True, False), (False, True)}
