"""Random programs whose state changes: in a forward, between forward and backward, and in another region.

A program is data: nodes, each a module that reads some state and changes some, and steps that call nodes in regions of
some kind, change state, and go backward. It is made from a seed and written as a script, as a user would write it, so
that its functions reach their state by attributes, cells and global names of their own. The script is run plainly and
with regions, and the two worlds are compared as in `worlds.py`.

    PRELUDE    the state that there is: containers, cells, globals, objects, generators, hooks, subclasses
    READS      what a node computes with in its forward
    CHANGES    what may change, in a forward before or after the reads, or between the steps
    steps      `Call`: a node in a region; `Change`, `Backward`, `Evaluate`, `Drop`

A refusal is right only if a tensor that is no buffer was written in place after a region that reads it had begun. Long
runs, from the root of the repository:

    PYTHONPATH=src:tests python -m regions.state_programs --count 20000 --start 0

print what became of the programs, which features they met, and scripts that fail; `--small` makes these as small as it
goes.
"""

import argparse
import collections
import gc
import random
import sys
import textwrap
import time
import types
import warnings
import weakref
from collections import Counter
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from regions import worlds
from regions.comparing import live_regions
from regions.worlds import WAYS, differences, outcome
from torchremat.errors import MutationError

# ---------------------------------------------------------------------------------------------------------- the world

