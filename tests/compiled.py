"""What the tests of compiled autograd share: backends, a backward under it, and what dynamo counted."""

import contextlib
import shutil

import pytest
import torch
from torch._dynamo.utils import counters

from torchremat.measuring.allocator import record_allocations

FAST = ["eager", "aot_eager"]
INDUCTOR = pytest.param(
    "inductor", marks=pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler")
)

MARKS = [
    # Of torch's own, when inductor is imported or autograd functions are traced.
    pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch"),
    # Of dynamo, which looks at every input of a graph.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]


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
