"""One attempt at a step that ran out of memory, and the agreement of several processes: all repeat it, or none."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from types import TracebackType
from typing import Literal

import torch
from torch import distributed, nn
from torch.distributed import ProcessGroup

from torchremat._compat.collectives import device_of
from torchremat._compat.sharding import has_fsdp, is_managed
from torchremat.errors import UnsupportedError
from torchremat.frames import OURS, PACKAGES, TORCH, steps_of
from torchremat.measuring.exhaustion import asked_bytes, held_bytes
from torchremat.measuring.tracebacks import chain_of
from torchremat.planning.results.plans import Plan
from torchremat.tensors.sizes import format_bytes

Doing = Literal["planning", "forward", "backward"]
AttemptPhase = Literal[Doing, "recompute", "elsewhere"]

# Frames of these files are in the traceback of a failure in a recompute, ours or torch's, and of no other failure.
_RECOMPUTES = (OURS + os.path.join("regions", "recompute.py"), TORCH + os.path.join("utils", "checkpoint.py"))


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One attempt at a step that failed. Holds no tensor.

    Attributes:
        number: 1 for the first attempt at its step.
        phase: The phase that ran: planning for a budget, forward, backward, a recompute in the backward; "elsewhere" if
            another process failed.
        where: The innermost module in the traceback, and the line of the user's code; "" if neither is known.
        asked_bytes: Bytes of the failed request, from the error; None if the error does not say.
        held_bytes: Bytes allocated by torch at the failure, from the error; None if the error does not say.
        plan: The plan that the step ran under; None for a step without one, or with the user's own regions.
        error: The first line of the error.
        then: The reaction to the failure.
    """

    number: int
    phase: AttemptPhase
    where: str
    asked_bytes: int | None
    held_bytes: int | None
    plan: Plan | None
    error: str
    then: str = ""

    def __str__(self) -> str:
        asked = "" if self.asked_bytes is None else f", {format_bytes(self.asked_bytes)} asked for"
        held = "" if self.held_bytes is None else f" with {format_bytes(self.held_bytes)} held"
        under = "no plan" if self.plan is None else f"a plan for {format_bytes(self.plan.peak_bytes)}"
        place = f" {self.where}" if self.where else ""
        then = f"; then {self.then}" if self.then else ""
        return f"attempt {self.number}, {under}: {self.phase}{place}{asked}{held}{then}"


def attempt_of(error: BaseException, *, number: int, doing: Doing, model: nn.Module, plan: Plan | None) -> Attempt:
    """Return the attempt that an error ended, from the error. Its frames must still exist."""
    # The first frame is the caller's, which still runs; its variables must not be read: see `let_go`.
    frames = list(steps_of(error.__traceback__))[1:]
    recomputed = any(frame.tb_frame.f_code.co_filename in _RECOMPUTES for frame in frames)
    phase: AttemptPhase = "recompute" if recomputed and doing == "backward" else doing
    return Attempt(
        number=number,
        phase=phase,
        where=_where(frames, model),
        asked_bytes=_first(asked_bytes, error),
        held_bytes=_first(held_bytes, error),
        plan=plan,
        error=(str(error) or type(error).__name__).splitlines()[0][:300],
    )


def _first(read: Callable[[BaseException], int | None], error: BaseException) -> int | None:
    return next((found for one in chain_of(error) if (found := read(one)) is not None), None)


def _where(frames: list[TracebackType], model: nn.Module) -> str:
    names = {id(module): name for name, module in model.named_modules()}
    module = line = ""
    for one in reversed(frames):
        file = one.tb_frame.f_code.co_filename
        if not line and not file.startswith(PACKAGES):
            line = f"{Path(file).name}:{one.tb_lineno}"
        if not module:
            module = names.get(id(one.tb_frame.f_locals.get("self")), "")
    return " ".join(filter(None, [f"in `{module}`" if module else "", f"at {line}" if line else ""]))


class AttemptOutcome(IntEnum):
    """How an attempt ended in one process; the largest of all processes counts."""

    DONE = 0
    FAILED = 1  # out of memory
    GIVEN_UP = 2  # out of memory, and must not be repeated
    RAISED = 3  # something else


def check_alone(model: nn.Module, group: ProcessGroup | None) -> None:
    """Refuse a guard in one of several processes that have not agreed on one.

    Raises:
        UnsupportedError: Several processes and no group; or the step of the model has its own collectives.
    """
    if not distributed.is_available() or not distributed.is_initialized():
        if group is not None:
            raise UnsupportedError("group: torch.distributed is not initialized, so there is no process to agree with.")
        return
    if distributed.get_world_size() == 1:
        return
    if group is None:
        raise UnsupportedError(
            f"guard: this is one of {distributed.get_world_size()} processes. One that runs its step again would leave "
            "the others waiting in their collectives. Pass `group=torch.distributed.group.WORLD`, so that all run it "
            "again or none does; the step itself must then have no collectives (`no_sync()`), because a process that "
            "runs out of memory before one leaves the others in it."
        )
    if has_fsdp() and any(map(is_managed, model.modules())):
        raise UnsupportedError(
            "guard: the model is sharded with `fully_shard`, whose forward and backward are collectives. A process "
            "that runs out of memory between them leaves the others waiting, and no agreement can undo that. Give "
            "the model a budget instead: torchremat.fit."
        )


def check_no_sync(model: nn.Module) -> None:
    """Refuse a step in which DistributedDataParallel would reduce gradients.

    Raises:
        UnsupportedError: It is not within `no_sync()`.
    """
    for module in model.modules():
        if isinstance(module, nn.parallel.DistributedDataParallel) and module.require_backward_grad_sync:
            raise UnsupportedError(
                "guard: DistributedDataParallel reduces gradients during backward, and a process that runs out of "
                "memory there leaves the others waiting. Call the guarded step within `model.no_sync()`, and reduce "
                "the gradients after it."
            )


def agreed(mine: AttemptOutcome, group: ProcessGroup | None) -> AttemptOutcome:
    """Return the worst outcome of all processes of a group; mine without a group."""
    if group is None or distributed.get_world_size(group) == 1:
        return mine
    worst = torch.tensor([int(mine)], device=device_of(group))
    distributed.all_reduce(worst, distributed.ReduceOp.MAX, group=group)
    return AttemptOutcome(int(worst.item()))