PRELUDE = """
import random
import threading
import types
from collections import deque
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace

import numpy as np
import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm
from torch.overrides import TorchFunctionMode

from regions import worlds

# A file of settings, and random numbers of other libraries.
settings, local = types.ModuleType("settings"), threading.local()
exec(
    "gain, items, calls = 1.0, [1.0], 0\\n"
    "def scaled(t):\\n"
    "    global calls\\n"
    "    calls += 1\\n"
    "    return t * gain * (1 + 0.1 * len(items)) / calls",
    settings.__dict__,
)
settings.part, local.gain = types.ModuleType("settings.part"), 1.0
settings.part.gain = 1.0
random.seed(1)
np.random.seed(1)


# Globals.
gain, numbers, options, calls = 1.0, [1.0], {"gain": 1.0}, 0
rng = torch.Generator().manual_seed(5)
global_norm = nn.BatchNorm1d(4)
RULES = SimpleNamespace(gain=1.0)


class Held:
    gain, rng = 1.0, torch.Generator().manual_seed(6)


def helper(t):
    return t * gain * options["gain"] * Held.gain


def function(t):
    global calls
    calls += 1
    return helper(t) * (1 + 0.1 * len(numbers)) / calls + 0 * gain


def other(t):
    return helper(t) * 0.5 * gain + 0 * calls * len(numbers)


# They read the same names: those of code that a forward itself puts into a function are not seen before it.
CODES = (function.__code__, other.__code__)


def noise(t):
    return t * torch.rand(4, generator=rng) * torch.rand(4, generator=Held.rng)


def normed(t):
    return global_norm(t)


def set_global(value):
    global gain
    gain = value


def set_helper(value):
    global helper
    helper = value


class Ruled(torch.Tensor):
    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        result = super().__torch_function__(function, types, args, kwargs or {})
        if function is torch.Tensor.mul and RULES.gain != 1.0:
            with torch._C.DisableTorchFunctionSubclass():
                return result * RULES.gain
        return result


class Scaling(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.gain = 1.0

    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        return result * self.gain if function is torch.tanh else result


@dataclass
class Data:
    gain: float = 1.0
    items: list = field(default_factory=lambda: [1.0])


class Slots:
    __slots__ = ("gain", "later")

    def __init__(self):
        self.gain = 1.0


class Hook:
    def __init__(self, gain):
        self.gain, self.calls = gain, 0

    def __call__(self, module, args, output):
        self.calls += 1
        return output * (self.gain + 0.1 * self.calls)


def cells():
    gain, tensor, items, rng = 1.0, torch.full((4,), 0.1), [1.0], torch.Generator().manual_seed(2)

    def inner(t):
        return t * gain

    def middle(t):
        return inner(t) + tensor

    def outer(t):
        worlds.events.read(tensor)
        return middle(t) * (1 + 0.1 * len(items)) * torch.rand(4, generator=rng).add(0.5)

    def put_gain(value):
        nonlocal gain
        gain = value

    def put_tensor(value):
        nonlocal tensor
        tensor = torch.full((4,), value)

    def write_tensor(value):
        worlds.events.write(tensor)
        tensor.add_(value)

    def put_item(value):
        items.append(value)

    def put_items(value):
        nonlocal items
        items = [value]

    def put_inner(value):
        nonlocal inner
        inner = value

    return outer, SimpleNamespace(
        gain=put_gain, tensor=put_tensor, write=write_tensor, item=put_item, items=put_items, inner=put_inner
    )


def scaled(t, gain, box):
    return t * gain * box["gain"]


def or_none(grad, gain):
    return None if grad is None else grad * gain


def written(tensor, value):
    worlds.events.write(tensor)
    with torch.no_grad():
        tensor.add_(value)


class Shared:
    def __init__(self):
        inner = SimpleNamespace(gain=1.0, rngs=[torch.Generator().manual_seed(8)])
        self.ns, self.data, self.slots = SimpleNamespace(gain=1.0, inner=inner), Data(), Slots()
        self.items, self.table, self.window, self.names = [1.0], {"gain": 1.0}, deque([1.0], maxlen=2), set()
        self.history, self.log = [], []
        self.leaf = SimpleNamespace(prompt=torch.ones(4, requires_grad=True))
        self.bound = partial(scaled, gain=1.0, box={"gain": 1.0})
        self.function, self.put = cells()

        def default(t, gain=1.0, *, seen=[]):
            seen.append(gain)
            return t * gain * (1 + 0.1 * len(seen))

        default.__kwdefaults__["seen"] = []
        self.default = default


class Peers:
    def __init__(self, nodes):
        self.nodes = nodes


class Node(nn.Module):
    class_gain, class_rng, wraps = 1.0, torch.Generator().manual_seed(7), False

    def __init__(self, shared, number, reads):
        super().__init__()
        self.linear, self.act, self.bias = nn.Linear(4, 4), nn.Tanh(), nn.Parameter(torch.zeros(4))
        self.register_buffer("buf", torch.ones(4))
        self.drop, self.kids = nn.Dropout(0.4), nn.ModuleList()
        self.gain, self.flag, self.late, self.h, self.made = 1.0, False, None, None, None
        self.rng, self.tensor = torch.Generator().manual_seed(number), torch.full((4,), 0.1)
        self.own, self.memo, self.handles, self.peers = [], {}, [], None
        self.__dict__.update(vars(shared))
        if "norm" in reads:
            self.norm = nn.BatchNorm1d(4, momentum=(0.1, None)[number % 2])
        if "hidden norm" in reads:
            self.hidden = [nn.BatchNorm1d(4)]
        if "spectral" in reads:
            self.spectral = spectral_norm(nn.Linear(4, 4))
        if "lazy" in reads:
            self.lazy = nn.LazyLinear(4)
        if "lazy norm" in reads:
            self.lazy_norm = nn.LazyBatchNorm1d()


def pair(both):
    first, second = both["nodes"]
    return torch.tanh(first(both["t"][0])) + second(both["t"][0])


def with_options(node, t, options):
    return node(t) * options["scale"][0]


def loss_of(pending):
    worlds.events.backward()
    return sum((one.float() ** 2).sum() for one in pending)


def cut(nodes, shared):
    # A graph that is gone, so that nothing may go on from it.
    for node in nodes:
        node.h = None if node.h is None else node.h.detach()
    for node in nodes:
        node.history[:] = [one.detach() for one in node.history]
"""

# --------------------------------------------------------------------------------------------------------- the reads

