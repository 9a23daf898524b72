"""Modules whose state changes in the forward and between forward and backward: attributes, children, flags, lazies."""

import types
from collections import deque
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrize, prune
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

from regions.comparing import leaf
from regions.worlds import REGIONS, Programs, assert_agrees_in_all
from torchremat.errors import MutationError

program = Programs()
# These replace the module's own forward, or look at it, which `wrap` does as well.
NOT_WRAPPED = tuple(way for way in REGIONS if way != "wrap")


# ------------------------------------------------------------------------------------------------- plain attributes


@program
def a_flag_beside_a_buffer(run):
    # Data-dependent initialisation, as of weight normalisation and of ActNorm.
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.done = nn.Linear(4, 4), False
            self.register_buffer("s", torch.ones(4))

        def forward(self, x):
            if not self.done:
                self.s.copy_(1 / x.std(0))
                self.done = True
            return torch.tanh(self.linear(x * self.s))

    block, x = Scaled(), leaf(8, 4)
    loss = run(block, x).sum()
    loss.backward()
    return block, x, loss


@program
def a_parameter_that_is_initialised_by_the_data(run):
    class ActNorm(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale, self.initialized = nn.Parameter(torch.ones(4)), 0

        def forward(self, x):
            if self.initialized == 0:
                self.scale = nn.Parameter(1 / x.detach().std(0))
                self.initialized += 1
            return (x * self.scale).sin()

    block, x = ActNorm(), leaf(8, 4)
    loss = run(block, run(block, x)).sum()
    loss.backward()
    return block, x, loss


@program
def a_sparse_buffer(run):
    class Graph(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("adjacency", torch.eye(4).to_sparse())

        def forward(self, x):
            return torch.sparse.mm(self.adjacency, x).sin()

    block, x = Graph(), leaf(4, 4)
    loss = run(block, run(block, x)).sum()
    loss.backward()
    return x, loss


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.calls = nn.Linear(4, 4), 0

    def forward(self, x):
        self.calls += 1
        return torch.tanh(self.linear(x) * self.calls)


@program
def a_module_that_counts_its_calls(run):
    block, x = Counting(), leaf(4, 4)
    loss = run(block, run(block, run(block, x))).sum()
    loss.backward()
    return block, x, loss


class Tempered(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.temperature = nn.Linear(4, 4), 1.0

    def forward(self, x):
        return (self.linear(x) / self.temperature).softmax(-1)


@program
def a_temperature_that_is_annealed(run):
    block, x, total = Tempered(), leaf(4, 4), 0
    for temperature in (1.0, 0.5, 0.1):
        block.temperature = temperature
        total = total + run(block, x).square().sum()
    block.temperature = 7.0
    total.backward()
    return block, x, total


@program
def an_attribute_that_comes_and_goes(run):
    class Optional(nn.Module):
        def forward(self, x):
            return x.sin() * self.gain if hasattr(self, "gain") else x.cos() * x

    block, x = Optional(), leaf(4, 4)
    one = run(block, x)
    block.gain = 3.0
    two = run(block, x)
    del block.gain
    loss = (one * two).sum()
    loss.backward()
    block.gain = 4.0
    return block, x, loss


@program
def a_string_that_chooses(run):
    class Chosen(nn.Module):
        def __init__(self):
            super().__init__()
            self.mode, self.modes = "sin", {"sin": torch.sin, "exp": torch.exp}

        def forward(self, x):
            return self.modes[self.mode](x) * x

    block, x = Chosen(), leaf(4, 4)
    loss = run(block, x).sum()
    block.mode = "exp"
    loss = loss + run(block, x).sum()
    block.modes["exp"] = torch.tanh
    loss.backward()
    return block, x, loss


@program
def a_property_over_a_hidden_attribute(run):
    class Hidden(nn.Module):
        def __init__(self):
            super().__init__()
            self._gain, self.linear = 1.0, nn.Linear(4, 4)

        @property
        def gain(self):
            return self._gain

        @gain.setter
        def gain(self, value):
            self._gain = value * 2

        def forward(self, x):
            self.gain = self.gain + 1
            return torch.tanh(self.linear(x) * self.gain / 10)

    block, x = Hidden(), leaf(4, 4)
    loss = (run(block, x) * run(block, x)).sum()
    block.gain = 0.0
    loss.backward()
    return block, x, loss


@program
def an_attribute_of_a_buffer_that_the_forward_writes(run):
    # The recompute is shown a copy of such a buffer, and the copy had no attributes.
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("count", torch.zeros(4))
            self.count.gain = 2.0

        def forward(self, x):
            x = torch.tanh(x * self.count.gain)
            self.count.add_(1.0)
            return x * self.count

    module, x = Scaled(), leaf(4, 4)
    loss = run(module, x).sum()
    module.count.gain = 3.0
    loss.backward()
    return module, x, loss


@program
def a_weight_that_is_cached_between_regions(run):
    # `parametrize.cached` keeps it in a global of torch, which is empty when the backward runs.
    module, x = nn.Sequential(weight_norm(nn.Linear(4, 4)), nn.Tanh()), leaf(4, 4)
    with parametrize.cached():
        loss = run(module, run(module, x)).sum()
    loss.backward()
    return module, x, loss


@program
def a_weight_that_is_cached_in_backward_too(run):
    module, x = nn.Sequential(weight_norm(nn.Linear(4, 4)), nn.Tanh()), leaf(4, 4)
    with parametrize.cached():
        loss = run(module, run(module, x)).sum()
        loss.backward()
    return module, x, loss


@program
def a_tensor_attribute_that_is_no_buffer(run):
    class Averaged(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.mean = nn.Linear(4, 4), torch.zeros(4)

        def forward(self, x):
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
            return torch.tanh(self.linear(x - self.mean))

    block, x = Averaged(), leaf(4, 4)
    loss = (run(block, x) + run(block, x * 2)).sum()
    loss.backward()
    return block, x, loss


@program(raises=MutationError)
def a_large_tensor_attribute_that_is_written_in_place(run):
    class Table(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = torch.randn(200, 200)

        def forward(self, x):
            return (x + self.table[:4, :4]).sin() * x

    block, x = Table(), leaf(4, 4)
    loss = run(block, x).sum()
    block.table.zero_()
    loss.backward()
    return block, x, loss


# ------------------------------------------------------------------------------------------ containers and objects


@program
def hidden_states_in_a_list(run):
    class Collecting(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.seen = nn.Linear(4, 4), []

        def forward(self, x):
            self.seen.append(x.detach())
            return torch.tanh(self.linear(x)) * len(self.seen)

    block, x = Collecting(), leaf(4, 4)
    loss = run(block, run(block, x)).sum()
    block.seen.append("the end")
    loss.backward()
    return block, x, loss


@program
def a_cache_by_shape_in_a_dict(run):
    class Positions(nn.Module):
        def __init__(self):
            super().__init__()
            self.cache = {}

        def forward(self, x):
            if x.shape not in self.cache:
                self.cache[x.shape] = torch.randn(x.shape)
            return (x + self.cache[x.shape]).sin() * torch.rand_like(x)

    block, x = Positions(), leaf(4, 4)
    loss = run(block, x).sum() + run(block, x[:2]).sum() + run(block, x).sum()
    block.cache.clear()
    loss.backward()
    return block, x, loss


@program
def a_window_in_a_deque(run):
    class Window(nn.Module):
        def __init__(self):
            super().__init__()
            self.window = deque([0.5], maxlen=2)

        def forward(self, x):
            self.window.append(len(self.window) + x.detach().mean().item())
            return (x * sum(self.window)).sin()

    block, x = Window(), leaf(4, 4)
    loss = run(block, run(block, run(block, x))).sum()
    block.window.rotate()
    loss.backward()
    return block, x, loss


@program
def a_set_of_what_was_seen(run):
    class Once(nn.Module):
        def __init__(self):
            super().__init__()
            self.seen = set()

        def forward(self, x, name):
            first = name not in self.seen
            self.seen.add(name)
            return x.sin() * x if first else x.exp() * x

    block, x = Once(), leaf(4, 4)
    loss = (run(block, x, "a") + run(block, x, "b") * run(block, x, "a")).sum()
    block.seen.discard("b")
    loss.backward()
    return block, x, loss


@program
def a_configuration_as_a_dataclass(run):
    @dataclass
    class Config:
        scale: float = 1.0
        names: list = field(default_factory=list)

    class Configured(nn.Module):
        def __init__(self):
            super().__init__()
            self.config = Config()

        def forward(self, x):
            self.config.names.append(x.shape)
            return (x * self.config.scale * len(self.config.names)).tanh()

    block, x = Configured(), leaf(4, 4)
    loss = run(block, x).sum()
    block.config.scale = 3.0
    loss = loss + run(block, x).sum()
    block.config = Config(5.0)
    loss.backward()
    return block, x, loss


@program
def state_in_slots(run):
    class State:
        __slots__ = ("gain", "later")

        def __init__(self):
            self.gain = 1.0

    class Slotted(nn.Module):
        def __init__(self):
            super().__init__()
            self.state = State()

        def forward(self, x):
            self.state.gain += 0.5
            if not hasattr(self.state, "later"):
                self.state.later = 2.0
                return x.cos() * x
            return (x * self.state.gain * self.state.later).tanh()

    block, x = Slotted(), leaf(4, 4)
    loss = run(block, run(block, x)).sum()
    block.state.gain = 9.0
    loss.backward()
    return block, x, loss


@program
def slots_behind_a_property_or_another_slot(run):
    # As in mpmath, whose constants compute what other numbers have in the slot.
    class Number:
        __slots__ = ("value",)

    class Shadowing(Number):
        __slots__ = ("value",)

    class Constant(Number):
        __slots__ = ("uses",)

        @property
        def value(self):
            self.uses += 1
            return 2.0

    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.constant, self.number = Constant(), Shadowing()
            self.constant.uses = 0
            self.number.value = 1.0

        def forward(self, x):
            self.number.value += 1.0
            Number.value.__set__(self.number, self.number.value * 3.0)
            Number.value.__set__(self.constant, self.number.value)
            return (x * self.constant.value * self.constant.uses * Number.value.__get__(self.number)).tanh()

    block, x = Scaled(), leaf(4, 4)
    loss = run(block, run(block, x)).sum()
    block.number.value = 9.0
    loss.backward()
    return block, x, loss, Number.value.__get__(block.constant), Number.value.__get__(block.number)


@program
def a_namespace_in_a_namespace(run):
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.args = SimpleNamespace(inner=SimpleNamespace(scale=1.0, steps=[]), used=0)

        def forward(self, x):
            self.args.used += 1
            self.args.inner.steps.append(self.args.used)
            return (x * self.args.inner.scale * sum(self.args.inner.steps)).tanh()

    block, x = Named(), leaf(4, 4)
    loss = run(block, x).sum()
    block.args.inner = SimpleNamespace(scale=2.0, steps=[3])
    loss = loss + run(block, x).sum()
    block.args = None
    loss.backward()
    return block, x, loss


@program
def two_modules_that_share_a_dict(run):
    class Writer(nn.Module):
        def __init__(self, shared):
            super().__init__()
            self.linear, self.shared = nn.Linear(4, 4), shared

        def forward(self, x):
            self.shared["count"] = self.shared.get("count", 0) + 1
            return torch.tanh(self.linear(x) * self.shared["count"])

    shared = {}
    one, two, x = Writer(shared), Writer(shared), leaf(4, 4)
    loss = run(one, run(two, run(one, x))).sum()
    loss.backward()
    return one, two, shared, x, loss


# -------------------------------------------------------------------------------------------------------- children


@program
def an_activation_that_is_replaced(run):
    block, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), leaf(4, 4)
    loss = run(block, x).square().sum()
    block[1] = nn.Sigmoid()
    loss = loss + run(block, x).square().sum()
    block[1] = nn.Identity()
    loss.backward()
    return block, x, loss


@program
def a_layer_that_is_replaced(run):
    block, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), leaf(4, 4)
    old = block[0]
    loss = run(block, x).square().sum()
    block[0] = nn.Linear(4, 4)
    loss.backward()
    return block, old, x, loss


class Lora(nn.Module):
    def __init__(self):
        super().__init__()
        self.base = nn.Linear(4, 4)
        self.adapters = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})
        self.active, self.enabled = "a", True

    def forward(self, x):
        y = self.base(x)
        return torch.tanh(y + self.adapters[self.active](x)) if self.enabled else torch.tanh(y)


@program
def adapters_that_are_switched(run):
    block, x = Lora(), leaf(4, 4)
    policy = run(block, x)
    block.enabled = False
    reference = run(block, x)
    block.enabled, block.active = True, "b"
    loss = (policy - reference).square().sum() + run(block, x).sum()
    block.active = "a"
    loss.backward()
    return block, x, loss


@program
def an_adapter_that_is_deleted(run):
    block, x = Lora(), leaf(4, 4)
    removed = block.adapters["a"]
    loss = run(block, x).square().sum()
    del block.adapters["a"]
    block.active = "b"
    loss.backward()
    return block, removed, x, loss


@program
def a_model_that_grows(run):
    class Growing(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(4, 4)])

        def forward(self, x):
            for layer in self.layers:
                x = torch.tanh(layer(x))
            return x

    block, x = Growing(), leaf(4, 4)
    loss = run(block, x).sum()
    block.layers.append(nn.Linear(4, 4))
    loss = loss + run(block, x).sum()
    block.layers.insert(0, nn.Linear(4, 4))
    loss.backward()
    return block, x, loss


@program
def modules_in_a_plain_list(run):
    # Not registered, so that `modules()` knows nothing of them; their statistics are written all the same.
    class Hiding(nn.Module):
        def __init__(self):
            super().__init__()
            self.hidden = [nn.BatchNorm1d(4), nn.Dropout(0.5)]
            self.by_name = {"last": nn.BatchNorm1d(4, momentum=None)}

        def forward(self, x):
            for one in self.hidden:
                x = one(x)
            return torch.tanh(self.by_name["last"](x))

    block, x = Hiding(), leaf(8, 4)
    loss = (run(block, x) * run(block, x * 3)).sum()
    block.hidden[1].eval()
    loss.backward()
    return block, x, loss


@program
def a_child_behind_its_parents_back(run):
    class Teacher(nn.Module):
        def __init__(self):
            super().__init__()
            object.__setattr__(self, "teacher", nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))

        def forward(self, x):
            return torch.tanh(self.teacher(x))

    block, x = Teacher(), leaf(8, 4)
    loss = run(block, run(block, x)).sum()
    object.__setattr__(block, "teacher", nn.Identity())
    loss.backward()
    return block, x, loss


