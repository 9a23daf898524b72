"""The bytes of `optimizer.step()`: state that does not exist yet, and temporaries. Measured, then undone."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from torchremat.errors import UnsupportedError
from torchremat.measuring.before import bytes_before
from torchremat.measuring.exhaustion import is_out_of_memory
from torchremat.measuring.optimizers import with_wrapped, without_hooks, words_for_wrapped
from torchremat.measuring.runs import Subject
from torchremat.measuring.untouched import gradient_leaves, written_back
from torchremat.optimizing.partial_steps import steps_in_parts
from torchremat.planning.devices.machines import Machine
from torchremat.state.reach import reach
from torchremat.state.world import Reaching

# How many steps show all the state of an optimizer. torch's own optimizers make it in the first step; third-party ones
# may make some later, like Lookahead at each fifth or sixth step.
_STEPS = 12


@dataclass(frozen=True, kw_only=True)
class OptimizerBytes:
    """Bytes of an optimizer on the device.

    Attributes:
        name: Its type.
        state_bytes: State that it has after its first steps and did not have before.
        peak_bytes: Peak of a step over the live bytes before the first training step: new state is included, and the
            gradients that a backward makes.
    """

    name: str
    state_bytes: int
    peak_bytes: int


def measure_optimizer(subject: Subject, optimizer: torch.optim.Optimizer, machine: Machine) -> OptimizerBytes:
    """Run one or several steps with zero gradients, then restore parameters and state, of a wrapped optimizer too.

    Copies are in host memory meanwhile. The hooks of the optimizer are not run, and a scheduler that counts its steps
    does not see these. Several steps are run if code outside torch may make state later than in the first.

    Raises:
        UnsupportedError: See `step_alone`.
    """
    optimizers = with_wrapped(optimizer)

    def state_bytes() -> int:
        nothing = bytes_before(models=(), leaves=(), optimizers=optimizers, inputs=(), device=machine.device)
        return nothing.optimizer_bytes

    parts = steps_in_parts(optimizer)
    if parts is None:
        with stepped_and_undone(subject, optimizer) as step:
            before = state_bytes()
            with machine.stepping(), machine.record() as recorder:
                for _ in range(1 if all(map(_is_of_torch, optimizers)) else _STEPS):
                    step()
            made_bytes = state_bytes() - before
        peak_bytes = recorder.trace.peak_bytes
    else:
        before = state_bytes()
        with subject.untouched(steps=parts.release is None), parts.state_made():
            made_bytes = state_bytes() - before
            with machine.stepping(), machine.record() as recorder:
                parts.rehearse_step()
        peak_bytes = recorder.trace.peak_bytes + made_bytes
    if parts is None or parts.release is None:
        peak_bytes += subject.made_bytes(machine.device)
    return OptimizerBytes(name=type(optimizer).__name__, state_bytes=made_bytes, peak_bytes=peak_bytes)


@contextmanager
def state_made(subject: Subject) -> Generator[None]:
    """Let the state of an optimizer that steps in parts exist in the block: parts are measured as they are later."""
    parts = None if subject.optimizer is None else steps_in_parts(subject.optimizer)
    if parts is None:
        yield
        return
    with parts.state_made():
        yield


def knows_order(subject: Subject) -> bool:
    """Return whether the bytes of a step are those of the steps after it; not so before state is brought ahead."""
    parts = None if subject.optimizer is None else steps_in_parts(subject.optimizer)
    return parts is None or parts.release is None or parts.mover is None or parts.mover.knows_order


def _is_of_torch(optimizer: torch.optim.Optimizer) -> bool:
    return type(optimizer).__module__.partition(".")[0] == "torch"


@contextmanager
def stepped_and_undone(subject: Subject, optimizer: torch.optim.Optimizer) -> Generator[Callable[[], None]]:
    """Yield a function that runs one step with zero gradients; all its side effects are undone after the block.

    Raises:
        UnsupportedError: See `step_alone`.
    """
    optimizers = with_wrapped(optimizer)
    leaves = gradient_leaves(subject.models, optimizer, subject.inputs)
    world = Reaching()
    reach(world, [optimizer], are_whole=True)
    # Parameters that do not require grad may also belong to an optimizer: a slow copy, an average.
    held = {id(one): one for one in (*leaves, *world.tensors)}
    with subject.untouched(steps=True), written_back(held.values()), without_hooks(optimizers) as step:
        yield lambda: step_alone(optimizer, step)


def step_alone(optimizer: torch.optim.Optimizer, step: Callable[[], object]) -> None:
    """Run the step of an optimizer, given as `step`, without a closure.

    Raises:
        UnsupportedError: It cannot run like that: LBFGS needs a closure.
    """
    try:
        step()
    except Exception as error:
        if is_out_of_memory(error):
            raise
        why = str(error).rstrip(".") or repr(error)
        inner = words_for_wrapped(with_wrapped(optimizer))
        advice = f"Hand over {inner} in its place, or leave" if inner else "Leave"
        raise UnsupportedError(
            f"{type(optimizer).__name__}.step() has to run by itself for its bytes to be counted, and it cannot: "
            f"{why}. {advice} the optimizer out, and leave room for its bytes by `margin=`."
        ) from error