READS = {
    "linear": """
        for one in self.linear.parameters():
            worlds.events.read(one)
        x = torch.tanh(self.linear(x))
    """,
    "activation": "x = self.act(x * 1.1)",
    "gain": "x = torch.tanh(x * (1.0 if self.gain is None else self.gain))",
    "file": "x = torch.tanh(settings.scaled(x) * settings.part.gain)",
    "file list": "x = (x * settings.items[-1]).sin()",
    "thread": "x = torch.tanh(x * local.gain)",
    "random": "x = torch.tanh(x * (0.5 + random.random()) * random.uniform(0.5, 1.5))",
    "numpy random": "x = torch.tanh(x * float(0.5 + np.random.rand()))",
    "flag": "x = x.sin() * 2 if self.flag else x.cos()",
    "buffer": "x = x.exp().tanh() if self.buf is None else torch.tanh(x * self.buf.clone())",
    "bias": """
        worlds.events.read(self.bias)
        x = (x + self.bias).sin()
    """,
    "tensor": """
        worlds.events.read(self.tensor)
        x = (x + self.tensor).cos()
    """,
    "dropout": "x = self.drop(x).sin()",
    "noise": "x = x * torch.rand_like(x)",
    "norm": "x = torch.tanh(self.norm(x))",
    "hidden norm": "x = torch.tanh(self.hidden[0](x))",
    "spectral": "x = torch.tanh(self.spectral(x))",
    "lazy": "x = torch.tanh(self.lazy(x))",
    "lazy norm": "x = torch.tanh(self.lazy_norm(x))",
    "made": """
        if self.made is None:
            self.made = nn.Parameter(torch.randn(4, 4))
        x = torch.tanh(x @ self.made)
    """,
    "late buffer": """
        if self.late is None:
            del self.late
            self.register_buffer("late", torch.zeros(()))
        self.late += 0.5
        x = torch.tanh(x + self.late.clone())
    """,
    "memo": """
        if x.shape not in self.memo:
            self.memo[x.shape] = torch.rand(x.shape) + 0.5
        x = x * self.memo[x.shape]
    """,
    "hidden state": """
        self.h = torch.tanh(x + (torch.zeros(4, 4) if self.h is None else self.h))
        x = self.h * 1.5
    """,
    "history": """
        for one in self.history[-2:]:
            x = torch.tanh(x + one)
    """,
    "children": """
        for kid in self.kids:
            x = {kid}
    """,
    "namespace": "x = torch.tanh(x * self.ns.gain * self.ns.inner.gain)",
    "data": "x = torch.tanh(x * self.data.gain * sum(self.data.items))",
    "slots": 'x = torch.tanh(x * self.slots.gain * getattr(self.slots, "later", 1.0))',
    "list": "x = torch.tanh(x * (1 + 0.1 * sum(self.items)))",
    "dict": 'x = torch.tanh(x * self.table.get("gain", 0.5) * len(self.table))',
    "deque": "x = torch.tanh(x * sum(self.window))",
    "set": 'x = x.sin() * (1 + len(self.names)) if "a" in self.names else x.cos()',
    "own list": """
        self.own.append(len(self.own))
        x = x * (1 + 0.1 * sum(self.own))
    """,
    "cells": "x = torch.tanh(self.function(x))",
    "default": "x = torch.tanh(self.default(x))",
    "partial": "x = torch.tanh(self.bound(x))",
    "global": "x = torch.tanh(x * gain * len(numbers))",
    "global function": "x = torch.tanh(function(x))",
    "global noise": "x = noise(x).sin()",
    "global generator": "x = x.sin() * torch.rand(4, generator=rng)",
    "global norm": "x = torch.tanh(normed(x))",
    "generator": "x = x * torch.rand(4, generator=self.rng)",
    "generator in a list": "x = x.sin() * torch.rand(4, generator=self.ns.inner.rngs[0])",
    "generator of the class": "x = x * torch.rand(4, generator=self.class_rng)",
    "class": "x = torch.tanh(x * self.class_gain)",
    "attribute of a tensor": 'x = torch.tanh(x * getattr(x, "gain", 1.0))',
    "attribute of a parameter": 'x = torch.tanh(x * getattr(self.bias, "gain", 1.0))',
    "attribute of a buffer": 'x = torch.tanh(x * getattr(self.buf, "gain", 1.0))',
    "subclass": """
        kind = type(x)
        x = ((x.as_subclass(Ruled) * 0.9) * x).sin().as_subclass(torch.Tensor).as_subclass(kind)
    """,
    "default dtype": "x = torch.tanh(x * torch.full((4,), 0.1).add(1.0).to(x.dtype))",
    "backward inside": """
        if torch.is_grad_enabled():
            (self.leaf.prompt * x.detach()).sum().backward()
    """,
    "hook on an activation": """
        x = x * 1
        if x.requires_grad:
            x.register_hook(lambda grad: grad * 1.5)
        x = x.sin()
    """,
}

# -------------------------------------------------------------------------------------------------------- the changes