@program
def a_weight_that_is_tied_later(run):
    block, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), leaf(4, 4)
    untied = block[2].weight
    loss = run(block, x).square().sum()
    block[2].weight = block[0].weight
    loss = loss + run(block, x).square().sum()
    loss.backward()
    return block, untied, x, loss


# ------------------------------------------------------------------------------------------------- flags and buffers


@program
def frozen_in_forward_and_trained_in_backward(run):
    block, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), leaf(4, 4)
    block[0].requires_grad_(False)
    loss = run(block, x).square().sum()
    block[0].requires_grad_(True)
    loss.backward()
    return block, x, loss


@program
def trained_in_forward_and_frozen_in_backward(run):
    block, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), leaf(4, 4)
    loss = run(block, x).square().sum()
    block.requires_grad_(False)
    loss.backward()
    return block, x, loss


@program
def a_layer_that_freezes_itself(run):
    class Freezing(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second, self.calls = nn.Linear(4, 4), nn.Linear(4, 4), 0

        def forward(self, x):
            self.first.requires_grad_(self.calls % 2 == 0)
            self.calls += 1
            return self.second(torch.tanh(self.first(x))).exp()

    block, x = Freezing(), leaf(4, 4)
    loss = sum(run(block, x).sum() for _ in range(3))
    loss.backward()
    return block, x, loss


@program
def dropout_that_is_switched_off_in_between(run):
    block, x = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 4), nn.RReLU()), leaf(4, 4)
    loss = run(block, x).square().sum()
    block.eval()
    with torch.no_grad():
        valid = run(block, x)
    loss.backward()
    block[1].p = 0.1
    return block, x, loss, valid


