"""Forwards that are no plain methods, and what other libraries do to the forward of a wrapped module."""

import copy
import functools
import inspect
import pickle
import types

import pytest
import torch
from torch import nn

from logs import Log
from probes.regions import is_wrapped
from regions.comparing import equal, result
from torchremat import UnsupportedError, WrapError, checkpoint, plan, unwrap, wrap

ignores_jit = pytest.mark.filterwarnings("ignore:`torch.jit.*is deprecated")


def double(x):
    return torch.tanh(2 * x).sin()


class Layer:
    """Called as it is: no function, and nothing that binds."""

    def __init__(self, inner=None):
        self.inner = inner

    def __call__(self, x):
        return torch.tanh(x if self.inner is None else self.inner(x)).sin()


class Static(nn.Module):
    @staticmethod
    def forward(x):
        return double(x)


class OfClass(nn.Module):
    factor = 2.0

    @classmethod
    def forward(cls, x):
        return torch.tanh(cls.factor * x).sin()


class CallableOfClass(nn.Module):
    forward = Layer()


class PartialOfClass(nn.Module):
    forward = functools.partial(lambda factor, x: torch.tanh(factor * x).sin(), 2.0)


class BuiltinOfClass(nn.Module):
    forward = torch.tanh


class WithLinear(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)


class PartialMethod(WithLinear):
    def scaled(self, factor, x):
        return torch.tanh(factor * self.linear(x)).sin()

    forward = functools.partialmethod(scaled, 2.0)


class Cached(WithLinear):
    @functools.cached_property
    def forward(self):
        return functools.partial(PartialMethod.scaled, self, 2.0)


class CallableOfInstance(WithLinear):
    def __init__(self):
        super().__init__()
        self.forward = Layer(self.linear)


class PartialOfInstance(WithLinear):
    def __init__(self):
        super().__init__()
        self.forward = functools.partial(PartialMethod.scaled, self, 2.0)


class MethodOfInstance(WithLinear):
    def __init__(self):
        super().__init__()
        self.forward = types.MethodType(lambda self, x: torch.tanh(self.linear(x)).sin(), self)


class BuiltinOfInstance(nn.Module):
    def __init__(self):
        super().__init__()
        self.forward = torch.tanh


class Property(WithLinear):
    @property
    def forward(self):
        return self._train if self.training else self._eval

    def _train(self, x):
        return torch.tanh(self.linear(x)).sin()

    def _eval(self, x):
        return torch.tanh(self.linear(x))


class Settable(WithLinear):
    @property
    def forward(self):
        return self.__dict__.get("kept") or Property._train.__get__(self)

    @forward.setter
    def forward(self, value):
        self.__dict__["kept"] = value


REPLACEABLE = [
    Static,
    OfClass,
    CallableOfClass,
    # Python 3.13 warns that later versions bind it as a method.
    pytest.param(PartialOfClass, marks=pytest.mark.filterwarnings("ignore:functools.partial will be")),
    BuiltinOfClass,
    PartialMethod,
    Cached,
    CallableOfInstance,
    PartialOfInstance,
    MethodOfInstance,
    BuiltinOfInstance,
]


def net(kind):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), kind(), nn.Linear(8, 8), kind(), nn.Linear(8, 8))


def trains_as_plain(ours, plain, rows=16):
    x = torch.randn(rows, 8, generator=torch.Generator().manual_seed(1))
    return equal(result(lambda: ours(x), [], [ours]), result(lambda: plain(x), [], [plain]))


def counted(monkeypatch, name="tanh"):
    """Count calls of an operation of torch, which every forward here calls once for each of its own."""
    calls = []
    plain = getattr(torch, name)
    monkeypatch.setattr(torch, name, lambda *args: calls.append(1) or plain(*args))
    return calls


# ---------------------------------------------------------------------------------------- forwards of every kind


# A static forward was given the module, and a callable object as a class's forward raised that it has no `__get__`.
@pytest.mark.parametrize("kind", REPLACEABLE)
def test_wrapped_whatever_kind_of_forward_it_is(kind, monkeypatch):
    model, plain = net(kind), net(kind)
    before = dict(vars(plain[1]))
    calls = counted(monkeypatch)
    wrap(model, lambda name, module: type(module) is kind)

    assert trains_as_plain(model, plain)
    if "Builtin" not in kind.__name__:  # which took the function when the class was made
        assert len(calls) == 2 * 3
    unwrap(model)
    assert trains_as_plain(model, plain)
    assert vars(model[1]).keys() == before.keys() | vars(plain[1]).keys()


