"""What code in a region can ask and say: where it runs, once only, and decisions that are kept."""

import threading
from weakref import ref

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from logs import Hidden, Log
from regions.comparing import Counted, Twice, leaf, same
from torchremat import (
    CheckpointError,
    MutationError,
    UnsupportedError,
    checkpoint,
    checkpointed,
    frozen,
    is_checkpointing,
    is_recomputing,
    run_once,
    session,
    wrap,
)


def where():
    return is_checkpointing(), is_recomputing()


# ------------------------------------------------------------------------------------------------------- where it runs


def test_forward_recompute_and_outside():
    seen = Log()

    def body(x):
        seen.append(where())
        return x.exp().sin()

    assert where() == (False, False)
    y = checkpoint(body, leaf(3)).sum()
    assert where() == (False, False)
    y.register_hook(lambda _: seen.append(where()))
    y.backward()

    assert seen == [(True, False), (False, False), (False, True)]
    assert where() == (False, False)


def test_nested():
    seen = Log()

    def inner(x):
        seen.append(("inner", *where()))
        return x.exp().sin()

    def outer(x):
        seen.append(("outer", *where()))
        return checkpoint(inner, x.sin()).cos()

    checkpoint(outer, leaf(3)).sum().backward()

    assert seen == [
        ("outer", True, False),
        ("inner", True, False),
        # `cos` saves the result of the inner region, which is met in the recompute for the first time again.
        ("outer", False, True),
        ("inner", True, True),
        ("inner", False, True),
    ]


def test_without_grad_there_is_no_region():
    with torch.no_grad():
        assert checkpoint(where) == (False, False)


def test_other_threads_are_not_asked():
    seen = Log()

    def body(x):
        thread = threading.Thread(target=lambda: seen.append(where()))
        thread.start()
        thread.join()
        return x.exp().sin()

    checkpoint(body, leaf(3)).sum().backward()

    assert seen == [(False, False)] * 2


@pytest.mark.parametrize("turn", [1, 2], ids=["forward", "recompute"])
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_after_an_error(turn, error):
    body_calls = Log()

    def body(x):
        body_calls.append(1)
        if len(body_calls) == turn:
            raise error
        return x.exp().sin()

    with pytest.raises(error):
        checkpoint(lambda x: checkpoint(body, x), leaf(3)).sum().backward()

    assert where() == (False, False)


# ---------------------------------------------------------------------------------------------------------------- once


def test_a_side_effect_happens_in_the_forward_alone():
    seen = Log()

    def inner(x):
        run_once(seen.append, "inner")
        return x.exp().sin()

    def outer(x):
        run_once(seen.append, "outer")
        return checkpoint(inner, x).cos()

    y = checkpoint(outer, leaf(3)).sum()
    y.backward(retain_graph=True)
    y.backward()

    assert seen == ["outer", "inner"]


def test_outside_of_a_region_it_is_a_call():
    seen = Log()
    run_once(seen.append, 1)
    assert run_once(lambda *, a: seen.append(a), a=2) is None
    assert seen == [1, 2]


# -------------------------------------------------------------------------------------------------------------- frozen


class Router(nn.Module):
    """Sends each row to the expert that a noisy gate likes best; how many go to each decides the shapes."""

    def __init__(self, keeps=True):
        super().__init__()
        self.gate = nn.Linear(4, 3)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3))
        self.keeps = keeps
        self.chosen = Log()

    def forward(self, x):
        scores = self.gate(x)
        picked = (scores + 10 * hidden_noise(scores)).argmax(-1)
        if self.keeps:
            picked = frozen("picked", picked)
        self.chosen.append(picked.tolist())
        weights = scores.softmax(-1).gather(-1, picked[:, None])
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = (picked == number).nonzero()[:, 0]
            out = out.index_add(0, rows, expert(x[rows]))
        return out * weights


_HIDDEN = Hidden(generator=torch.Generator())  # where no region looks for one


def hidden_noise(scores):
    return torch.rand(scores.shape, generator=_HIDDEN["generator"])


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("early_stop", [False, True])
def test_a_router_that_draws_in_secret(nested, early_stop):
    router = Router()
    x = leaf(64, 4)

    def run(call):
        _HIDDEN["generator"] = torch.Generator().manual_seed(0)
        router.chosen.clear()
        return call(lambda x: call(router, x.sin()), x) if nested else call(router, x)

    ours = checkpointed_as(early_stop=early_stop)

    assert same(lambda: run(ours), lambda: run(lambda f, x: f(x)), [x], [router])
    # A recompute of the outer region that may stop does so at the input of the inner one.
    assert len(router.chosen) == (3 if nested and not early_stop else 2)
    assert all(one == router.chosen[0] for one in router.chosen)


def checkpointed_as(**options):
    return lambda function, *args: checkpointed(function, **options)(*args)


def test_the_router_without_it_is_an_error():
    router = Router(keeps=False)
    _HIDDEN["generator"] = torch.Generator().manual_seed(0)
    y = checkpoint(router, leaf(64, 4)).sum()

    with pytest.raises(CheckpointError):
        y.backward()


def test_one_name_several_times_and_several_names():
    turns = iter(range(100))
    seen = Log()

    def body(x):
        one = [frozen("a", torch.tensor(next(turns))), frozen("b", torch.tensor(next(turns)))]
        one.append(frozen("a", torch.tensor(next(turns))))
        seen.append([int(tensor) for tensor in one])
        return (x.exp() * one[0] * one[1]).sin() * one[2]

    y = checkpoint(body, leaf(3)).sum()
    y.backward(retain_graph=True)
    y.backward()

    assert seen == [[0, 1, 2]] * 3


