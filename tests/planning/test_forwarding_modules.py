"""Models inside of what frameworks put around them: attributes that go on to the one inside, forwards put anew."""

import functools
from types import MethodType

import pytest
import torch
from torch import nn

from torchremat import Adaptive, Plan, fit, frontier, measure, plan, saved, unwrap, verify, wrap
from turns import meetings

BATCH = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))


def net():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 8), nn.Tanh()) for _ in range(4)))


def loss_of(model):
    return model(BATCH).square().mean()


class Reading(nn.Module):
    """As PEFT's and TRL's: attributes that it lacks are those of the one inside."""

    def __init__(self, inner):
        super().__init__()
        self.base_model = inner

    def forward(self, x):
        return self.base_model(x)

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "base_model":
                raise
            return getattr(self.base_model, name)


class ValueHead(Reading):
    """As TRL's: a head beside, and methods of the one inside as attributes of its own."""

    def __init__(self, inner):
        super().__init__(inner)
        self.head = nn.Linear(8, 1)
        self.generate = inner.forward

    def forward(self, x):
        hidden = self.base_model(x)
        return hidden * self.head(hidden)


class Writing(Reading):
    """What is set on it is set on the one inside, as in Lightning Fabric."""

    def __init__(self, inner):
        super().__init__(inner)
        self.__dict__["is_made"] = True

    def __setattr__(self, name, value):
        if "is_made" in self.__dict__:
            setattr(self.base_model, name, value)
        else:
            super().__setattr__(name, value)

    def __delattr__(self, name):
        delattr(self.base_model, name)


class WritingBoth(Writing):
    """Fabric's own rule: what the one inside has is set there, and what it has itself on itself too."""

    def __setattr__(self, name, value):
        if "is_made" not in self.__dict__:
            super().__setattr__(name, value)
            return
        if hasattr(self.base_model, name):
            setattr(self.base_model, name, value)
        if name in dir(self):
            nn.Module.__setattr__(self, name, value)


class Refusing(Reading):
    """Nothing may be set on it any more."""

    def __init__(self, inner):
        super().__init__(inner)
        self.__dict__["is_made"] = True

    def __setattr__(self, name, value):
        if "is_made" in self.__dict__ and name != "training":
            raise AttributeError(f"{name} cannot be set")
        super().__setattr__(name, value)


def patched(inner):
    """As accelerate does it: a method of the instance around the forward, and the forward beside it."""
    inner._original_forward = inner.forward
    function = inner.forward.__func__

    @functools.wraps(function)
    def cast(self, *args, **kwargs):
        return function(self, *args, **kwargs).float()

    inner.forward = MethodType(cast, inner)
    return inner


KINDS = {
    "reading": Reading,
    "value head": ValueHead,
    "writing": Writing,
    "writing both": WritingBoth,
    "refusing": Refusing,
    "patched": patched,
    "writing around patched": lambda inner: Writing(patched(inner)),
    "writing around writing both": lambda inner: Writing(WritingBoth(inner)),
    "reading around refusing": lambda inner: ValueHead(Refusing(inner)),
}


def gradients(model):
    model.zero_grad()
    loss = loss_of(model)
    loss.backward()
    return [loss.detach(), *(one.grad.clone() for one in model.parameters())]


def attributes(model):
    return [(name, dict(vars(module))) for name, module in model.named_modules()]


@pytest.mark.parametrize("kind", KINDS)
def test_a_plan_is_put_on_and_taken_off_and_its_gradients_are_those_of_the_plain_step(kind):
    model = KINDS[kind](net())
    expected, before = gradients(model), attributes(model)
    model.zero_grad()

    made = plan(model, loss_of, budget="90%", cost="flops", operators=False)
    assert attributes(model) == before
    made.apply(model)

    assert made.is_on(model)
    assert measure(model, loss_of).recomputed_flops > 0
    assert all(map(torch.equal, gradients(model), expected))
    assert verify(model, loss_of).is_exact
    made.remove(model)
    assert attributes(model) == before


@pytest.mark.parametrize("name", ["", "*"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_wrapped_is_a_region_and_is_unwrapped(kind, name):
    model = KINDS[kind](net())
    expected, before = gradients(model), attributes(model)

    wrap(model, name)

    model.zero_grad()
    assert measure(model, loss_of).recomputed_flops > 0
    assert all(map(torch.equal, gradients(model), expected))
    unwrap(model)
    assert attributes(model) == before


CALLS = {
    "fit": lambda model: fit(model, loss_of, budget="90%", cost="flops", operators=False),
    "frontier": lambda model: frontier(model, loss_of, cost="flops", operators=False, points=3),
    "saved": lambda model: saved(model, loss_of),
    "learn": lambda model: Adaptive(model, lambda model, _: loss_of(model), budget="1GiB").learn(BATCH),
}


@pytest.mark.parametrize(("kind", "call"), meetings(KINDS, CALLS, each=2))
def test_every_other_call_leaves_its_attributes_alone(kind, call):
    model = KINDS[kind](net())
    expected, before = gradients(model), attributes(model)
    model.zero_grad()

    CALLS[call](model)

    assert attributes(unwrap(model)) == before
    assert all(map(torch.equal, gradients(model), expected))


def test_a_plan_of_a_wrapper_is_loaded_for_another(tmp_path):
    model, other = Writing(net()), Writing(net())
    plan(model, loss_of, budget="90%", cost="flops", operators=False).save(tmp_path / "plan.json")

    Plan.load(tmp_path / "plan.json").apply(other)

    assert measure(other, loss_of).recomputed_flops > 0
    assert all(map(torch.equal, gradients(other), gradients(model)))
