"""A module that is called in each step, while what it reaches changes: before a forward, or before its backward."""

import gc
import types
import weakref
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from torchremat import checkpoint, checkpointed, unwrap, wrap
from torchremat.state.roots import known_root


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


class Slotted:
    __slots__ = ("gain",)

    def __init__(self):
        self.gain = 1.0


def scaled(x, box):
    return x * box["gain"]


settings = types.ModuleType("settings")
settings.gain = 1.0


class Scaled(nn.Module):
    gain_of_class = 1.0

    def __init__(self):
        super().__init__()
        self.hidden, self.pair = [nn.Linear(4, 4)], (nn.Linear(4, 4), [1.0])
        self.slotted, self.options = Slotted(), {"inner": {"gain": 1.0}}
        self.part, self.array = partial(scaled, box={"gain": 1.0}), np.ones(4)
        self.function = closed_over([1.0])
        self.linear = nn.Linear(4, 4)
        self.box = types.SimpleNamespace(gain=1.0)
        self.state = State()
        self.sealed = Sealed()
        self.gains = [1.0]
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x):
        gain = self.box.gain * self.state.gain * self.gain_of_class * self.sealed.gain * sum(self.gains) * self.scale
        gain = gain * self.slotted.gain * self.options["inner"]["gain"] * float(self.array[0])
        gain = gain * getattr(settings, "late", settings.gain)
        x = self.pair[0](self.hidden[0](x)) * self.pair[1][0] + self.part(x) * self.function(x)
        return torch.tanh(self.linear(x) * gain * factor(x))


def closed_over(items):
    return lambda x: x * items[0]


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
    vars(settings).pop("late", None)


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


def replace_hidden(block):
    block.inner.hidden[0] = nn.Linear(4, 4)


def replace_list_of_hidden(block):
    block.inner.hidden = [nn.Linear(4, 4)]


def replace_pair(block):
    block.inner.pair = (block.inner.pair[0], [2.0])


def set_in_pair(block):
    block.inner.pair[1][0] = 2.0


def set_slot(block):
    block.inner.slotted.gain = 2.0


def set_in_dict_of_dicts(block):
    block.inner.options["inner"] = {"gain": 2.0}


def set_in_keywords(block):
    block.inner.part.keywords["box"]["gain"] = 2.0


def set_array(block):
    block.inner.array[...] = 2.0


def set_in_cell(block):
    block.inner.function.__closure__[0].cell_contents[0] = 2.0


def set_cell(block):
    block.inner.function.__closure__[0].cell_contents = [2.0]


def set_late_name(_):
    settings.late = 2.0


def rename(block):
    own = block.inner.__dict__
    own["other_box"] = own.pop("box")
    own["box"] = types.SimpleNamespace(gain=3.0)


def swap_weights(block):
    torch.utils.swap_tensors(block.inner.linear.weight, block.inner.hidden[0].weight)


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
    replace_hidden,
    replace_list_of_hidden,
    replace_pair,
    set_in_pair,
    set_slot,
    set_in_dict_of_dicts,
    set_in_keywords,
    set_array,
    set_in_cell,
    set_cell,
    set_late_name,
    rename,
    freeze,
]


def root_of(module):
    return known_root([module])[0]


def plainly(block):
    return block


def in_checkpoint(block):
    return partial(checkpoint, block)


def in_one_checkpointed(block):
    return checkpointed(lambda x: block(x))


def wrapped(block):
    return wrap(block, "inner")


def stepped(block):
    """Write to what an optimizer and a counter write to: no structure."""
    with torch.no_grad():
        for one in block.parameters():
            one.add_(0.01)
    block.inner.calls = getattr(block.inner, "calls", 0) + 1