def test_each_call_of_a_nested_region_has_its_own():
    turns = iter(range(100))
    seen = Log()

    def inner(x):
        decided = frozen("a", torch.tensor(float(next(turns))))
        seen.append(int(decided))
        return (x.exp() * decided).sin()

    def outer(x):
        for _ in range(3):
            x = checkpoint(inner, x)
        return x.cos()

    x = leaf(4)
    y = checkpoint(outer, x).sum()
    (ours,) = torch.autograd.grad(y, x)

    assert seen[:6] == [0, 1, 2, 0, 1, 2]  # the forward, and the recompute of the outer region
    assert sorted(seen[6:]) == [0, 1, 2]  # that of each inner one

    h = x
    for number in range(3):
        h = (h.exp() * float(number)).sin()
    assert torch.equal(ours, torch.autograd.grad(h.cos().sum(), x)[0])


def test_in_a_session_and_with_a_node_that_reads_twice():
    turns = iter(range(100))
    body = Counted(lambda x: Twice.apply(x.exp() * frozen("a", torch.tensor(float(next(turns) + 1)))))
    x = leaf(4)
    with session(passes=2):
        y = checkpoint(body, x).sum()
        first = torch.autograd.grad(y, x, retain_graph=True)[0]
        second = torch.autograd.grad(y, x)[0]

    assert body.calls == 2
    assert torch.equal(first, second)
    assert torch.equal(first, torch.autograd.grad(Twice.apply(x.exp() * 1.0).sum(), x)[0])


def test_a_tensor_that_requires_grad():
    x = leaf(4)
    turns = iter([1.0, 2.0, 3.0])

    def body(x):
        h = frozen("h", x.exp() * next(turns))
        return (h * h).sin()

    y = checkpoint(body, x).sum()
    h = x.exp() * 1.0
    plain = (h * h).sin().sum()

    assert torch.equal(torch.autograd.grad(y, x)[0], torch.autograd.grad(plain, x)[0])


def test_a_frozen_tensor_goes_with_the_graph():
    kept = Log()

    def body(x):
        mask = frozen("mask", torch.rand(4) > 0.5)
        kept.append(ref(mask.untyped_storage()))
        return (x.exp() * mask).sin()

    y = checkpoint(body, leaf(4)).sum()
    y.backward()
    del y

    assert [one() for one in kept] == [None] * len(kept) and len(kept) == 2


@pytest.mark.parametrize("when", ["in the region", "afterwards"])
def test_a_write_is_an_error_that_names_it(when):
    kept = []

    def body(x):
        picked = frozen("picked", torch.zeros(3, dtype=torch.long))
        kept.append(picked)
        if when == "in the region":
            picked.add_(1)
        return x[picked].exp().sin()

    y = checkpoint(body, leaf(4)).sum()
    if when == "afterwards":
        kept[0].add_(1)

    with pytest.raises(MutationError, match=r"frozen\('picked', ...\) was written in place .* version 0 then, 1 now"):
        y.backward()


def test_more_of_them_in_a_recompute_is_an_error():
    turns = iter([1, 2])

    def body(x):
        for _ in range(next(turns)):
            frozen("a", torch.ones(1))
        return x.exp().sin()

    y = checkpoint(body, leaf(4)).sum()

    with pytest.raises(CheckpointError, match=r"frozen\('a', ...\) was called more often in a recompute"):
        y.backward()


def test_outside_of_a_region_it_is_returned_as_it_is():
    x = leaf(3)

    assert frozen("x", x) is x
    with pytest.raises(UnsupportedError, match=r"frozen\('x', ...\): expected a tensor, got list"):
        frozen("x", [x])


def test_in_a_wrapped_model():
    model = nn.Sequential(Router(), Router())
    x = leaf(64, 4)
    _HIDDEN["generator"] = torch.Generator().manual_seed(0)
    plain = torch.autograd.grad(model(x).sum(), [x, *model.parameters()], allow_unused=True)
    wrap(model, Router)
    _HIDDEN["generator"] = torch.Generator().manual_seed(0)
    ours = torch.autograd.grad(model(x).sum(), [x, *model.parameters()], allow_unused=True)

    assert all(a is b is None or torch.equal(a, b) for a, b in zip(ours, plain, strict=True))


def test_dropout_beside_it_draws_the_same():
    x = leaf(64)

    def body(x):
        mask = frozen("mask", torch.rand(64) > 0.5)
        return F.dropout(x.exp() * mask, 0.5).sin().cos()

    assert same(lambda: checkpoint(body, x), lambda: body(x), [x])


def test_a_recompute_starts_as_if_no_region_were_active():
    # Rule 3: the backward of one region runs in the forward of another, which it is no part of.
    x, seen = torch.ones(3, requires_grad=True), Log()

    def body(x):
        seen.append((is_checkpointing(), is_recomputing()))
        return x.exp().sin()

    loss = checkpoint(body, x).sum()

    def other(z):
        loss.backward()
        return z.exp().sin()

    checkpoint(other, torch.ones(3, requires_grad=True))

    assert seen == [(True, False), (False, True)]


def test_what_a_recompute_writes_and_nobody_can_give_back_is_told():
    # The backward inside recomputes the region while it runs, to its end, as nothing more is saved: the bias was
    # written twice.
    weight, bias, x = leaf(4), nn.Parameter(torch.ones(4)), leaf(4)

    def body(x):
        x = x.sin()
        (weight * x.detach()).sum().backward()
        with torch.no_grad():
            bias.mul_(2.0)
        return x

    with pytest.raises(MutationError, match="its recompute wrote `bias` in place"):
        checkpoint(body, x)
