"""What the tests of compiled code share: a block, backends, a backward under them, and what dynamo counted."""

import contextlib
import os
import shutil
import sys

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.nn import functional as F

from probes.memory import record_allocations

FAST = ["eager", "aot_eager"]
# The one that Inductor looks for, also where it only writes programs: it asks it what the processor can do.
COMPILER = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")
NEEDS_COMPILER = pytest.mark.skipif(shutil.which(COMPILER) is None, reason=f"Inductor needs a C++ compiler, {COMPILER}")
INDUCTOR = pytest.param("inductor", marks=NEEDS_COMPILER)

MARKS = [
    # Of torch's own, when inductor is imported or autograd functions are traced.
    pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch"),
    # Of dynamo, which looks at every input of a graph.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]


class Block(nn.Module):
    """A perceptron with a way around it."""

    def __init__(self, width, dropout):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.dropout = dropout

    def forward(self, x):
        return x + F.dropout(self.down(F.gelu(self.up(self.norm(x)))), self.dropout)


def fresh():
    """Forget all that is compiled, and all counts."""
    torch.compiler.reset()
    counters.clear()


def compiled(backend):
    """A block whose backward calls are compiled; plain for None."""
    if backend is None:
        return contextlib.nullcontext()
    return torch._dynamo.compiled_autograd._enable(torch.compile(backend=backend))


def graph_breaks():
    return sum(counters["graph_break"].values())


def graphs():
    """How many graphs have been compiled."""
    return counters["stats"]["unique_graphs"]


def gradients(run, leaves, backend=None):
    """The gradients of one step, with a compiled backward unless `backend` is None."""
    torch.manual_seed(0)
    loss = run().sum()
    with compiled(backend):
        return torch.autograd.grad(loss, leaves)


def peak_tensors(run, nbytes, backend=None):
    """The peak of a backward in tensors, with all that the forward before it keeps.

    Args:
        run: The forward.
        nbytes: The size of a tensor.
        backend: What compiles the backward; it has to have run before.
    """
    with record_allocations(torch.device("cpu")) as recorder:
        loss = run().sum()
        before = recorder.mark("backward")
        with compiled(backend):
            loss.backward()
        after = recorder.mark("end")
    return recorder.trace.peak_bytes_between(before, after) / nbytes


class Net(nn.Module):
    def __init__(self, blocks=4, width=32, dropout=0.0):
        super().__init__()
        self.blocks = nn.ModuleList(Block(width, dropout) for _ in range(blocks))
        self.head = nn.Linear(width, 1)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x).mean()


def net(**sizes):
    torch.manual_seed(0)
    return Net(**sizes), torch.randn(32, 32, 32)


def step(function, model, x):
    """The measured peak of a step, parameters and inputs included, and its gradients."""
    model.zero_grad()
    torch.manual_seed(1)
    with record_allocations(torch.device("cpu")) as recorder:
        begin = recorder.mark("begin")
        loss = function(x)
        loss.backward()
        end = recorder.mark("end")
    tensors = [*model.parameters(), *model.buffers(), x]
    beside = sum(one.untyped_storage().nbytes() for one in tensors)
    peak = recorder.trace.peak_bytes_between(begin, end) + beside
    return peak, [parameter.grad for parameter in model.parameters()]
