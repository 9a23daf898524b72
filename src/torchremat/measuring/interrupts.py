"""Ctrl-C, while things are put back."""

from __future__ import annotations

import signal
import threading
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def uninterrupted() -> Generator[None]:
    """Let Ctrl-C wait for the end of the block: what is put back by half would be neither the user's state nor ours."""
    usual = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(usual):
        yield  # signals arrive in the main thread alone, and only it may say what becomes of them
        return
    came: list[FrameType | None] = []
    signal.signal(signal.SIGINT, lambda _, frame: came.append(frame))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, usual)
        if came:
            usual(signal.SIGINT, came[0])
