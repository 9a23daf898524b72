"""A module that is called in each step, while what it reaches changes: before a forward, or before its backward."""

import types

import pytest
import torch
from torch import nn

from torchremat import checkpoint
from torchremat.state.reach import reach
from torchremat.state.snapshot import Snapshot
from torchremat.state.world import World


class State:
    def __init__(self):
        self.gain = 1.0


class Sealed:
    """Hides its attributes from code that asks it for all of them."""

    gain = 1.0

    def __init__(self):
        self.gain = 3.0

    def __getattribute__(self, name):
        if name == "__dict__":
            raise AttributeError(name)
        return object.__getattribute__(self, name)


class Scaled(nn.Module):
    gain_of_class = 1.0

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.box = types.SimpleNamespace(gain=1.0)
        self.state = State()
        self.sealed = Sealed()
        self.gains = [1.0]
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x):
        gain = self.box.gain * self.state.gain * self.gain_of_class * self.sealed.gain * sum(self.gains) * self.scale
        return torch.tanh(self.linear(x) * gain * factor(x))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Scaled()
        self.later = None

    def forward(self, x):
        return self.inner(x) if self.later is None else self.later(self.inner(x))


def factor(x):
    return x.sin()


def other_factor(x):
    return x.cos()


FACTOR, FACTOR_CODE = factor, factor.__code__


@pytest.fixture(autouse=True)
def everything_is_as_before():
    yield
    reset()


def reset():
    globals()["factor"] = FACTOR
    factor.__code__ = FACTOR_CODE
    Scaled.gain_of_class = 1.0


def set_box(block):
    block.inner.box = types.SimpleNamespace(gain=2.0)


def set_inside_box(block):
    block.inner.box.gain = 2.0


def set_attributes_of_state(block):
    block.inner.state.__dict__ = {"gain": 2.0}


def set_inside_sealed(block):
    block.inner.sealed.gain = 2.0


def delete_attribute(block):
    del block.inner.sealed.gain  # the class has one as well


def grow_list(block):
    block.inner.gains.append(1.0)


def set_child(block):
    block.later = nn.Linear(4, 4).requires_grad_(False)


def set_weight(block):
    block.inner.linear.weight = nn.Parameter(torch.eye(4))


def replace_module(block):
    block.inner.linear = nn.Linear(4, 4)


def register_buffer_again(block):
    block.inner.register_buffer("scale", torch.full((4,), 2.0))


def set_hook(block):
    block.inner.linear.register_forward_hook(lambda module, args, output: output * 2)


def set_class(_):
    Scaled.gain_of_class = 2.0


def rebind_global(_):
    globals()["factor"] = other_factor


def set_code(_):
    factor.__code__ = other_factor.__code__


def freeze(block):
    block.inner.linear.requires_grad_(False)


CHANGES = [
    set_box,
    set_inside_box,
    set_attributes_of_state,
    set_inside_sealed,
    delete_attribute,
    grow_list,
    set_child,
    set_weight,
    replace_module,
    register_buffer_again,
    set_hook,
    set_class,
    rebind_global,
    set_code,
    freeze,
]


def results(run, change, when):
    """Return outputs and gradients of three steps; before the second one something changes, or within it."""
    torch.manual_seed(0)
    reset()
    block, x = Block(), torch.randn(4, 4, requires_grad=True)
    found = []
    for step in range(3):
        if step == 1 and when == "before":
            change(block)
        output = run(block, x)
        if step == 1 and when == "between":
            change(block)
        output.sum().backward()
        found += [output.detach(), x.grad.clone()]
        found += [one.grad for one in block.parameters()]
        x.grad = None
        block.zero_grad()
    return found


@pytest.mark.parametrize("when", ["before", "between"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_noticed(change, when):
    plain = results(lambda block, x: block(x), change, when)
    ours = results(checkpoint, change, when)

    assert len(plain) == len(ours)
    assert all(a is b or torch.equal(a, b) for a, b in zip(plain, ours, strict=True))


def test_a_tensor_that_has_another_ones_attributes_is_not_as_before():
    # The next step of a loop shared a snapshot that knew only the attributes which the other tensor has now.
    holder = types.SimpleNamespace(scale=torch.ones(2))
    other = torch.full((2,), 2.0)
    holder.scale.gain, other.gain = 1.0, 2.0
    world = World()
    reach(world, [holder])
    snapshot = Snapshot(world)
    snapshot.lasts = True  # as with a weight, which is not copied
    was_here = snapshot.is_here()

    torch.utils.swap_tensors(holder.scale, other)

    assert was_here
    assert not snapshot.is_here()
