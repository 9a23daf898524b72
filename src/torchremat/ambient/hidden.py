"""Operators that are ours, and that nobody who watches a region is shown.

A hook of a store copies tensors in the middle of a user's forward, and does not in the recompute. Whoever counts the
operators of both must not see that.
"""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import contextmanager


class _Hidden(threading.local):
    now = False


# Whether what runs in this thread is hidden.
hidden = _Hidden()


@contextmanager
def hiding() -> Generator[None]:
    """Hide the operators of the block."""
    had, hidden.now = hidden.now, True
    try:
        yield
    finally:
        hidden.now = had
