"""The check of values: what is silent in a recompute that does something else with the same shapes."""

from copy import deepcopy
from importlib import import_module

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from logs import Log
from regions.comparing import Counted, equal, leaf, result, same
from torchremat import CheckpointError, checkpointed, extend, session, wrap
from torchremat.policies import save_operators
from torchremat.regions import values
from torchremat.tensors import fingerprints


def noisy(x):
    return (x.exp() * torch.from_numpy(import_module("numpy.random").rand(3))).sin()


def counting():
    turns = Log()

    def body(x):
        turns.append(1)
        return (x.exp() * len(turns)).sin()

    return body


def stale():
    layer = nn.Linear(3, 3)

    def body(x):
        return layer(x.exp()).sin()

    return layer, body


def x3():
    return torch.ones(3, dtype=torch.float64, requires_grad=True)


def test_numpy_draws_are_found_and_the_entry_is_recommended():
    x = x3()

    with pytest.raises(CheckpointError, match=r"has other values[\s\S]*torchremat\.extend\.numpy_random"):
        checkpointed(noisy, check="values")(x).sum().backward()

    # On the CPU no gradient has come of it.
    assert x.grad is None
    with extend.registered(extend.numpy_random):
        checkpointed(noisy, check="values")(x).sum().backward()


@pytest.mark.parametrize(
    "body",
    [
        counting(),
        lambda x: (x.exp() * import_module("random").random()).sin(),
        lambda x: x.exp()[import_module("numpy.random").permutation(64).tolist()].sin(),
    ],
    ids=["global counter", "random", "shuffled"],
)
def test_what_is_silent_without_the_check_is_found(body):
    x = leaf(64)
    checkpointed(body)(x).sum().backward()

    with pytest.raises(CheckpointError, match="has other values in the recompute"):
        checkpointed(body, check="values")(x).sum().backward()


def test_dropout_without_its_generator_state():
    x = torch.ones(64, requires_grad=True)

    with pytest.raises(CheckpointError, match="has other values in the recompute"):
        checkpointed(lambda x: F.dropout(x.exp()).sin(), check="values", preserve_rng=False)(x).sum().backward()


def test_a_parameter_that_was_written_around_its_version():
    layer, body = stale()
    y = checkpointed(body, check="values")(torch.ones(3, requires_grad=True)).sum()
    layer.weight.data.add_(1)

    with pytest.raises(CheckpointError, match="has other values in the recompute"):
        y.backward()


@pytest.mark.parametrize("size", [8, 33, 64, 100])
def test_what_a_kernel_keeps_for_itself_is_no_value(size):
    # oneDNN leaves a part of its workspace as the memory was, so that a recompute seemed to be another run.
    layer, x = nn.LSTM(size, size, batch_first=True), leaf(3, 7, size)

    assert same(lambda: checkpointed(layer, check="values")(x)[0], lambda: layer(x)[0], [x, *layer.parameters()])


def test_a_program_that_does_the_same_twice_passes():
    # rrelu fills its noise after it has saved it.
    def body(x):
        return F.rrelu(F.dropout(x.exp()).sin(), training=True).cos()

    run = checkpointed(body, check="values")
    for x in (leaf(64), leaf(2, 3, 4), leaf(5, dtype=torch.float64)):
        assert same(lambda x=x: run(x), lambda x=x: body(x), [x])


def test_modules_nested_regions_and_sessions():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Sequential(nn.Linear(4, 4), nn.Dropout(), nn.GELU()))
    wrapped = wrap(deepcopy(model), lambda name, _: name in ("", "2", "2.0"), check="values")
    x = leaf(8, 4)

    assert equal(result(lambda: wrapped(x), [x], [wrapped]), result(lambda: model(x), [x], [model]))
    with session() as s:
        y = wrapped(x).sum()
        assert s.recompute() == 1
        y.backward()


def test_every_so_many_calls(monkeypatch):
    counted = Counted(fingerprints.fingerprint)
    monkeypatch.setattr(values, "fingerprint", counted)
    run, x = checkpointed(torch.sin, check="values", check_every=3), leaf(4)

    taken = Log()
    for _ in range(7):
        before = counted.calls
        run(x).sum().backward()
        taken.append(counted.calls - before)

    assert taken == [2, 0, 0, 2, 0, 0, 2]


def test_modules_take_turns_of_their_own(monkeypatch):
    counted = Counted(fingerprints.fingerprint)
    monkeypatch.setattr(values, "fingerprint", counted)
    model = wrap(nn.Sequential(nn.Tanh(), nn.Tanh()), nn.Tanh, check="values", check_every=2)
    x = leaf(4)

    taken = Log()
    for _ in range(3):
        before = counted.calls
        model(x).sum().backward()
        taken.append(counted.calls - before)

    assert taken == [4, 0, 4]


def test_where_reading_waits_the_verdict_comes_at_the_end_of_backward(monkeypatch):
    monkeypatch.setattr(values, "waits", lambda tensor: True)
    x = x3()

    with pytest.raises(CheckpointError, match=r"saved in noisy, .*test_values\.py:\d+\. The gradients .* are written"):
        checkpointed(noisy, check="values")(x).sum().backward()

    assert x.grad is not None
    same_twice = checkpointed(torch.sin, check="values")
    same_twice(x).sum().backward()


def test_a_verdict_outside_of_any_backward_comes_at_once(monkeypatch):
    monkeypatch.setattr(values, "waits", lambda tensor: True)

    with session() as s:
        y = checkpointed(noisy, check="values")(x3())
        with pytest.raises(CheckpointError, match="has other values in the recompute"):
            s.recompute()
    del y


def test_a_forward_that_raises_leaves_no_fingerprints_behind():
    fails = [True]

    def body(x):
        y = x.exp().sin()
        if fails.pop():
            raise KeyError
        return y.cos()

    run, x = checkpointed(body, check="values"), leaf(4)
    with pytest.raises(KeyError):
        run(x)
    fails += [False, False]

    run(x).sum().backward()


def test_a_comparison_at_the_end_of_a_backward_is_no_operator_of_the_region(monkeypatch):
    monkeypatch.setattr(values, "waits", lambda tensor: True)  # as on a device, where nobody waits before that
    weight = torch.rand(4, requires_grad=True)

    def inner(x):
        (weight * x.detach()).sum().backward()
        return torch.tanh(x + 2).sin()

    kept = checkpointed(inner, policy=save_operators("aten.tanh"))
    x = torch.rand(4, requires_grad=True)
    plain = torch.autograd.grad(inner(inner(x)).sum(), x)
    expected, weight.grad = weight.grad, None
    ours = torch.autograd.grad(checkpointed(lambda x: kept(kept(x)), check="values")(x).sum(), x)
    assert torch.equal(*ours, *plain)
    assert torch.equal(weight.grad, expected)