# `@` is the node, `#` a number above zero, and `%` a small integer.
CHANGES = {
    "gain": "@.gain = #",
    "gain is none": "@.gain = None",
    "flag": "@.flag = not @.flag",
    "new attribute": "@.new = [%]",
    "no attribute": '@.__dict__.pop("new", None)',
    "buffer written": """
        if @.buf is not None:
            @.buf.mul_(#)
    """,
    "buffer replaced": "@.buf = torch.full((4,), #)",
    "buffer is none": "@.buf = None",
    "training": "@.drop.train(not @.drop.training)",
    "dropout": "@.drop.p = 0.1 * (% % 5)",
    "requires grad": "@.bias.requires_grad_(not @.bias.requires_grad)",
    "requires grad of linear": "@.linear.requires_grad_(not @.linear.weight.requires_grad)",
    "activation": "@.act = (nn.Tanh, nn.Sigmoid, nn.Softsign, nn.Identity)[% % 4]()",
    "linear replaced": "@.linear = nn.Linear(4, 4)",
    "bias replaced": "@.bias = nn.Parameter(torch.full((4,), #))",
    "children appended": "@.kids.append(nn.Linear(4, 4))",
    "children inserted": "@.kids.insert(0, nn.Softsign())",
    "children popped": """
        if len(@.kids):
            @.kids.pop(-1)
    """,
    "hook": "@.handles.append(@.register_forward_hook(lambda module, args, output: output * #))",
    "hook with state on the activation": "@.handles.append(@.act.register_forward_hook(Hook(#)))",
    "hook before linear": "@.handles.append(@.linear.register_forward_pre_hook(lambda module, args: (args[0] * #,)))",
    "hook in backward of linear": """
        @.handles.append(
            @.linear.register_full_backward_hook(lambda module, inputs, outputs: (or_none(inputs[0], #),))
        )
    """,
    "hook before backward of activation": """
        @.handles.append(@.act.register_full_backward_pre_hook(lambda module, outputs: (outputs[0] * #,)))
    """,
    "hook removed": """
        if @.handles:
            @.handles.pop().remove()
    """,
    "hook of the parameter": """
        if @.bias.requires_grad:
            @.bias.register_hook(lambda grad, log=@.log: log.append(%) or grad * #)
    """,
    "forward of the instance": """
        if "forward" in @.__dict__ and not @.wraps:
            del @.forward
        elif not @.wraps:
            @.forward = types.MethodType(lambda self, x: type(self).forward(self, x * #), @)
    """,
    "wrapped": """
        if "forward" not in @.__dict__ and not @.wraps:
            worlds.wrap(@, "region")
            @.wraps = True
    """,
    "hidden state": "@.h = None",
    "made": "@.made = None",
    "memo": "@.memo.clear()",
    "history appended": "@.history.append(torch.full((4, 4), #) if @.h is None else @.h)",
    "history detached": "@.history.append(torch.full((4, 4), #) if @.h is None else @.h.detach())",
    "history": "@.history.clear()",
    "namespace": "@.ns.gain = #",
    "namespace inside": "@.ns.inner.gain = #",
    "namespace replaced": "@.ns = SimpleNamespace(gain=#, inner=@.ns.inner)",
    "data": "@.data.gain = #",
    "data inside": "@.data.items.append(#)",
    "data attributes": '@.data.__dict__ = {**vars(@.data), "gain": #}',
    "slots": "@.slots.gain = #",
    "slots later": "@.slots.later = #",
    "slots deleted": """
        if hasattr(@.slots, "later"):
            del @.slots.later
    """,
    "list appended": "@.items.append(%)",
    "list cleared": "@.items.clear()",
    "list reversed": "@.items.reverse()",
    "list replaced": "@.items = [#]",
    "dict set": '@.table.update({("gain", "a", "b")[% % 3]: #})',
    "dict deleted": '@.table.pop("gain", None)',
    "deque": "@.window.append(#)",
    "set": '@.names.symmetric_difference_update("ab"[% % 2])',
    "own list": "@.own.clear()",
    "cells gain": "@.put.gain(#)",
    "cells tensor": "@.put.tensor(#)",
    "cells list": "@.put.item(#)",
    "cells new list": "@.put.items(#)",
    "cells function": "@.put.inner(torch.sin)",
    "default": "@.default.__defaults__ = (#,)",
    "default inside": '@.default.__kwdefaults__["seen"].clear()',
    "partial replaced": '@.bound = partial(scaled, gain=#, box={"gain": 1.0})',
    "partial inside": '@.bound.keywords["box"].update(gain=#)',
    "file": "settings.gain = #",
    "file list": "settings.items.append(#)",
    "file list replaced": "settings.items = [#]",
    "file inside": "settings.part.gain = #",
    "file function": "settings.scaled = torch.sin",
    "thread": "local.gain = #",
    "random": "random.seed(%)",
    "random drawn": "random.random()",
    "numpy random": "np.random.seed(%)",
    "global": "set_global(#)",
    "global list": "numbers.append(%)",
    "global dict": "options.update(gain=#)",
    "global class": "Held.gain = #",
    "global function": "set_helper(torch.sin)",
    "global function code": "function.__code__ = CODES[% % 2]",
    "global generator": "rng.manual_seed(%)",
    "generator": "@.rng.manual_seed(%)",
    "generator replaced": "@.rng = torch.Generator().manual_seed(%)",
    "generator drawn": "torch.rand(3, generator=@.rng)",
    "generator in a list": "torch.rand(3, generator=@.ns.inner.rngs[0])",
    "generator of the class": "@.class_rng.manual_seed(%)",
    "seed": "torch.manual_seed(%)",
    "class": "type(@).class_gain = #",
    "attribute of a parameter": "@.bias.gain = #",
    "attribute of a buffer": """
        if @.buf is not None:
            @.buf.gain = #
    """,
    "rules of the subclass": "RULES.gain = #",
    "default dtype": "torch.set_default_dtype((torch.float32, torch.float64)[% % 2])",
    "determinism": "torch.use_deterministic_algorithms(% % 2 == 0)",
    "precision": 'torch.set_float32_matmul_precision(("medium", "high", "highest")[% % 3])',
    # Written in place, and no buffer: given back, or refused.
    "bias written": "written(@.bias, #)",
    "tensor written": "written(@.tensor, #)",
    "cells tensor written": "@.put.write(#)",
    "step": """
        for one in @.linear.parameters():
            written(one, #)
    """,
    "step in backward": """
        if not hasattr(@, "fused"):
            def step(parameter):
                written(parameter, #)
                parameter.grad = None
            @.fused = [@.bias.register_post_accumulate_grad_hook(step)]
    """,
}
WRITES = ("bias written", "tensor written", "cells tensor written", "step", "step in backward")