@program
def one_child_in_evaluation(run):
    # No norm is trained whose evaluation waits for its backward: torch itself is wrong there, as it counts no version.
    block, x = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.BatchNorm1d(4)), leaf(8, 4)
    loss = run(block, x).square().sum()
    block[1].eval()
    loss = loss + run(block, x).square().sum()
    block[3].eval()
    loss.backward()
    block.train()
    return block, x, loss


@program
def batch_norm_without_momentum(run):
    # Its average depends on the number of batches so far.
    block, x = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, momentum=None)), leaf(8, 4)
    total = sum(run(block, x * step).sin().sum() for step in (1, 2, 3))
    block[1].momentum = 0.5
    run(block, x)
    total.backward()
    return block, x, total


@program
def buffers_that_are_replaced_and_registered_late(run):
    class Late(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("mean", None)

        def forward(self, x):
            self.mean = x.detach().mean(0) if self.mean is None else self.mean * 0.5
            if "count" not in self._buffers:
                self.register_buffer("count", torch.zeros(()), persistent=False)
            self.count += 1
            return (x * self.mean * self.count.clone()).tanh()

    block, x = Late(), leaf(4, 4)
    loss = (run(block, x) * run(block, x)).sum()
    block.mean = None
    loss.backward()
    return block, x, loss


@program
def an_observer_of_fake_quantization(run):
    class Observed(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.observes, self.quantizes = nn.Linear(4, 4), True, False
            self.register_buffer("low", torch.tensor(float("inf")))
            self.register_buffer("high", torch.tensor(-float("inf")))

        def forward(self, x):
            if self.observes:
                self.low.copy_(torch.minimum(self.low, x.detach().min()))
                self.high.copy_(torch.maximum(self.high, x.detach().max()))
            if self.quantizes:
                step = (self.high - self.low) / 15
                x = x + ((x / step).round() * step - x).detach()
            self.quantizes = True
            return torch.tanh(self.linear(x))

    block, x = Observed(), leaf(4, 4)
    loss = run(block, run(block, x) * 2).square().sum()
    block.observes = False
    loss = loss + run(block, x).sum()
    block.quantizes = False
    loss.backward()
    return block, x, loss


@program
def spectral_norm_over_several_calls(run):
    block, x = nn.Sequential(spectral_norm(nn.Linear(4, 4)), nn.Tanh(), weight_norm(nn.Linear(4, 4))), leaf(4, 4)
    loss = run(block, run(block, x)).square().sum()
    block.eval()
    loss.backward()
    return block, x, loss


@program
def a_parametrization_that_is_removed(run):
    block, x = nn.Sequential(weight_norm(nn.Linear(4, 4)), nn.Tanh()), leaf(4, 4)
    originals = list(block.parameters())
    loss = run(block, x).square().sum()
    parametrize.remove_parametrizations(block[0], "weight")
    loss.backward()
    return block, originals, x, loss


@program
def weights_that_are_pruned_in_between(run):
    block, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), leaf(4, 4)
    prune.l1_unstructured(block[0], "weight", amount=4)
    loss = run(block, x).square().sum()
    prune.l1_unstructured(block[0], "weight", amount=4)
    loss = loss + run(block, x).square().sum()
    # `prune.remove` would write through `.data`, which nobody can see.
    loss.backward()
    return list(block.parameters()), x, loss


@program(ways=NOT_WRAPPED)
def a_forward_of_the_instance(run):
    block, x = nn.Linear(4, 4), leaf(4, 4)
    one = run(block, x)
    block.forward = types.MethodType(lambda self, x: F.linear(x.sin(), self.weight) * 2, block)
    two = run(block, x)
    del block.forward
    loss = (one * two).sum()
    loss.backward()
    return block, x, loss


@program
def a_forward_of_a_child(run):
    block, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), leaf(4, 4)
    original = block[0].forward
    block[0].forward = lambda x: original(x) * 2
    one = run(block, x)
    del block[0].forward
    two = run(block, x)
    block[1].forward = torch.sin
    loss = (one * two).sum()
    loss.backward()
    return block, x, loss


