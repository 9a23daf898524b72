"""How long to wait for a disk that makes no progress."""

from __future__ import annotations

import time


class Patience:
    """A timeout that restarts with every move."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._moves = -1
        self._since_s = time.monotonic()

    def moved(self, moves: int) -> None:
        """Record the number of moves so far."""
        if moves != self._moves:
            self._moves, self._since_s = moves, time.monotonic()

    def is_over(self, moves: int) -> bool:
        """Return whether nothing has moved for too long."""
        self.moved(moves)
        return time.monotonic() - self._since_s > self._timeout_s