@pytest.mark.parametrize("kind", [*REPLACEABLE, Property, Settable])
def test_checkpointed_whatever_kind_of_forward_it_is(kind):
    model, plain = net(kind), net(kind)

    def ours(x):
        for layer in model:
            x = checkpoint(layer, x)
        return x

    def by_forward(x):
        for layer in model:
            x = checkpoint(layer.forward, x)
        return x

    x = torch.randn(16, 8)
    expected = result(lambda: plain(x), [], [plain])
    assert equal(result(lambda: ours(x), [], [model]), expected)
    assert equal(result(lambda: by_forward(x), [], [model]), expected)


class Wide(nn.Module):
    """Blocks with a forward of a kind, of which a plan has to recompute some."""

    def __init__(self, kind):
        super().__init__()
        torch.manual_seed(0)
        blocks = [nn.Sequential(nn.Linear(8, 8), nn.Tanh(), kind(), nn.Sigmoid(), kind()) for _ in range(4)]
        self.blocks = nn.Sequential(*blocks)

    def forward(self, x):
        return self.blocks(x)


# The same in a plan, which measures each unit. What a property returns is a part of the unit that calls it.
@pytest.mark.parametrize("kind", [Static, CallableOfClass, OfClass, Cached, CallableOfInstance, Property, Settable])
def test_planned_whatever_kind_of_forward_it_is(kind):
    model, plain = Wide(kind), Wide(kind)
    x = torch.randn(512, 8, generator=torch.Generator().manual_seed(1))

    def step(model):
        return model(x).sum()

    plan(model, step, budget="75%").apply(model)

    assert any(map(is_wrapped, model.modules()))
    assert trains_as_plain(model, plain, rows=512)


# A class's property is found before any attribute of the instance: a region that is put there would never run, and the
# setter of the second would have been called with it.
@pytest.mark.parametrize("kind", [Property, Settable])
def test_a_property_cannot_be_wrapped(kind):
    model = net(kind)
    with pytest.raises(WrapError, match=rf"`1`: its forward is a property of the class {kind.__name__}.*checkpoint"):
        wrap(model, "1")
    assert "kept" not in vars(model[1])
    assert trains_as_plain(wrap(model, lambda name, _: not name), net(kind))


# Nothing of such a module goes through its forward, so wrapping it did nothing, in silence.
def test_a_call_that_is_no_forward_cannot_be_wrapped():
    class Called(WithLinear):
        def __call__(self, x):
            return torch.tanh(self.linear(x))

    with pytest.raises(WrapError, match="`1`: the class Called has a `__call__` and no forward"):
        wrap(net(Called), "1")


# The copy's forward held the original's layer, so the copy trained the original's weights.
@pytest.mark.parametrize("kind", [CallableOfInstance, PartialOfInstance, MethodOfInstance])
def test_copies_have_a_forward_of_their_own(kind):
    copied = copy.deepcopy(wrap(net(kind), lambda name, module: type(module) is kind))
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.mul_(2)
    plain = net(kind)
    plain.load_state_dict(copied.state_dict())

    assert trains_as_plain(copied, plain)


def test_a_forward_that_is_copied_alone_goes_on_with_its_module():
    model = wrap(net(PartialOfInstance), "1")
    forward, copied = copy.deepcopy([model[1].forward, model[1]])

    assert forward.module is model[1] and forward.own.args[0] is model[1]
    assert copied is not model[1] and copied.forward.module is copied


# ------------------------------------------------------------------------------- what others do to a forward


def cast_outputs(forward):
    """As accelerate's `convert_outputs_to_fp32`, which has an object between two functions."""

    class Converts:
        def __init__(self, forward):
            # An attribute of this name in the forward's `__dict__` would be in its place after `update_wrapper`.
            self.forward = forward
            functools.update_wrapper(self, forward)

        def __call__(self, *args, **kwargs):
            return self.forward(*args, **kwargs).float()

    converts = Converts(forward)

    def converted(*args, **kwargs):
        return converts(*args, **kwargs)

    converted.__wrapped__ = converts
    return converted


def prepare(model):
    """As `accelerate.Accelerator(mixed_precision="bf16").prepare(model)`."""
    model._original_forward = model.forward
    autocast = torch.autocast("cpu", torch.bfloat16)
    if not hasattr(model.forward, "__func__"):
        model.forward = cast_outputs(autocast(model.forward))
    else:
        model.forward = types.MethodType(autocast(model.forward.__func__), model)
        model.forward = types.MethodType(cast_outputs(model.forward.__func__), model)
    return model


