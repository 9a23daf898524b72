"""Memory that ran out: the errors of hosts and devices, and what they hold."""

import contextlib
import gc
import sys
import weakref

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from torchremat.measuring.exhaustion import IfItFits, asked_bytes, held_bytes, is_out_of_memory, let_go

ON_CUDA = (
    "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 79.10 GiB of which 1 GiB is free. "
    "Of the allocated memory 70.00 GiB is allocated by PyTorch, and 1.00 GiB is reserved by PyTorch but unallocated."
)


def real(function):
    try:
        function()
    except (RuntimeError, MemoryError) as error:
        return error


@pytest.mark.parametrize(
    ("error", "asked"),
    [
        (torch.OutOfMemoryError(ON_CUDA), 5 * 2**29),
        (real(lambda: torch.empty(2**60, dtype=torch.uint8)), 2**60),
        (real(lambda: bytearray(2**62)), None),
        (RuntimeError("CUDA error: out of memory"), None),
        (RuntimeError("std::bad_alloc"), None),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), None),
        (RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"), None),
        (RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"), None),
        (RuntimeError("NCCL error: unhandled cuda error. Last error: Cuda failure 2 'out of memory'"), None),
    ],
)
def test_what_is_out_of_memory(error, asked):
    assert is_out_of_memory(error)
    assert asked_bytes(error) == asked


def test_what_is_not():
    assert not any(map(is_out_of_memory, [RuntimeError("mine"), ValueError(ON_CUDA), KeyboardInterrupt()]))


def test_bytes_that_were_held():
    assert held_bytes(torch.OutOfMemoryError(ON_CUDA)) == 70 * 2**30
    assert held_bytes(MemoryError()) is None


def test_a_block_ends_where_memory_runs_out_and_nowhere_else():
    ran = []

    with IfItFits():
        ran.append("before")
        raise MemoryError
    ran.append("after")
    with pytest.raises(RuntimeError, match="mine"), IfItFits():
        raise RuntimeError("mine")

    assert ran == ["before", "after"]


@pytest.mark.parametrize("asked_for_variables", [False, True])
def test_frames_let_go_of_their_variables(asked_for_variables):
    held = []

    def inner():
        tensor = torch.ones(3)
        held.append(weakref.ref(tensor))
        raise MemoryError

    def outer():
        other = torch.ones(4)
        held.append(weakref.ref(other))
        try:
            inner()
        except MemoryError as error:
            raise RuntimeError("std::bad_alloc") from error

    error = real(outer)
    if asked_for_variables:
        frame = error.__traceback__.tb_next.tb_frame
        assert "other" in frame.f_locals
        del frame
    assert all(one() is not None for one in held)

    let_go(error)

    assert [one() for one in held] == [None, None]
    assert error.__traceback__ is not None
    assert sys.exc_info() == (None, None, None)


def test_who_lets_go_makes_no_cycle():
    # Frames that still run were asked for their variables too, and before Python 3.13 those that were asked have a dict
    # of them from then on: the error was in it, and in the error the frame. So a guarded step held its batch, and the
    # planner its model, until the cycle collector came.
    def fails():
        raise MemoryError

    def handles(tensor):
        try:
            fails()
        except MemoryError as error:
            let_go(error)
            return tensor, error

    tensor = torch.ones(3)
    held = weakref.ref(tensor)
    gc.collect()
    gc.disable()
    try:
        handles(tensor)
        del tensor
        assert held() is None
    finally:
        gc.enable()


class Kept:
    """What autograd has saved, to see when it goes."""

    def __init__(self, tensor):
        self.tensor = tensor


class Operators(TorchDispatchMode):
    """Counts the operators that run."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += 1
        return function(*args, **(kwargs or {}))


# torch leaves them to the thread's next backward; a step that is run again would begin beside all that they hold.
@pytest.mark.parametrize("mode", [contextlib.nullcontext, torch.no_grad, torch.inference_mode])
def test_the_nodes_that_a_failed_backward_has_left_go(mode):
    kept = []

    def pack(tensor):
        one = Kept(tensor)
        kept.append(weakref.ref(one))
        return one

    def fail(_gradient):
        raise MemoryError

    def are_alive():
        return any(one() is not None for one in kept)

    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8), nn.GELU())
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda one: one.tensor):
        loss = model(torch.ones(2, 8)).sum()
    model[2].weight.register_hook(fail)
    error = real(loss.backward)
    del loss
    error.__traceback__ = None
    gc.collect()
    assert are_alive()

    with mode(), Operators() as operators:
        let_go(error)

    assert not are_alive()
    assert operators.count == 0