@program
def a_class_that_is_changed(run):
    class Doubling(nn.Tanh):
        def forward(self, x):
            return x.exp() * 2

    block, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), leaf(4, 4)
    loss = run(block, x).square().sum()
    block[1].__class__ = Doubling
    loss = loss + run(block, x).square().sum()
    loss.backward()
    return block, x, loss


# ------------------------------------------------------------------------------------- hidden states, caches, lazies


class Recurrent(nn.Module):
    def __init__(self, detaches):
        super().__init__()
        self.cell, self.h, self.detaches = nn.Linear(8, 4), None, detaches

    def forward(self, x):
        h = torch.zeros(4, 4) if self.h is None else self.h
        self.h = torch.tanh(self.cell(torch.cat([x, h], 1)))
        y = self.h * x
        if self.detaches:
            self.h = self.h.detach()
        return y


@program
def a_hidden_state_that_is_detached(run):
    block, x = Recurrent(True), leaf(4, 4)
    loss = sum(run(block, x * step).sum() for step in (1, 2, 3))
    loss.backward()
    loss = run(block, x).sum()
    block.h = None
    loss.backward()
    return block, x, loss


@program
def a_hidden_state_with_its_graph(run):
    block, x = Recurrent(False), leaf(4, 4)
    loss = sum(run(block, x * step).sum() for step in (1, 2, 3))
    block.h = None
    loss.backward()
    return block, x, loss