def unprepare(model):
    """As `accelerate.Accelerator.unwrap_model(model, keep_fp32_wrapper=False)`."""
    forward = model.forward
    original = model.__dict__.pop("_original_forward", None)
    if original is not None:
        while hasattr(forward, "__wrapped__"):
            forward = forward.__wrapped__
            if forward == original:
                break
        model.forward = types.MethodType(forward, model)
    return model


class Block(WithLinear):
    def __init__(self):
        super().__init__()
        self.ran = Log()

    def forward(self, x):
        self.ran.append(1)
        return torch.tanh(self.linear(x)).sin()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.Sequential(Block(), Block(), Block())

    def forward(self, x):
        return self.blocks(x).sin()


def runs(model):
    found = [len(block.ran) for block in model.blocks]
    for block in model.blocks:
        block.ran.clear()
    return found


def wrapped_root(model):
    return wrap(model, lambda name, _: not name)


def wrapped_blocks(model):
    return wrap(model, "blocks.*")


def planned(model):
    x = torch.randn(512, 8)

    def step(model):
        return model(x).sum()

    plan(model, step, budget="90%").apply(model)
    runs(model)
    return model


WAYS = [wrapped_root, wrapped_blocks, planned]


# Its unwrapping found the wrapped forward by `__wrapped__` and bound it to the model once more: "takes 2 positional
# arguments but 3 were given".
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.filterwarnings("ignore:.*made under other conditions. autocast:torchremat.PlanWarning")  # planned before
def test_a_model_that_accelerate_prepares_and_unwraps(way, order):
    model, plain = Net(), prepare(Net())
    model = prepare(way(model)) if order == "before" else way(prepare(model))

    assert trains_as_plain(model, plain, rows=512)
    recomputed = runs(model)
    assert sum(recomputed) > 3 and any(map(is_wrapped, model.modules()))

    unprepare(model), unprepare(plain)
    # What was taken off is what accelerate had put on, and the regions are there still.
    assert trains_as_plain(model, plain, rows=512)
    if not (way is planned and order == "after"):  # whose units are prepared ones
        assert runs(model) == recomputed
    assert any(map(is_wrapped, model.modules()))

    unwrap(model)
    runs(model)
    assert trains_as_plain(model, plain, rows=512)
    assert runs(model) == [1, 1, 1] and not any(map(is_wrapped, model.modules()))


# The real one, where it is installed: what is imitated above is what it does.
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.filterwarnings("ignore:.*made under other conditions. autocast:torchremat.PlanWarning")  # planned before
def test_accelerate_itself(way, order):
    accelerate = pytest.importorskip("accelerate")
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)  # there is one for all of a process
    accelerator = accelerate.Accelerator(mixed_precision="bf16", cpu=True)
    model, plain = Net(), accelerator.prepare(Net())
    model = accelerator.prepare(way(model)) if order == "before" else way(accelerator.prepare(model))

    assert trains_as_plain(model, plain, rows=512)
    for one in (model, plain):
        accelerator.unwrap_model(one, keep_fp32_wrapper=False)
    runs(model)
    assert trains_as_plain(model, plain, rows=512)
    assert sum(runs(model)) > 3 and any(map(is_wrapped, model.modules()))


# The copy's forward is accelerate's function around ours, and functions are not copied: ours ran the original.
def test_a_copy_of_a_prepared_model_runs_its_own_weights():
    model = copy.deepcopy(prepare(wrapped_root(Net())))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    plain = Net()
    plain.load_state_dict(model.state_dict())

    assert trains_as_plain(model, prepare(plain))
    assert runs(model) == [2, 2, 2]
    assert unwrap(unprepare(model)) is model and not is_wrapped(model)


def test_a_copy_of_a_prepared_model_does_not_guard_the_objects_of_the_original():
    model = copy.deepcopy(prepare(wrap(Net(), lambda name, _: not name, guard=[nn.Linear(2, 2)])))

    with pytest.raises(WrapError, match="which would guard the objects of the original"):
        model(torch.randn(2, 8))


