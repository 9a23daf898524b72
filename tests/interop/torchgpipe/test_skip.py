"""`torchgpipe.skip`, alone and in a `GPipe`. Letters and numbers are the rows of the facts about torchgpipe."""

import copy

import pytest
import torch
from torch import nn

from torchremat.interop.torchgpipe import GPipe
from torchremat.interop.torchgpipe.skip import Namespace, pop, skippable, stash, verify_skippables


@skippable(stash=["foo"])
class Stash(nn.Module):
    def forward(self, x):
        yield stash("foo", x)
        return x * 2


@skippable(pop=["foo"])
class Pop(nn.Module):
    def forward(self, x):
        foo = yield pop("foo")
        return x + foo


def declared(*, stashed=(), popped=(), commands=(), ran=lambda x: x):
    """A module that declares one thing and does another."""

    @skippable(stash=stashed, pop=popped)
    class Layer(nn.Module):
        def forward(self, x):
            yield from commands
            return ran(x)

    return Layer()


def test_k1_attributes():
    @skippable(stash=["hello"], pop=["bye"])
    class Hello(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(1, 1, 1)

    layer = Hello()

    assert repr(layer) == "@skippable(Hello(\n  (conv): Conv2d(1, 1, kernel_size=(1, 1), stride=(1, 1))\n))"
    assert type(layer.module) is type(layer).module_cls
    assert (set(layer.stashable_names), set(layer.poppable_names)) == ({"hello"}, {"bye"})
    assert layer.namespaces == {}


def test_k1_it_is_a_function_as_well():
    assert skippable()(nn.ReLU)()(torch.tensor(-1.0)).item() == 0.0


def test_k2_other_commands():
    with pytest.raises(TypeError, match="42 is not a command from @skippable"):
        declared(commands=[42])(torch.ones(1))


RUNTIME = {
    "'foo' has not been stashed": {"popped": ["foo"], "commands": [pop("foo")]},
    "'foo' has not been declared as stashable": {"commands": [stash("foo", None)]},
    "'foo' has not been declared as poppable": {"commands": [pop("foo")]},
    "'bar', 'foo' must be stashed but have not": {"stashed": ["foo", "bar"]},
}


@pytest.mark.parametrize(("message", "layer"), RUNTIME.items())
def test_k3_messages(message, layer):
    with pytest.raises(RuntimeError, match=message):
        declared(**layer)(torch.ones(1))


def test_k3_popped_is_what_was_declared():
    model = nn.Sequential(Stash(), declared(popped=["foo"]))

    with pytest.raises(RuntimeError, match="'foo' must be popped but have not"):
        model(torch.ones(1))


def test_k3_skips_need_no_pipe():
    assert nn.Sequential(Stash(), Pop())(torch.tensor(14)).item() == 42


def test_k4_namespaces():
    one, other = Namespace(), Namespace()

    assert one != other and (one < other) is not (other < one)
    assert copy.copy(one) == one and copy.copy(one) is not one and hash(copy.copy(one)) == hash(one)
    assert repr(one).startswith("<Namespace '")
    assert not one < None
    layer = Stash()
    assert layer.isolate(one) is layer


def test_k4_only_some_names():
    namespace = Namespace()

    layer = declared(stashed=["a", "b"]).isolate(namespace, only=["b"])

    assert layer.namespaces == {"b": namespace}


MISMATCHES = {
    "both": ([declared(stashed=["foo"], popped=["foo"])], "'0' declared 'foo' both as stashable and as poppable"),
    "stashed again": (
        [Stash(), Stash(), Pop()],
        "'1' redeclared 'foo' as stashable but not isolated by namespace",
    ),
    "popped again": ([Stash(), Pop(), Pop()], "'2' redeclared 'foo' as poppable but not isolated by namespace"),
    "unknown": ([Pop()], "'0' declared 'foo' as poppable but it was not stashed"),
    "left": ([Stash()], "no module declared 'foo' as poppable but stashed"),
    # torchgpipe inspects direct children alone, and lets this through.
    "left inside": ([nn.Sequential(Stash())], "no module declared 'foo' as poppable but stashed"),
}


@pytest.mark.parametrize(("layers", "message"), MISMATCHES.values(), ids=MISMATCHES)
@pytest.mark.parametrize("check", [verify_skippables, lambda layers: GPipe(layers, [len(layers)], devices=["cpu"])])
def test_k5_mismatches(check, layers, message):
    with pytest.raises(TypeError) as caught:
        check(nn.Sequential(*layers))

    assert str(caught.value).startswith("one or more pairs of stash and pop do not match:\n\n* ")
    assert message in str(caught.value)


def test_k5_all_mismatches_at_once():
    with pytest.raises(TypeError) as caught:
        verify_skippables(nn.Sequential(Stash(), Pop(), Stash(), Pop()))

    assert "'2' redeclared 'foo' as stashable" in str(caught.value)
    assert "'3' redeclared 'foo' as poppable" in str(caught.value)


def test_k5_isolated_pairs_match():
    one, other = Namespace(), Namespace()

    verify_skippables(
        nn.Sequential(Stash().isolate(one), Stash().isolate(other), Pop().isolate(other), Pop().isolate(one))
    )


@pytest.mark.parametrize("balance", [[3], [1, 2], [2, 1], [1, 1, 1]], ids=str)
@pytest.mark.parametrize("checkpoint", ["never", "always", "except_last"])
def test_k8_a_skip_over_a_layer(balance, checkpoint):
    layers = nn.Sequential(Stash(), nn.Conv2d(3, 3, 1), Pop())
    plain = copy.deepcopy(layers)
    model = GPipe(layers, balance, devices=["cpu"] * 3, chunks=3, checkpoint=checkpoint)
    x, same = torch.rand(2, 6, 3, 4, 4).unbind()
    x, same = x.clone().requires_grad_(), x.clone().requires_grad_()

    output = model(x)
    output.square().sum().backward()

    expected = torch.cat([plain(rows) for rows in same.chunk(3)])
    expected.square().sum().backward()
    assert torch.equal(output, expected)
    assert torch.equal(x.grad, same.grad)
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(layers.parameters(), plain.parameters(), strict=True))