@program
def a_cache_of_keys_and_values(run):
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv, self.keys, self.values = nn.Linear(4, 12), [], []

        def forward(self, x):
            q, k, v = self.qkv(x).chunk(3, -1)
            self.keys.append(k)
            self.values.append(v)
            return F.scaled_dot_product_attention(q[None], torch.cat(self.keys)[None], torch.cat(self.values)[None])[0]

    block, x = Attention(), leaf(4, 4)
    loss = sum(run(block, x * step).square().sum() for step in (1, 2))
    block.keys.clear()
    block.values = []
    loss.backward()
    return block, x, loss


@program
def a_static_cache_with_a_position(run):
    class Static(nn.Module):
        def __init__(self):
            super().__init__()
            self.project, self.position = nn.Linear(4, 4), 0
            self.register_buffer("keys", torch.zeros(16, 4), persistent=False)

        def forward(self, x):
            self.keys[self.position : self.position + len(x)] = self.project(x).detach()
            self.position += len(x)
            return (x @ self.keys[: self.position].t().clone()).softmax(-1) @ self.keys[: self.position].clone()

    block, x = Static(), leaf(4, 4)
    loss = run(block, run(block, x)).square().sum() + run(block, x).sum()
    block.position = 0
    block.keys.zero_()
    loss.backward()
    return block, x, loss