def _lines(source, indent):
    return textwrap.indent(textwrap.dedent(source).strip("\n").rstrip(), " " * indent)


# ------------------------------------------------------------------------------------------------------- the programs


@dataclass(frozen=True)
class Change:
    """A change of a node's state, or of what all share; of the node whose forward it is if none is named."""

    name: str
    value: int = 1
    node: int | None = None

    def source(self, node):
        """Return the lines that do it to what an expression says."""
        number = str(0.5 + 0.25 * self.value)
        return f"worlds.events.met({self.name!r})\n" + textwrap.dedent(CHANGES[self.name]).strip("\n").replace(
            "% %", f"{self.value} %"
        ).replace("(%)", f"({self.value})").replace("[%]", f"[{self.value}]").replace("#", number).replace("@", node)


@dataclass(frozen=True)
class Spec:
    """A node: what it reads and changes in its forward, its children, and how it calls them."""

    reads: tuple
    before: tuple = ()
    after: tuple = ()
    kids: tuple = ()
    way: str = "plain"
    wrapped: str = ""

    def source(self, number):
        """Return the class of the node."""
        lines = [f"class Node{number}(Node):", "    def forward(self, x):"]
        kid = "kid(x)" if self.way == "plain" else f"worlds.call({self.way!r}, kid, x)"
        lines += [_lines(one.source(_within(one)), 8) for one in self.before]
        lines += [_lines(READS[name].replace("{kid}", kid), 8) for name in self.reads]
        lines += [_lines(one.source(_within(one)), 8) for one in self.after]
        return "\n".join([*lines, "        return x"])


def _within(change):
    return "self" if change.node is None else f"self.peers.nodes[{change.node}]"


