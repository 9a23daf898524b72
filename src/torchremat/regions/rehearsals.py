"""Whether the running step is one that the library runs to measure it, not a step of the user."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

# Per process, not per thread: a step may have its own threads.
_running = [0]
_begun = [0]


@contextmanager
def rehearsing() -> Generator[None]:
    """Mark the code in the block as run to measure it."""
    _running[0] += 1
    _begun[0] += 1
    try:
        yield
    finally:
        _running[0] -= 1


def is_rehearsing() -> bool:
    """Return whether a block of `rehearsing` is open."""
    return _running[0] > 0


def rehearsals() -> int:
    """Return how many blocks of `rehearsing` have been opened."""
    return _begun[0]
