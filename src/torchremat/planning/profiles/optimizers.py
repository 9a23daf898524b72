"""What `optimizer.step()` needs: state that is not there yet, and temporaries. Measured, then undone."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from torchremat.errors import UnsupportedError
from torchremat.measuring.before import bytes_before
from torchremat.measuring.exhaustion import is_out_of_memory
from torchremat.measuring.interrupts import uninterrupted
from torchremat.measuring.runs import Subject
from torchremat.measuring.untouched import gradient_leaves, written_back
from torchremat.planning.elsewhere.machines import Machine


@dataclass(frozen=True, kw_only=True)
class OptimizerBytes:
    """Bytes of an optimizer on the device.

    Attributes:
        name: Its type.
        state_bytes: State that it has after its first step and did not have before.
        peak_bytes: Highest live bytes during a step over those before it, new state included.
    """

    name: str
    state_bytes: int
    peak_bytes: int


def measure_optimizer(subject: Subject, optimizer: torch.optim.Optimizer, machine: Machine) -> OptimizerBytes:
    """Run one step with gradients of zero, and put parameters and state back.

    Copies lie in host memory meanwhile. The hooks of the optimizer are not run, and a scheduler that counts its steps
    does not see this one.

    Raises:
        UnsupportedError: See `step_alone`.
    """

    def state_bytes() -> int:
        nothing = bytes_before(models=(), leaves=(), optimizer=optimizer, inputs=(), device=machine.device)
        return nothing.optimizer_bytes

    with stepped_and_undone(subject, optimizer) as step:
        before = state_bytes()
        with machine.stepping(), machine.record() as recorder:
            step()
        after = state_bytes()
    return OptimizerBytes(
        name=type(optimizer).__name__, state_bytes=after - before, peak_bytes=recorder.trace.peak_bytes
    )


@contextmanager
def stepped_and_undone(subject: Subject, optimizer: torch.optim.Optimizer) -> Generator[Callable[[], None]]:
    """Give a function that runs one step, with gradients of zero; parameters and state are put back after the block.

    Raises:
        UnsupportedError: See `step_alone`.
    """
    leaves = gradient_leaves(subject.models, optimizer, subject.inputs)
    step = type(optimizer).step
    # `Optimizer` wraps the step of each subclass in one that runs hooks and counts.
    unwrapped = cast("Callable[[torch.optim.Optimizer], object]", getattr(step, "__wrapped__", step))
    with subject.untouched(), written_back(leaves), _put_back(optimizer):
        yield lambda: step_alone(optimizer, lambda: unwrapped(optimizer))


def step_alone(optimizer: torch.optim.Optimizer, step: Callable[[], object]) -> None:
    """Run the step of an optimizer, given as `step`, without a closure.

    Raises:
        UnsupportedError: It cannot run like that: LBFGS needs a closure, SparseAdam wants other gradients than zeros.
    """
    try:
        step()
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise UnsupportedError(
            f"{type(optimizer).__name__}.step() has to run by itself for its bytes to be counted, and it cannot: "
            f"{error}. Leave the optimizer out, and leave room for its bytes in the budget."
        ) from error


@contextmanager
def _put_back(optimizer: torch.optim.Optimizer) -> Generator[None]:
    """Put back what an optimizer's attributes hold: dicts and lists with their items, tensors with their values.

    Not of its parameters. Each object stays the one that it is: a schedule may hold the tensor of a learning rate.
    """
    dicts: list[tuple[dict[object, object], dict[object, object]]] = []
    lists: list[tuple[list[object], list[object]]] = []
    tensors: list[Tensor] = []
    groups = cast("list[dict[str, list[object]]]", optimizer.param_groups)
    seen = {id(parameter) for group in groups for parameter in group["params"]}
    waiting: list[object] = [vars(optimizer)]
    while waiting:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, Tensor):
            tensors.append(value)
        elif isinstance(value, dict):
            table = cast("dict[object, object]", value)
            dicts.append((table, dict(table)))
            waiting += table.values()
        elif isinstance(value, list):
            items = cast("list[object]", value)
            lists.append((items, list(items)))
            waiting += items
    try:
        with written_back(tensors):
            yield
    finally:
        with uninterrupted():
            for table, before in dicts:
                for key in table.keys() - before.keys():
                    del table[key]
                table.update(before)
            for items, was in lists:
                items[:] = was