@dataclass(frozen=True)
class Call:
    """Calls a node in a region: itself, its forward, a function over it or over a name that is bound again."""

    node: int
    way: str
    form: str = "module"
    x: int = 0
    kind: str = "plain"

    def source(self):
        """Return the lines of it."""
        x = {"attribute": f"xs[{self.x}] * 1", "ruled": f"xs[{self.x}].as_subclass(Ruled)"}
        x["result"] = f"xs[{self.x}] if last is None else last"
        lines = [f"node, x = nodes[{self.node}], {x.get(self.kind, f'xs[{self.x}]')}"]
        lines += [f"x.gain = {1.0 + self.node}"] if self.kind == "attribute" else []
        function = {
            "module": "node, x",
            "method": "node.forward, x",
            "late": "late, x",
            "lambda": "lambda t: node(t) * 0.5, x",
            "default": "lambda t, node=node: node(t) * 0.5, x",
            "partial": "partial(with_options, node, options={'scale': [0.5]}), x",
            "pair": "pair, {'t': [x], 'nodes': (node, node)}",
        }[self.form]
        call = f"last = worlds.call({self.way!r}, {function}).as_subclass(torch.Tensor)"
        if self.kind == "mode":
            lines += ["with mode:", f"    {call}", "mode.gain += 0.5"]
        else:
            lines.append(call)
        lines += ["x.gain = 0.25"] if self.kind == "attribute" else []
        return "\n".join([*lines, "pending.append(last)"])


@dataclass(frozen=True)
class Backward:
    """Goes backward from all results since the last one, or takes gradients of the inputs."""

    how: str = "backward"

    def source(self):
        """Return the lines of it."""
        run = {
            "grad": "results.append(torch.autograd.grad(loss, xs, retain_graph=True, allow_unused=True))",
            "retain": "loss.backward(retain_graph=True)",
            "backward": "loss.backward()",
        }[self.how]
        lines = ["loss = loss_of(pending)", "if pending and loss.requires_grad:", f"    {run}"]
        lines.append("results.append(loss.detach() if pending else None)")
        if self.how == "backward":
            lines.append("pending, last, loss = [], None, None\ncut(nodes, shared)")
        return "\n".join(lines)


@dataclass(frozen=True)
class Evaluate:
    """Calls a node without grad."""

    node: int

    def source(self):
        """Return the lines of it."""
        return f"with torch.no_grad():\n    results.append(nodes[{self.node}](xs[0].detach()))"


@dataclass(frozen=True)
class Drop:
    """Drops the results since the last backward with their graph."""

    def source(self):
        """Return the lines of it."""
        return "pending, last = [], None\ncut(nodes, shared)"


@dataclass(frozen=True)
class Program:
    """Nodes and steps; these are at the top of the script, or in a function of it."""

    nodes: tuple
    steps: tuple
    top: bool = False
    seed: int = 0

    def main(self):
        """Return what comes after the prelude: the nodes' classes and the steps."""
        setup = [
            "shared, mode, results, pending, last = Shared(), Scaling(), [], [], None",
            f"nodes = [{', '.join(f'Node{n}(shared, {n}, {spec.reads})' for n, spec in enumerate(self.nodes))}]",
            "xs = [torch.randn(4, 4, requires_grad=True) for _ in range(2)]",
        ]
        for number, spec in enumerate(self.nodes):
            setup += [f"nodes[{number}].kids.append(nodes[{kid}])" for kid in spec.kids]
            if any(change.node is not None for change in (*spec.before, *spec.after)):
                setup.append(f"nodes[{number}].peers = Peers(nodes)")
            if spec.wrapped:
                setup.append(f"worlds.wrap(nodes[{number}], {spec.wrapped!r})\nnodes[{number}].wraps = True")
        if any(isinstance(step, Call) and step.form == "late" for step in self.steps):
            setup.append("def late(t):\n    return node(t)")
        steps = [
            step.source(f"nodes[{step.node or 0}]") if isinstance(step, Change) else step.source()
            for step in self.steps
        ]
        body = "\n".join([*setup, *steps, "results += [one.detach() for one in pending]", "x = None"])
        if not self.top:
            body = "\n".join(
                [
                    "def main():",
                    _lines(body, 4),
                    "    return shared, mode, results, nodes, xs",
                    "shared, mode, results, nodes, xs = main()",
                ]
            )
        return "\n".join([*(spec.source(number) for number, spec in enumerate(self.nodes)), body])

    def __str__(self):
        lines = [line for line in self.main().splitlines() if "worlds.events.met" not in line]
        return textwrap.indent("\n".join(lines), "  ")


# A node that is wrapped is wrapped in the plain run too, as far as that sees it: see `Spec.wrapped`.
KINDS = tuple(way for way in WAYS if way not in ("plain", "wrap"))


