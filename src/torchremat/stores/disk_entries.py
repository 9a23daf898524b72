"""One tensor in transfer to a file and back, and how long to wait for a disk that makes no progress.

The life of a tensor:

    WAITING   taken, not written            the source is held, and counts as pending
    MOVING    a thread writes it            as above
    LEFT      as MOVING, but dropped        as above
    STORED    it is in the file             only its checksum is held
    KEPT      it could not be written       the source is held for good
    CHANGED   it was written in place       nothing is held: the saved values are lost
    DROPPED   its handle is gone            nothing is held

When a write is announced while the source is the caller's own memory, the entry holds a copy as the source from then
on. A write to the file that began with the original is void and is done again: the tensor waits once more.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from enum import Enum, auto

from torch import Tensor

from torchremat.stores.base import Content
from torchremat.stores.extents import Extent
from torchremat.tensors.versioned import Versioned


class State(Enum):
    """The state of a tensor. See the table above."""

    WAITING = auto()
    MOVING = auto()
    LEFT = auto()
    STORED = auto()
    KEPT = auto()
    CHANGED = auto()
    DROPPED = auto()


class Entry:
    """One tensor of a disk writer. All but `source` and `ahead` change only under the disk writer's lock."""

    __slots__ = ("ahead", "changed", "checksum", "content", "extents", "is_own", "mover", "restarts", "source", "state")

    def __init__(self, content: Content, source: Tensor, extents: list[Extent]) -> None:
        self.content = content
        self.extents = extents
        self.source: Versioned | None = Versioned(source)
        self.is_own = False  # whether no other code knows the source
        self.restarts = False  # whether the write in progress must be done again
        self.state = State.WAITING
        self.mover: threading.Thread | None = None
        self.checksum = 0
        self.changed: str | None = None  # the message of the error, if it was written in place
        self.ahead: ReadAhead | None = None


class ReadAhead:
    """A read that began before any caller waited for it.

    Args:
        fresh: The memory for it, allocated by the thread that asks: a profiler of that thread's allocations sees it, at
            a program point that does not depend on when the disk is ready.
    """

    __slots__ = ("done", "mover", "tensor")

    def __init__(self, fresh: Tensor) -> None:
        self.mover: threading.Thread | None = None
        self.done = False
        self.tensor: Tensor | None = fresh  # None if the read has failed: the caller reads again, and sees why


@dataclass(frozen=True, slots=True)
class WriteOutcome:
    """The outcome of a write."""

    state: State
    checksum: int = 0
    message: str | None = None


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
