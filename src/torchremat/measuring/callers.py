"""The line of user code that runs an operator, for messages about steps that need values and have none."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator
from pathlib import Path
from types import CodeType, FrameType

import torch

from torchremat.frames import OURS, TORCH, running

_ATEN = torch.ops.aten
_SHOWN_PARTS = 3  # of a path outside the folder that Python runs in
_SIMULATION = os.path.join(os.path.dirname(os.path.abspath(__file__)), "simulation.py")


def _callers() -> Generator[FrameType]:
    """Yield the frames around an operator from the innermost, without frames of torch and of modes."""
    for frame in running():
        code = frame.f_code
        file = code.co_filename
        if file not in (__file__, _SIMULATION) and code.co_name not in _OF_MODES and not file.startswith(TORCH):
            yield frame


_OF_MODES = ("__torch_dispatch__", "__torch_function__")


def asked_by_us() -> bool:
    """Return whether a file of this package, not user code, called the running operator."""
    return next((frame.f_code.co_filename.startswith(OURS) for frame in _callers()), False)


def _user_frame() -> FrameType | None:
    """Return the innermost frame of user code, neither torch's nor ours."""
    return next((frame for frame in _callers() if not frame.f_code.co_filename.startswith(OURS)), None)


def line_of_user(within: CodeType) -> tuple[str, int] | None:
    """Return file and line of the innermost user frame called from `within`; None if it called none."""
    for frame in _callers():
        if frame.f_code is within:
            return None
        if not frame.f_code.co_filename.startswith(OURS):
            return frame.f_code.co_filename, frame.f_lineno
    return None


def shown_line(file: str, line: int) -> str:
    """Return a line of code in short: relative to the folder that Python runs in, or by the end of its path."""
    path, here = Path(file), Path.cwd()
    short = path.relative_to(here) if path.is_relative_to(here) else Path(*path.parts[-_SHOWN_PARTS:])
    return f"{short}:{line}"


def place_of_user() -> str:
    """Return file and line of the innermost frame that is neither torch's nor ours."""
    return _place(_user_frame())


def _place(frame: FrameType | None) -> str:
    return "an unknown line" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


_WORDS: dict[object, str] = {
    _ATEN._local_scalar_dense.default: "reads a value (`.item()`, `float(...)`, `if tensor:`)",
    _ATEN.equal.default: "compares values (`torch.equal`)",
}


def depends_on_data(func: Callable[..., object]) -> str:
    """Return the message for an operator whose result depends on values, with the line that runs it."""
    frame = _user_frame()
    inside = "" if frame is None else f", in `{frame.f_code.co_name}`"
    what = _WORDS.get(func, f"makes a result whose shape depends on values ({func})")
    return reads_data(f"{_place(frame)}{inside}", what)


def reads_data(place: str, what: str) -> str:
    """Return the message for a step that does `what`, an act that needs values, at a place."""
    return (
        f"{place}: the step {what}, and on='meta' computes none. Take it out of the step for planning, or plan where "
        "the step can run, without on='meta'."
    )
