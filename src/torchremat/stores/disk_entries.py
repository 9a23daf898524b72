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


@dataclass(eq=False, slots=True)
class Entry:
    """One tensor of a disk writer. All but `source` and `ahead` change only under the disk writer's lock."""

    content: Content
    source: Versioned | None
    extents: list[Extent]
    is_own: bool = False  # whether no other code knows the source
    restarts: bool = False  # whether the write in progress must be done again
    state: State = State.WAITING
    checksum: int = 0
    changed: str | None = None  # the message of the error, if it was written in place
    ahead: ReadAhead | None = None


@dataclass(eq=False, slots=True)
class ReadAhead:
    """A read that began before any caller waited for it.

    Attributes:
        tensor: The memory for it, allocated by the thread that asks: a profiler of that thread's allocations sees it,
            at a program point that does not depend on when the disk is ready. None if the read has failed: the caller
            reads again, and sees why.
        begun: Whether a thread reads.
        done: Whether it has ended.
    """

    tensor: Tensor | None
    begun: bool = False
    done: bool = False


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

    def is_over(self, moves: int) -> bool:
        """Return whether nothing has moved for too long, given the number of moves so far."""
        if moves != self._moves:
            self._moves, self._since_s = moves, time.monotonic()
        return time.monotonic() - self._since_s > self._timeout_s