def results(way, change, when, steps=5):
    """Return outputs and gradients of some steps; before one of them something changes, or within it."""
    torch.manual_seed(0)
    reset()
    block, x = Block(), torch.randn(4, 4, requires_grad=True)
    run, found = way(block), []
    stepped(block)
    for step in range(steps):
        if way is wrapped and 1 < step < steps - 1:
            assert root_of(block.inner).recall() is not None, "a write to a parameter, or a count, is no structure"
        if step == steps - 2 and when == "before":
            change(block)
        output = run(x)
        if step == steps - 2 and when == "between":
            change(block)
        output.sum().backward()
        found += [output.detach(), x.grad.clone()]
        found += [one.grad for one in block.parameters()]
        x.grad = None
        block.zero_grad()
        if step < steps - 2:
            stepped(block)
    return found


@pytest.mark.parametrize("way", [in_checkpoint, in_one_checkpointed, wrapped])
@pytest.mark.parametrize("when", ["before", "between"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_noticed(change, when, way):
    plain = results(plainly, change, when)
    ours = results(way, change, when)

    assert len(plain) == len(ours)
    assert all(a is b or torch.equal(a, b) for a, b in zip(plain, ours, strict=True))


def test_a_default_device_is_no_reason_to_search():
    block = wrap(Block(), "inner")
    with torch.get_default_device():
        for _ in range(2):
            block(torch.ones(4, 4)).sum().backward()

    assert root_of(block.inner).recall() is not None


def test_a_tensor_in_place_of_an_equal_number_is_another_structure():
    # It would be in no list of tensors, and a write to it would go unseen.
    block = wrap(Block(), "inner")
    block.inner.number = 1.0
    for _ in range(2):
        block(torch.ones(4, 4)).sum().backward()
    root = root_of(block.inner)
    assert root.recall() is not None

    block.inner.number = torch.tensor(1.0)

    assert root.recall() is None


def test_a_tensor_that_has_another_ones_attributes_is_not_as_before():
    # The next step shared a snapshot that knew only the attributes which the other tensor has now.
    block = wrap(Block(), "inner")
    weight, other = block.inner.linear.weight, nn.Parameter(torch.eye(4))
    weight.gain, other.gain = 1.0, 2.0
    for _ in range(2):
        block(torch.ones(4, 4)).sum().backward()
    first = root_of(block.inner).recall()

    torch.utils.swap_tensors(weight, other)
    second = root_of(block.inner).recall()

    assert [vars(block.inner.linear.weight) in one.contents.all_dicts for one in (first, second)] == [False, True]


def dies(root, change):
    """Whether an object dies by a change, without the cycle collector."""
    gc.disable()
    try:
        died = weakref.ref(change())
        return died() is None
    finally:
        gc.enable()


def popped(own, name, new=None):
    """A change that takes an attribute away, and returns what it was."""

    def change():
        found = own[name]
        own[name] = new
        return found

    return change


def test_a_structure_keeps_nothing_alive():
    block = wrap(Block(), "inner")
    for _ in range(2):
        block(torch.ones(4, 4)).sum().backward()
    inner, root = block.inner, root_of(block.inner)
    assert root.recall() is not None

    assert dies(root, popped(inner.linear._parameters, "weight"))
    assert dies(root, popped(inner.__dict__, "state"))
    assert dies(root, popped(inner.hidden, 0))
    assert dies(root, popped(inner._modules, "linear"))


@pytest.mark.parametrize("is_unwrapped", [False, True])
def test_a_model_dies_with_its_structures(is_unwrapped):
    block = wrap(Block(), "inner")
    block.inner.cache = []
    for _ in range(2):
        block(torch.ones(4, 4)).sum().backward()
    block.inner.cache.append(block)  # after the last call: a cycle of the user's own would need the collector
    block.inner.cache.clear()
    parts = [block, block.inner, block.inner.linear, block.inner.linear.weight, block.inner.hidden[0]]
    alive = [weakref.ref(one) for one in parts]
    parts.clear()
    gc.collect()
    gc.disable()
    try:
        if is_unwrapped:
            unwrap(block)
        del block
        assert [one() for one in alive] == [None] * 5
    finally:
        gc.enable()