# An initialisation need not run again, so that these may be plain calls.
@program(recomputes=False)
def a_weight_that_is_made_when_it_is_none(run):
    class Later(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = None

        def forward(self, x):
            if self.weight is None:
                self.weight = nn.Parameter(torch.randn(x.shape[-1], 4))
            return F.dropout(torch.tanh(x @ self.weight), 0.5)

    block, x = Later(), leaf(4, 4)
    loss = (run(block, x) * run(block, x)).sum()
    loss.backward()
    return block, x, loss


@program(recomputes=False)
def lazy_layers_in_their_first_call(run):
    block = nn.Sequential(nn.Dropout(0.5), nn.LazyLinear(4), nn.Dropout(0.5), nn.LazyBatchNorm1d(), nn.Tanh())
    x = leaf(8, 4)
    loss = run(block, x).square().sum()
    loss = loss + run(block, x).square().sum()
    loss.backward()
    return block, x, loss


@program(recomputes=False)
def a_lazy_layer_between_two_backwards(run):
    class Tower(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.LazyLinear(4), None

        def forward(self, x):
            y = torch.tanh(self.first(x))
            if self.second is None:
                self.second = nn.LazyLinear(4)
            return F.dropout(self.second(y), 0.3)

    block, x = Tower(), leaf(4, 6)
    loss = run(block, x).square().sum()
    loss.backward()
    loss = run(block, x).square().sum()
    loss.backward()
    return block, x, loss


@program
def a_batch_norm_that_is_made_in_the_first_call(run):
    class Normed(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.norm = nn.Linear(4, 4), None

        def forward(self, x):
            if self.norm is None:
                self.norm = nn.BatchNorm1d(x.shape[-1])
            return torch.tanh(self.norm(self.linear(x))) * torch.rand(4)

    block, x = Normed(), leaf(8, 4)
    loss = (run(block, x) * run(block, x)).sum()
    loss.backward()
    return block, x, loss


@pytest.mark.parametrize(("function", "ways", "options"), program.cases())
def test_modules(function, ways, options):
    assert_agrees_in_all(function, ways, **options)
