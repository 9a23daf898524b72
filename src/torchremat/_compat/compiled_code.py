"""The frames by which compiled code is entered."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import CodeType, FrameType

import torch

_FILE = str(Path(torch.__file__).parent) + os.sep + str(Path("_dynamo", "eval_frame.py"))
_NAMES = ("_TorchDynamoContext", "OptimizedModule")


def enters_compiled_code(code: CodeType) -> bool:
    """Return whether a frame with this code is one by which compiled code is entered."""
    return code.co_filename == _FILE and code.co_qualname.startswith(_NAMES)


def runs_compiled_code() -> bool:
    """Return whether compiled code has called what calls this, eagerly since a mode is on."""
    frame: FrameType | None = sys._getframe(1) if "torch._dynamo" in sys.modules else None
    while frame is not None:
        if enters_compiled_code(frame.f_code):
            return True
        frame = frame.f_back
    return False