def made(seed):
    """Make the program of a seed."""
    draw = random.Random(seed)
    # A program has a theme, so that what it changes is often what it reads.
    names = draw.sample(list(READS), draw.randint(2, 7))
    kinds = [name for name in CHANGES if name not in WRITES]
    words = {word for name in names for word in name.split() if len(word) > 2}
    near = [name for name in kinds if words & {*name.split()}]
    if draw.random() < 0.25:
        near += draw.sample(WRITES, 2)

    def change(somewhere):
        node = draw.randrange(count) if somewhere else None
        return Change(draw.choice(near if near and draw.random() < 0.7 else kinds), draw.randint(0, 6), node)

    count = draw.randint(1, 3)
    nodes = []
    for number in range(count):
        rest = range(number + 1, count)
        kids = tuple(draw.sample(list(rest), draw.randint(0, len(rest)))) if draw.random() < 0.6 else ()
        reads = draw.sample(names, draw.randint(1, len(names)))
        reads += ["children"] if kids and "children" not in reads else []
        draw.shuffle(reads)
        nodes.append(
            Spec(
                tuple(reads),
                tuple(change(draw.random() < 0.2) for _ in range(draw.choice([0, 0, 0, 1, 2]))),
                tuple(change(draw.random() < 0.2) for _ in range(draw.choice([0, 0, 1, 2]))),
                kids,
                draw.choice(["plain", "plain", *KINDS]),
                draw.choice(["", "", "", "region", "policy"]),
            )
        )
    steps = []
    for _ in range(draw.randint(1, 3)):
        for _ in range(draw.randint(1, 3)):
            way = draw.choice(KINDS)
            form = draw.choice(["module", "module", "method", "lambda", "late", "default", "partial", "pair"])
            kind = draw.choice(["plain", "plain", "attribute", "result", "ruled", "mode"])
            steps.append(Call(draw.randrange(count), way, form, draw.randint(0, 1), kind))
            steps += [change(True) for _ in range(draw.choice([0, 0, 1, 2]))]
            if draw.random() < 0.1:
                steps.append(Evaluate(draw.randrange(count)))
        if draw.random() < 0.05:
            steps.append(Drop())
        elif draw.random() < 0.25:
            steps += [Backward(draw.choice(["retain", "grad"])), *(change(True) for _ in range(draw.randint(0, 2)))]
        steps.append(Backward())
        steps += [change(True) for _ in range(draw.choice([0, 0, 1]))]
    return Program(tuple(nodes), tuple(steps), draw.random() < 0.4, seed)


_PRELUDE = compile(PRELUDE, "prelude.py", "exec")


def run(program):
    """Run a program's script, and return its globals, which are what is compared."""
    module = types.ModuleType("a_program")
    # The compiler of a class of data looks its module up.
    sys.modules["a_program"] = module
    try:
        exec(_PRELUDE, module.__dict__)
        exec(compile(program.main(), "a_program.py", "exec"), module.__dict__)
    finally:
        del sys.modules["a_program"]
    # The last function that went by a name is no state of the program, and holds what was called.
    skipped = {"worlds", "late", "function", "settings"}
    found = {key: value for key, value in vars(module).items() if not key.startswith("__") and key not in skipped}
    found["numpy's generator"] = repr(np.random.get_state())
    for file in (module.settings, module.settings.part):
        own = {key: value for key, value in vars(file).items() if not key.startswith("__")}
        found[file.__name__] = {key: value for key, value in own.items() if not isinstance(value, types.ModuleType)}
    return found


# --------------------------------------------------------------------------------------------------------- judgement


@dataclass(frozen=True)
class Verdict:
    """What became of a program: `kind` is a word, and `text` says what differs if it failed."""

    kind: str
    text: str = ""
    met: Counter = field(default_factory=Counter, compare=False)

    @property
    def failed(self):
        """Whether this may not be."""
        return self.kind in FAILURES


FAILURES = ("other gradients", "other state", "raises", "refused without need", "leaves regions")


