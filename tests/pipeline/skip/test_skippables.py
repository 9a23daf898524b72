"""Skippable modules: what they declare, yield and get, outside of any pipe."""

import copy
import io
import pickle
import traceback

import pytest
import torch
from torch import nn

from pipeline.skip.modules import Pop, PopValue, Stash, StashValue
from regions.comparing import leaf
from torchremat import SkipError, SkippableError, WrapError, wrap
from torchremat.pipeline.skip import (
    Namespace,
    Portal,
    Skippable,
    SkipTracker,
    current_skip_tracker,
    pop,
    skippable,
    stash,
    use_skip_tracker,
    verify_skippables,
)

Doubled = skippable()(nn.Linear)


class Outer:
    @skippable(stash=["a"])
    class Inner(nn.Module):
        def forward(self, x):
            yield stash("a", x)
            return x


@pytest.fixture(autouse=True)
def _own_tracker():
    with use_skip_tracker(SkipTracker()):
        yield


def made(forward, **names):
    cls = type("Made", (nn.Module,), {"forward": forward})
    return skippable(**names)(cls)()


# ------------------------------------------------------------------------------------------------------ what it is


def test_what_it_has():
    module = Stash()

    assert isinstance(module, Skippable) and type(module) is Stash
    assert type(module.module) is Stash.module_cls and type(module.module).__name__ == "Stash"
    assert (Stash.stashable_names, Stash.poppable_names) == ({"a"}, set())
    assert (Pop.stashable_names, Pop.poppable_names) == (set(), {"a"})
    assert module.namespaces == {}
    assert list(module.state_dict()) == ["module.linear.weight", "module.linear.bias"]
    assert repr(module) == ("@skippable(Stash(\n  (linear): Linear(in_features=4, out_features=4, bias=True)\n))")
    assert Stash.__module__ == "pipeline.skip.modules" and Stash.__qualname__ == "Stash"
    assert Stash.__doc__ == "Stashes what it computes."


@pytest.mark.parametrize(
    "module", [Stash(), Doubled(4, 4), Outer.Inner(), nn.Sequential(Stash(), Pop())], ids=lambda one: type(one).__name__
)
@pytest.mark.parametrize("way", ["deepcopy", "pickle", "pickle 2", "torch.save"])
def test_copies_and_pickles(module, way):
    namespace = Namespace()
    for one in module.modules():
        if isinstance(one, Skippable):
            one.isolate(namespace)
    if way == "deepcopy":
        other = copy.deepcopy(module)
    elif way == "torch.save":
        file = io.BytesIO()
        torch.save(module, file)
        file.seek(0)
        other = torch.load(file, weights_only=False)
    else:
        other = pickle.loads(pickle.dumps(module, 2 if way == "pickle 2" else pickle.HIGHEST_PROTOCOL))

    assert type(other) is type(module)
    pairs = list(zip(module.modules(), other.modules(), strict=True))
    assert all(type(a) is type(b) and a is not b for a, b in pairs)
    assert all(a.namespaces == b.namespaces for a, b in pairs if isinstance(a, Skippable))
    assert all(torch.equal(a, b) and a is not b for a, b in zip(module.parameters(), other.parameters(), strict=True))
    x = leaf(3, 4)
    assert torch.equal(module(x), other(x))


def test_a_wrapped_one_is_copied_with_its_region():
    net = wrap(nn.Sequential(Stash(), Pop()), "[01]")
    other = copy.deepcopy(net)
    with torch.no_grad():
        other[0].module.linear.weight.zero_()
    x = leaf(3, 4)
    y = other(x)

    assert not torch.equal(net(x), y)
    y.sum().backward()
    assert [one[0].module.calls for one in (net, other)] == [1, 2]
    assert net[0].module.linear.weight.grad is None and other[0].module.linear.weight.grad is not None


# -------------------------------------------------------------------------------------------------- stash and pop


