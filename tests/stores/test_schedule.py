import gc

import torch

from stores.memory import Memory
from torchremat import offload

SIZE = 32 * 32 * 4


def kinds(store):
    return "".join({"put": "p", "get": "g", "prefetch": "a"}[kind] for kind, _ in store.log)


def test_what_comes_next_is_brought_back_ahead():
    store = Memory()

    with offload(store, window_bytes=2 * SIZE):
        y = torch.randn(32, 32, requires_grad=True)
        for _ in range(6):
            y = y.sin()
        y = y.sum()
    y.backward()

    assert kinds(store) == "ppppp" + "aag" + "ag" + "ag" + "g" + "g"


def test_without_a_window_nothing_is():
    store = Memory()

    with offload(store, window_bytes=0):
        y = torch.randn(32, 32, requires_grad=True).sin().sin().sin().sum()
    y.backward()

    assert kinds(store) == "pp" + "gg"


def test_an_order_that_was_not_expected_is_right():
    store, x = Memory(), torch.randn(32, 32, requires_grad=True)
    with offload(store, window_bytes=SIZE):
        first = x.sin().sin().sum()
        second = x.cos().cos().sum()

    # The first is expected after the second.
    gradients = [torch.autograd.grad(one, x)[0] for one in (first, second)]

    assert torch.equal(gradients[0], torch.autograd.grad(x.sin().sin().sum(), x)[0])
    assert torch.equal(gradients[1], torch.autograd.grad(x.cos().cos().sum(), x)[0])
    assert store.times("get") == 2


def test_forwards_without_a_backward_are_forgotten():
    context, x = offload(Memory()), torch.randn(32, 32, requires_grad=True)
    with context:
        for _ in range(3000):
            x.sin().sin()
    gc.collect()

    schedule = context.catalog._schedule

    assert len(schedule._added) <= 1024