def judged(program):
    """Run a program plainly and with regions, and say what became of it."""
    worlds.events.start(plain=True)
    with warnings.catch_warnings():
        # A backward hook complains where none of the inputs of its module needs a gradient, and lazy modules always.
        warnings.simplefilter("ignore")
        expected = outcome(lambda _: run(program), "plain", program.seed)
        met, justified = Counter(worlds.events.features), worlds.events.justify()
        met.update(f"reads: {name}" for spec in program.nodes for name in spec.reads)
        met.update(f"wrapped: {spec.wrapped}" for spec in program.nodes if spec.wrapped)
        met.update(
            f"{type(step).__name__}: {getattr(step, 'how', getattr(step, 'form', ''))}" for step in program.steps
        )
        met.update([f"top: {program.top}"])
        worlds.events.start(plain=False)
        others = weakref.WeakSet(live_regions()) if program.seed % 16 == 0 else None
        ours = outcome(lambda _: run(program), "plain", program.seed)
    met["recomputes"] += ours.recomputes
    if expected.error is not None:
        if isinstance(ours.error, AssertionError):
            return Verdict("raises", ours.said, met)
        return Verdict("the plain run raises" if ours.error is None else "both raise", expected.said, met)
    if ours.error is not None:
        if isinstance(ours.error, MutationError):
            return Verdict("refused" if justified else "refused without need", ours.said, met)
        return Verdict("raises", ours.said, met)
    found = differences(ours.world, expected.world) + differences(ours.switches, expected.switches)
    if found:
        grads = any(".grad" in line or "results" in line for line in found)
        return Verdict("other gradients" if grads else "other state", "\n".join(found), met)
    if others is not None:
        del ours, expected
        gc.collect()
        left = [one for one in live_regions() if one not in others]
        if left:
            return Verdict("leaves regions", f"{len(left)} are alive", met)
    return Verdict("agrees", "", met)


def smaller(program, kind, most=1000):
    """Return a smaller program that fails in the same way, found in so many tries at most."""
    tries = 0
    while True:
        for candidate in _candidates(program):
            tries += 1
            if tries > most:
                return program
            if judged(candidate).kind == kind:
                program = candidate
                break
        else:
            return program


def _candidates(program):
    for place in reversed(range(len(program.steps))):
        yield replace(program, steps=program.steps[:place] + program.steps[place + 1 :])
    for place, spec in enumerate(program.nodes):
        for name in ("before", "after", "reads", "kids"):
            items = getattr(spec, name)
            for one in range(len(items)):
                yield _with(program, place, replace(spec, **{name: items[:one] + items[one + 1 :]}))
        if spec.wrapped:
            yield _with(program, place, replace(spec, wrapped=""))
        if spec.way != "plain":
            yield _with(program, place, replace(spec, way="plain"))
    for place, step in enumerate(program.steps):
        if isinstance(step, Call):
            for name, simple in (("way", "checkpoint"), ("form", "module"), ("kind", "plain"), ("x", 0)):
                if getattr(step, name) != simple:
                    steps = list(program.steps)
                    steps[place] = replace(step, **{name: simple})
                    yield replace(program, steps=tuple(steps))


def _with(program, place, spec):
    return replace(program, nodes=(*program.nodes[:place], spec, *program.nodes[place + 1 :]))


def main(arguments=None):
    """Run many programs, print what became of them, and return how many failed."""
    parser = argparse.ArgumentParser(description="Random programs whose state changes, with regions and without.")
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--start", type=int, default=0)
    parser.add_argument("--show", type=int, default=5, help="how many of the programs that fail are printed")
    parser.add_argument("--small", action="store_true", help="make these as small as it goes")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    became, met, failing, begin = Counter(), Counter(), collections.defaultdict(list), time.monotonic()
    for seed in range(options.start, options.start + options.count):
        verdict = judged(made(seed))
        became[verdict.kind] += 1
        met += verdict.met
        if verdict.failed:
            failing[verdict.kind].append(seed)
            if sum(map(len, failing.values())) <= options.show:
                program = smaller(made(seed), verdict.kind) if options.small else made(seed)
                print(f"seed {seed}: {verdict.kind}\n{program}\n  # {judged(program).text}\n", flush=True)
        if (seed + 1 - options.start) % 1000 == 0:
            print(f"{seed + 1 - options.start} programs, {dict(became)}, {time.monotonic() - begin:.0f} s", flush=True)
    print(dict(became))
    print("met:", ", ".join(f"{name} {count}" for name, count in sorted(met.items())))
    print("never met:", sorted({*CHANGES, *(f"reads: {name}" for name in READS)} - met.keys()))
    for kind, seeds in failing.items():
        print(f"{kind}: seeds {seeds[:40]}")
    return sum(map(len, failing.values()))


if __name__ == "__main__":
    sys.exit(bool(main()))