def test_without_a_pipe(monkeypatch):
    monkeypatch.setattr(Portal, "__init__", None)  # none is made
    net, x = nn.Sequential(StashValue(lambda x: x * 10), nn.Tanh(), PopValue(lambda x, s: x + s)), leaf(3)

    assert torch.equal(net(x), x.sin().tanh() + x * 10)


@pytest.mark.parametrize(
    ("makes", "uses"),
    [
        (lambda x: None, lambda x, s: x.sin() if s is None else None),
        (lambda x: (x * 2, x.cos()), lambda x, s: x * s[0] + s[1]),
        (lambda x: {"a": x * 2, "b": [x.cos(), None, {"c": (x, 3)}]}, lambda x, s: x * s["a"] + s["b"][2]["c"][0]),
        (lambda x: torch.arange(3), lambda x, s: x * s),
        (lambda x: "words", lambda x, s: x * len(s)),
        (lambda x: x.cos(), lambda x, s: x * 2),
    ],
    ids=["None", "tuple", "nested", "integers", "no tensor", "unused"],
)
def test_values_of_any_structure(makes, uses):
    net, x = nn.Sequential(StashValue(makes), PopValue(uses)), leaf(3)
    (ours,) = torch.autograd.grad(net(x).sum(), x)
    value = makes(x)
    (plain,) = torch.autograd.grad(uses(x.sin(), value).sum(), x)

    assert torch.equal(ours, plain)


def test_a_forward_that_is_no_generator():
    module = made(lambda self, x, *, factor: x * factor)

    assert module(torch.tensor(3), factor=2) == 6


def test_arguments_go_through():
    def forward(self, x, y=0, *, z):
        yield stash("a", x)
        return x, y, z

    assert made(forward, stash=["a"])(1, 2, z=3) == (1, 2, 3)


def test_one_module_stashes_and_pops():
    def forward(self, x):
        a = yield pop("a")
        yield stash("b", x)
        return x + a

    net = nn.Sequential(
        StashValue(lambda x: x).isolate(Namespace()),
        made(lambda self, x: (yield stash("a", x * 2)) or x, stash=["a"]),
        made(forward, stash=["b"], pop=["a"]),
        made(lambda self, x: (yield pop("b")) * x, pop=["b"]),
    )

    assert net(torch.tensor(1.0)).item() == pytest.approx(3.0 * 0.841471**2)


def test_namespaces_keep_names_apart():
    one, two = Namespace(), Namespace()
    net = nn.Sequential(
        StashValue(lambda x: x * 2).isolate(one),
        StashValue(lambda x: x * 3).isolate(two, only=["s"]),
        PopValue(lambda x, s: x + s).isolate(one),
        PopValue(lambda x, s: x * s).isolate(two),
    )
    x = leaf(3)
    verify_skippables(net)

    assert torch.equal(net(x), (x.sin().sin() + x * 2) * (x.sin() * 3))
    assert net[0].isolate(None) is net[0] and list(net[0].stashable()) == [(None, "s")]


# ------------------------------------------------------------------------------------------------------------ errors


def empty(self, x):
    return x


def twice(self, x):
    yield stash("a", x)
    yield stash("a", x)


def pops_twice(self, x):
    yield pop("a")
    yield pop("a")


def undeclared_stash(self, x):
    yield stash("b", x)


def undeclared_pop(self, x):
    yield pop("b")


def yields_a_number(self, x):
    yield 7


ERRORS = [
    (empty, SkipError, {"stash": ["b", "a"]}, "Made: 'a', 'b' must be stashed but have not."),
    (empty, SkipError, {"pop": ["a"]}, "Made: 'a' must be popped but have not."),
    (
        empty,
        SkipError,
        {"pop": ["a"], "stash": ["b"]},
        "Made: 'b' must be stashed but have not; 'a' must be popped but have not.",
    ),
    (twice, SkipError, {"stash": ["a"]}, "Made: 'a' has been stashed already in this forward."),
    (pops_twice, SkipError, {"pop": ["a"]}, "Made: 'a' has been popped already in this forward."),
    (
        undeclared_stash,
        SkipError,
        {},
        "'b' has not been declared as stashable; Made declares none. Declare it: @skippable(stash=[...]).",
    ),
    (
        undeclared_pop,
        SkipError,
        {"pop": ["a"]},
        "'b' has not been declared as poppable; Made declares 'a'. Declare it: @skippable(pop=[...]).",
    ),
    (
        yields_a_number,
        SkippableError,
        {},
        "7 is not a command from @skippable; Made may yield stash(name, value) and pop(name).",
    ),
]


