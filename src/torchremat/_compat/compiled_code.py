"""The frames that enter compiled code."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import CodeType, FrameType, FunctionType

import torch
from torch import nn

_FILE = str(Path(torch.__file__).parent) + os.sep + str(Path("_dynamo", "eval_frame.py"))
_NAMES = ("_TorchDynamoContext", "OptimizedModule")


def enters_compiled_code(code: CodeType) -> bool:
    """Return whether a frame with this code enters compiled code."""
    return code.co_filename == _FILE and code.co_qualname.startswith(_NAMES)


def runs_compiled_code() -> bool:
    """Return whether compiled code is on the caller's stack; it runs eagerly there, since a mode is on."""
    frame: FrameType | None = sys._getframe(1) if "torch._dynamo" in sys.modules else None
    while frame is not None:
        if enters_compiled_code(frame.f_code):
            return True
        frame = frame.f_back
    return False


def is_compiled(item: object) -> bool:
    """Return whether calls of a function or module run compiled code."""
    if isinstance(item, nn.Module):
        return type(item).__name__ == "OptimizedModule" or is_compiled_in_place(item)
    return isinstance(item, FunctionType) and "_torchdynamo_orig_callable" in item.__dict__


def is_compiled_in_place(module: nn.Module) -> bool:
    """Return whether calls of a module run compiled code by `module.compile()`."""
    return getattr(module, "_compiled_call_impl", None) is not None