@pytest.mark.parametrize("checkpoint", ["never", "always", "except_last"])
def test_k9_none_is_a_skip(checkpoint):
    @skippable(stash=["none"])
    class StashNone(nn.Module):
        def forward(self, x):
            yield stash("none", None)
            return x

    @skippable(pop=["none"])
    class PopNone(nn.Module):
        def forward(self, x):
            assert (yield pop("none")) is None
            return x * 2

    layers = nn.Sequential(StashNone(), PopNone())
    x = torch.rand(10, requires_grad=True)

    GPipe(layers, [1, 1], devices=["cpu"] * 2, chunks=5, checkpoint=checkpoint)(x).sum().backward()

    assert x.grad.tolist() == [2.0] * 10


@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_k10_a_skip_that_is_popped_and_not_used(checkpoint):
    @skippable(pop=["foo"])
    class Forget(nn.Module):
        def forward(self, x):
            yield pop("foo")
            return x * 3

    x = torch.rand(4, requires_grad=True)

    model = GPipe(nn.Sequential(Stash(), Forget()), [1, 1], devices=["cpu"] * 2, chunks=2, checkpoint=checkpoint)
    model(x).sum().backward()

    assert x.grad.tolist() == [6.0] * 4


@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_k10_tuples_are_skips(checkpoint):
    @skippable(stash=["pair"])
    class StashPair(nn.Module):
        def forward(self, x):
            yield stash("pair", (x * 5, x.detach()))
            return x

    @skippable(pop=["pair"])
    class PopPair(nn.Module):
        def forward(self, x):
            one, other = yield pop("pair")
            return x * other + one

    x = torch.tensor([2.0, 3.0], requires_grad=True)

    model = GPipe(nn.Sequential(StashPair(), PopPair()), [1, 1], devices=["cpu"] * 2, chunks=2, checkpoint=checkpoint)
    model(x).sum().backward()

    assert x.grad.tolist() == [7.0, 8.0]
