"""One attempt at a step that ran out of memory: its location, the failed request, and the active plan."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Literal

from torch import nn

from torchremat.frames import OURS, PACKAGES, TORCH, steps_of
from torchremat.measuring.exhaustion import asked_bytes, chain_of, held_bytes
from torchremat.planning.plans import Plan
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
