"""Edges that order backward where no data flows."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from weakref import ref

import pytest
import torch
from torch import Tensor

from torchremat.pipeline.dependency import fork_all, join_all, phony_of


class _Logged(torch.autograd.Function):
    @staticmethod
    def forward(ctx, name, log, x):
        ctx.name, ctx.log = name, log
        log.append(f"F {name}")
        return x.detach()

    @staticmethod
    def backward(ctx, grad):
        ctx.log.append(f"B {ctx.name}")
        return None, None, grad


def logged(name: str, log: list[str], x: Tensor) -> Tensor:
    return _Logged.apply(name, log, x)


def fork(tensor):
    (tensor,), phony = fork_all([tensor])
    return tensor, phony


def join(tensor, phony):
    return join_all([tensor], phony)[0]


def test_a_phony_is_one_tensor_for_a_device():
    phony = phony_of(torch.device("cpu"))

    assert phony is phony_of(torch.device("cpu"))
    assert phony.numel() == 0
    assert not phony.requires_grad


def test_a_phony_keeps_no_graph():
    x = torch.rand(1, requires_grad=True)

    fork(x)

    assert phony_of(torch.device("cpu")).grad_fn is None


@pytest.mark.parametrize(("orders", "backward"), [(False, "B a B b"), (True, "B b B a")])
def test_what_uses_the_joined_runs_its_backward_before_what_made_the_forked(orders, backward):
    log = []
    a, b = torch.rand(1, requires_grad=True), torch.rand(1, requires_grad=True)
    if not orders:
        b = logged("b", log, b)
        a = logged("a", log, a)  # made last, so its backward runs first
    else:
        a, phony = fork(logged("a", log, a))
        b = logged("b", log, join(b, phony))
        a = a + 0  # asked first, and has to wait

    (a + b).backward()

    assert " ".join(one for one in log if one[0] == "B") == backward


@pytest.mark.parametrize("used", [0, 1])
def test_the_order_holds_for_a_loss_on_any_tensor(used):
    log = []
    first = [logged(name, log, torch.rand(1, requires_grad=True)) for name in ("a0", "a1")]
    first, phony = fork_all(first)
    (second,) = join_all([torch.rand(1, requires_grad=True)], phony)
    second = logged("b", log, second)
    third = logged("c", log, first[used])  # made last, so that it runs first

    (third + second).backward()

    backward = [one for one in log if one[0] == "B"]
    assert backward[:2] == ["B c", "B b"]
    assert sorted(backward[2:]) == ["B a0", "B a1"]


@pytest.mark.parametrize("orders", [False, True])
def test_several_edges_end_at_one_node(orders):
    log = []
    leaves = [torch.rand(1, requires_grad=True) for _ in range(100)]
    (first, phony), (second, also) = (fork(logged(name, log, sum(leaves))) for name in ("a0", "a1"))
    _, without = fork(torch.rand(1))

    def last(third: Tensor) -> Tensor:
        """Made by a thread that has made no nodes, so that its backward is taken last."""
        return logged("b", log, join_all([third], phony, without, also)[0] if orders else third)

    with ThreadPoolExecutor(1) as thread:
        third = thread.submit(last, torch.rand(1, requires_grad=True)).result()
    (first + second + third).backward()

    backward = [one for one in log if one[0] == "B"]
    assert backward == (["B b", "B a1", "B a0"] if orders else ["B a1", "B a0", "B b"])


def test_without_grad_nothing_is_made():
    x, y = torch.rand(1), torch.rand(1, requires_grad=True)

    same, phony = fork(x)
    with torch.no_grad():
        also, plain = fork(y)

    assert same is x
    assert also is y
    assert not phony.requires_grad
    assert not plain.requires_grad
    assert join(x, phony) is x


def test_what_requires_no_grad_goes_past():
    whole, numbers = torch.rand(1, requires_grad=True), torch.arange(3)

    (forked, same), phony = fork_all([whole, numbers])
    joined = join_all([numbers, forked], phony)

    assert same is numbers
    assert joined[0] is numbers
    assert forked.grad_fn.name() == "ForkBackward"
    assert joined[1].grad_fn.name() == "JoinBackward"


def test_an_edge_cannot_end_where_nothing_requires_grad():
    _, phony = fork(torch.rand(1, requires_grad=True))
    plain = torch.rand(1)

    assert join_all([plain], phony)[0] is plain


def test_gradients_pass():
    x, y = torch.rand(3, requires_grad=True), torch.rand(3, requires_grad=True)

    forked, phony = fork(x)
    joined = join(y, phony)
    (2 * forked + 3 * joined).sum().backward()

    assert x.grad.tolist() == [2, 2, 2]
    assert y.grad.tolist() == [3, 3, 3]


def test_second_derivatives_pass():
    x, y = (
        torch.rand(3, dtype=torch.float64, requires_grad=True),
        torch.rand(3, dtype=torch.float64, requires_grad=True),
    )

    def function(x: Tensor, y: Tensor) -> Tensor:
        forked, phony = fork(x.sin())
        return join(y.cos(), phony) * forked

    assert torch.autograd.gradgradcheck(function, (x, y))


def test_a_graph_is_free_when_it_is_dropped():
    log = []
    x = logged("a", log, torch.rand(1, requires_grad=True))
    node = ref(x.grad_fn)
    forked, phony = fork(x)
    joined = join(torch.rand(1, requires_grad=True), phony)

    del x, forked, phony
    assert node() is not None
    del joined

    assert node() is None