# Another library's hooks, put around the forward as accelerate does for offloading: `unwrap` found nothing to take off
# and said nothing, and a second `wrap` made regions of regions.
@pytest.mark.parametrize("put_on", [prepare, lambda model: hooked(model)])
def test_what_others_put_around_a_region_is_theirs_to_take_off(put_on):
    model = wrapped_blocks(wrapped_root(Net()))
    put_on(model)

    assert is_wrapped(model)
    with pytest.raises(WrapError, match="another library has put something around the forward of the model"):
        unwrap(model)
    assert all(map(is_wrapped, model.blocks))
    with pytest.raises(WrapError, match="wrapped already"):
        wrapped_root(model)


def hooked(model):
    """As `accelerate.hooks.add_hook_to_module`."""
    old = model._old_forward = model.forward

    def new(module, *args, **kwargs):
        return module._old_forward(*args, **kwargs)

    model.forward = functools.update_wrapper(functools.partial(new, model), old)
    return model


def test_hooks_that_others_put_around_a_region():
    model = hooked(wrapped_root(Net()))

    assert trains_as_plain(model, Net()) and runs(model) == [2, 2, 2]
    model.forward = model._old_forward
    assert trains_as_plain(model, Net()) and runs(model) == [2, 2, 2]
    assert not is_wrapped(unwrap(model))


# A plan's own checks run the model plainly; they ran the plan instead, as it was found by nobody.
def test_a_plan_under_what_others_put_around_is_not_taken_off_in_silence():
    model = Net()
    x = torch.randn(512, 8)
    made = plan(model, lambda model: model(x).sum(), budget="150%")
    made.apply(model)
    prepare(model)

    assert made.is_on(model)
    with pytest.raises(WrapError, match="another library has put something around the forward"):
        made.remove(model)
    unprepare(model)
    made.remove(model)
    assert not any(map(is_wrapped, model.modules()))


def test_pickling_what_was_bound_anew_says_what_to_do():
    model = unprepare(prepare(wrapped_root(Net())))

    with pytest.raises(UnsupportedError, match=r"cannot be pickled.*unwrap\(model\)"):
        pickle.dumps(model)
    assert trains_as_plain(pickle.loads(pickle.dumps(unwrap(model))), Net())


def marked(function):
    function.mark = "seen"
    return function


class Marked(WithLinear):
    @marked
    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        """Return what it returns."""
        return torch.tanh(scale * self.linear(x))


# What looks at a forward sees the one that was wrapped.
def test_a_wrapped_forward_shows_what_the_forward_shows():
    module, plain = Marked(), Marked()
    wrap(module, lambda name, _: not name)
    forward, expected = module.forward, plain.forward

    for name in ("__name__", "__qualname__", "__module__", "__doc__", "__annotations__", "__kwdefaults__", "mark"):
        assert getattr(forward, name) == getattr(expected, name), name
        if name != "__name__":
            assert getattr(forward.__func__, name) == getattr(expected.__func__, name), name
    assert forward.__self__ is module
    assert inspect.signature(forward.__func__) == inspect.signature(expected.__func__)
    assert inspect.getsource(forward) == inspect.getsource(expected)
    assert inspect.unwrap(forward) == Marked.forward.__get__(module)
    assert not hasattr(forward, "unknown") and not hasattr(forward.__func__, "unknown")
    assert forward.__func__ == forward.__func__ and hash(forward.__func__) == hash(forward.__func__)
    assert not hasattr(wrap(Static(), lambda name, _: not name).forward, "__func__")


# ------------------------------------------------------------------------------------------------- TorchScript


# The advice was to "wrap it before scripting", which failed with "no attribute `__globals__`".
@ignores_jit
@pytest.mark.parametrize("way", [wrapped_root, wrapped_blocks])
def test_a_wrapped_module_cannot_be_scripted(way):
    model = way(Net())

    with pytest.raises(UnsupportedError, match=r"is wrapped by torchremat.*torch\.jit\.script.*unwrap\(model\)"):
        torch.jit.script(model)


# A trace had in it what a region does beside the forward; two regions differed in it, so that torch refused the trace.
@ignores_jit
@pytest.mark.parametrize("check", ["metadata", "values"])
def test_a_trace_is_of_the_plain_calls(check):
    model, x = wrap(Net(), "blocks.*", check=check), torch.randn(4, 8)

    traced = torch.jit.trace(model, x)
    function = torch.jit.trace(lambda t: checkpoint(torch.sin, t).cos(), x)

    plain = Net()
    assert trains_as_plain(traced, plain)
    assert traced.code == torch.jit.trace(plain, x).code
    assert function.code == torch.jit.trace(lambda t: torch.sin(t).cos(), x).code
