"""The frames of the Python stack, and of tracebacks: which code runs, for which line of the user's.

Every walk over them is here, or filters one of these.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from types import CodeType, FrameType, TracebackType
from typing import cast

import torch
from torch import nn

# What the names of files in torch and in this package begin with.
TORCH = os.path.dirname(torch.__file__) + os.sep
OURS = os.path.dirname(os.path.abspath(__file__)) + os.sep
PACKAGES = (TORCH, OURS)

# The globals of the code that calls the forward of a module, with or without hooks, traced or not.
_MODULE_GLOBALS = nn.Module._call_impl.__globals__
# The code whose frame every call of a module has.
MODULE_CALL: CodeType = nn.Module._call_impl.__code__


def running() -> Iterator[FrameType]:
    """Yield the frames of the Python stack, innermost first, from the one that asks on."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def runs_in(file: str, names: tuple[str, ...]) -> bool:
    """Return whether code of a file is on the Python stack whose qualified name begins with one of some names."""
    # Without `running`, since some ask for each operator: a generator takes three times as long.
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_filename == file and code.co_qualname.startswith(names):
            return True
        frame = frame.f_back
    return False


def user_frame() -> FrameType | None:
    """Return the innermost frame that is neither torch's nor ours; None if none is."""
    return next((frame for frame in running() if not frame.f_code.co_filename.startswith(PACKAGES)), None)


def module_of(frame: FrameType) -> nn.Module:
    """Return the module of a frame with `MODULE_CALL`."""
    return cast("nn.Module", frame.f_locals["self"])


def running_modules() -> Iterator[nn.Module]:
    """Yield the modules whose calls are running, innermost first."""
    for frame in running():
        if frame.f_code is MODULE_CALL:
            yield module_of(frame)


def calling_module() -> nn.Module | None:
    """Return the module whose call has called the function that asks; None if something else has called it."""
    frame = sys._getframe(2)
    return frame.f_locals["self"] if frame.f_globals is _MODULE_GLOBALS else None


def steps_of(traceback: TracebackType | None) -> Iterator[TracebackType]:
    """Yield the steps of a traceback, outermost first."""
    while traceback is not None:
        yield traceback
        traceback = traceback.tb_next
