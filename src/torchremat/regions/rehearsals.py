"""Whether what runs is no step of anybody's, but one that the library runs to measure it."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

# Of the process, not of a thread: a step may have threads of its own.
_running = [0]
_begun = [0]


@contextmanager
def rehearsing() -> Generator[None]:
    """Mark what runs in the block as run to measure it."""
    _running[0] += 1
    _begun[0] += 1
    try:
        yield
    finally:
        _running[0] -= 1


def is_rehearsing() -> bool:
    """Return whether such a block is open."""
    return _running[0] > 0


def rehearsals() -> int:
    """Return how many such blocks there have been."""
    return _begun[0]
