"""Hold back Ctrl-C while state is restored."""

from __future__ import annotations

import signal
import threading
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def uninterrupted() -> Generator[None]:
    """Delay Ctrl-C to the end of the block: half-restored state would be neither the user's nor ours."""
    usual = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(usual):
        yield  # signals arrive only in the main thread, and only it may set their handlers
        return
    came: list[FrameType | None] = []
    signal.signal(signal.SIGINT, lambda _, frame: came.append(frame))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, usual)
        if came:
            usual(signal.SIGINT, came[0])