@pytest.mark.parametrize(("forward", "kind", "names", "words"), ERRORS, ids=[one[3][:40] for one in ERRORS])
def test_what_is_not_declared_or_not_done(forward, kind, names, words):
    current_skip_tracker().save(None, "a", 1)

    with pytest.raises(kind) as error:
        made(forward, **names)(torch.ones(1))

    assert str(error.value) == words
    assert isinstance(error.value, TypeError if kind is SkippableError else RuntimeError)


def test_what_is_wrong_is_raised_where_it_was_yielded():
    with pytest.raises(SkipError) as error:
        made(undeclared_stash)(torch.ones(1))

    lines = [frame.line for frame in traceback.extract_tb(error.value.__traceback__)]
    assert 'yield stash("b", x)' in lines


def test_a_forward_may_catch_it():
    def forward(self, x):
        try:
            yield pop("b")
        except SkipError:
            yield stash("a", x)
        return x + 1

    assert made(forward, stash=["a"])(1) == 2
    assert current_skip_tracker().load(None, "a") == 1


def test_popped_without_a_stash():
    with pytest.raises(SkipError, match=r"^'a' has not been stashed, or it has been popped already\. Let the module"):
        Pop()(torch.ones(3, 4))
    namespace = Namespace()
    with pytest.raises(SkipError, match=r"^'a' has not been stashed in <Namespace '.+'>, or it has been popped"):
        Pop().isolate(namespace)(torch.ones(3, 4))


@pytest.mark.parametrize(
    ("declare", "words"),
    [
        (lambda: skippable(Pop.module_cls), "@skippable needs its names: @skippable(stash=[...], pop=[...])."),
        (lambda: skippable(stash="ab"), "stash='ab': expected a list of names, such as stash=['a']."),
        (lambda: skippable(pop=[1]), "pop=[1]: expected a list of names, such as pop=['a']."),
        (lambda: skippable(pop=1), "pop=1: expected a list of names, such as pop=['a']."),
        (lambda: skippable()(int), "@skippable is for subclasses of nn.Module, got <class 'int'>."),
        (lambda: Pop().isolate("a"), "isolate('a'): expected a Namespace or None."),
        (
            lambda: Pop().isolate(Namespace(), only=["b", "a"]),
            "isolate(only=...): 'b' is not declared by Pop, which has 'a'.",
        ),
    ],
)
def test_declarations_that_are_none(declare, words):
    with pytest.raises(SkippableError) as error:
        declare()

    assert str(error.value) == words


@pytest.mark.parametrize("pattern", ["*.module", lambda name, module: True], ids=["by name", "all"])
def test_the_module_inside_is_not_wrapped_alone(pattern):
    net = nn.Sequential(Stash(), Pop())

    with pytest.raises(WrapError, match=r"^`0\.module`: its forward is a generator.* for one in @skippable the"):
        wrap(net, pattern)
    assert not any("forward" in vars(module) for module in net.modules())


def test_nor_one_whose_forward_is_a_generator_in_disguise():
    class Disguised(nn.Module):
        def forward(self, x):
            return (command for command in [stash("a", x)])

    net = nn.Sequential(skippable(stash=["a"])(Disguised)())
    wrap(net, "0.module")

    with pytest.raises(SkippableError, match=r"Disguised: the module inside, `\.module`, is wrapped.* Wrap the"):
        net(leaf(3, 4))
