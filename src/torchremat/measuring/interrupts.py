"""Hold back Ctrl-C and other signals while state is restored."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from types import FrameType

_NUMBERS = tuple(map(int, signal.valid_signals()))
_depth = 0  # of blocks, which are in the main thread alone


@contextmanager
def uninterrupted() -> Generator[Callable[[], None]]:
    """Delay what handlers of signals do to the end of the block: half-restored state would be neither theirs nor ours.

    Yields:
        A function that lets them do it before, for places of the block where they may raise; inside of another such
        block it does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: None  # signals arrive only in the main thread, and only it may set their handlers
        return
    came: list[tuple[int, FrameType | None]] = []
    usual = {number: handler for number in _NUMBERS if callable(handler := signal.getsignal(number))}

    def handle() -> None:
        with ExitStack() as stack:  # which goes on where one of them raises
            while came:
                number, frame = came.pop()
                stack.callback(usual[number], number, frame)

    with ExitStack() as stack:
        stack.callback(handle)
        for number, handler in usual.items():
            stack.callback(signal.signal, number, handler)
            signal.signal(number, lambda number, frame: came.append((number, frame)))
        stack.callback(_deepen, -1)
        _deepen(1)
        own_depth = _depth
        yield lambda: handle() if _depth == own_depth else None


def _deepen(by: int) -> None:
    global _depth
    _depth += by
