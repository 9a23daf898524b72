"""The frames that enter compiled code."""

from __future__ import annotations

import os
import sys
from types import CodeType, FunctionType

from torch import nn

from torchremat.frames import TORCH, running

_FILE = TORCH + os.path.join("_dynamo", "eval_frame.py")
_NAMES = ("_TorchDynamoContext", "OptimizedModule")


def enters_compiled_code(code: CodeType) -> bool:
    """Return whether a frame with this code enters compiled code."""
    return code.co_filename == _FILE and code.co_qualname.startswith(_NAMES)


def runs_compiled_code() -> bool:
    """Return whether compiled code is on the caller's stack; it runs eagerly there, since a mode is on."""
    return "torch._dynamo" in sys.modules and any(enters_compiled_code(frame.f_code) for frame in running())


def is_compiled(item: object) -> bool:
    """Return whether calls of a function or module run compiled code."""
    if isinstance(item, nn.Module):
        return type(item).__name__ == "OptimizedModule" or is_compiled_in_place(item)
    return isinstance(item, FunctionType) and "_torchdynamo_orig_callable" in item.__dict__


def is_compiled_in_place(module: nn.Module) -> bool:
    """Return whether calls of a module run compiled code by `module.compile()`."""
    return getattr(module, "_compiled_call_impl", None) is not None
