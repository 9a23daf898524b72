"""The simulated allocator, against the real one on the same code."""

import pytest
import torch
from torch import nn

from torchremat._compat.tensors import is_dense
from torchremat.measuring.allocator import record_allocations
from torchremat.measuring.simulation import KernelCost, Simulation
from torchremat.planning.devices.fakes import Fakes

CPU = torch.device("cpu")


class Model:
    """Kernels that take no workspace."""

    block_bytes = 1
    has_host_generator = True

    def storage_bytes(self, func, args, kwargs):
        return ()

    def kernel(self, func, args, kwargs, result, made):
        return KernelCost(1e-6)


def simulated(code):
    fakes = Fakes()
    with fakes.mode, Simulation(Model(), fakes.met) as simulation:
        prepared = code()
        with simulation.record() as recorder:
            prepared()
    return recorder.trace


def real(code):
    prepared = code()
    with record_allocations(CPU) as recorder:
        prepared()
    return recorder.trace


def chain():
    x = torch.zeros(16, 16)

    def run():
        a = x + 1
        b = a * 2
        del a
        b.add_(1)
        return b.view(-1)[2:].sum()

    return run


def backward(make):
    """A backward in which gradients meet."""

    def code():
        x = torch.ones(8, 8, requires_grad=True)
        x.grad = torch.zeros(8, 8)

        def run():
            make(x * 1).sum().backward()

        return run

    return code


def twice_the_same(h):
    return h + h


def residual(h):
    return h.exp() + h.exp().exp()


CODES = {
    "chain": chain,
    "two branches": backward(lambda h: h.exp() + h.exp()),
    "three branches": backward(lambda h: h.exp() + h.exp() * 2 + h.exp()),
    "a residual": backward(residual),
    "the same gradient twice": backward(twice_the_same),
    "a gradient that others hold": backward(lambda h: h + h.clone() + h.exp()),
    "an expanded gradient": backward(lambda h: h.sum(0).expand(8, 8) + h.exp()),
    "parts of one gradient": backward(lambda h: torch.cat([h, h.exp()]).exp()),
    "a matrix product": backward(lambda h: (h @ h.t()).exp()),
}


@pytest.mark.parametrize("name", CODES)
def test_allocations_are_those_of_the_real_allocator(name):
    # Kernels make tensors of numbers, of at most 8 bytes: those are workspace, which this model has none of.
    expected, found = (
        [delta for delta in trace.delta_bytes.tolist() if abs(delta) > 8]
        for trace in (real(CODES[name]), simulated(CODES[name]))
    )

    assert found == expected


def test_time_passes_by_kernels_alone():
    trace = simulated(chain)

    # Four kernels of a microsecond: add, mul, add_ and sum; views take none here either, but the model says one each.
    assert trace.time_ns.tolist() == sorted(trace.time_ns.tolist())


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: torch.zeros(3, 4), True),
        (lambda: torch.zeros(3, 4).t(), True),
        (lambda: torch.zeros(2, 3, 4, 4).to(memory_format=torch.channels_last), True),
        (lambda: torch.zeros(3, 1).expand(3, 4), False),
        (lambda: torch.zeros(3, 4)[:, :2], False),
    ],
)
def test_dense_tensors_fill_their_memory(make, expected):
    assert is_dense(make()) is expected


def test_the_librarys_own_comparisons_follow_what_was_written():
    fakes = Fakes()
    found = []
    with fakes.mode, Simulation(Model(), fakes.met) as simulation:
        x = torch.zeros(4)
        copy = x.clone()
        found.append(simulation._contents.of(x) == simulation._contents.of(copy))
        x.add_(1)
        found.append(simulation._contents.of(x) == simulation._contents.of(copy))
        x.copy_(copy)
        found.append(simulation._contents.of(x) == simulation._contents.of(copy))
        norm = nn.BatchNorm1d(4)
        before = norm.running_mean.clone()
        norm(torch.zeros(2, 4))
        found.append(simulation._contents.of(norm.running_mean) == simulation._contents.of(before))

    assert found == [True, False, True, False]
