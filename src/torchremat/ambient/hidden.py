"""Our own operators, which are hidden from observers of a region.

A store's hook copies tensors in the middle of a user's forward, but not in the recompute. Code that counts the
operators of both must not see those copies.
"""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import contextmanager


class _Hidden(threading.local):
    now = False


# Whether operators of this thread are hidden.
hidden = _Hidden()


@contextmanager
def hiding() -> Generator[None]:
    """Hide the operators of the block."""
    had, hidden.now = hidden.now, True
    try:
        yield
    finally:
        hidden.now = had
