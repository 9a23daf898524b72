"""One tensor on its way into a file and back.

The life of a tensor:

    WAITING   taken, not written            the source is held, and counts as pending
    MOVING    a thread writes it            as above
    LEFT      as MOVING, but dropped        as above
    STORED    it is in the file             only its checksum is held
    KEPT      it could not be written       the source is held for good
    CHANGED   it was written in place       nothing is held: what was saved is nowhere any more
    DROPPED   nobody asks for it any more   nothing is held

Whoever is told of a write while the source is the caller's own memory holds a copy as the source from then on. A write
to the file that had begun with the other one is no good, and is done again: the tensor waits once more.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from enum import Enum, auto

from torch import Tensor

from torchremat.stores.contents import Content
from torchremat.stores.extents import Extent
from torchremat.tensors.metadata import version_of


class State(Enum):
    """Where a tensor is. See the table above."""

    WAITING = auto()
    MOVING = auto()
    LEFT = auto()
    STORED = auto()
    KEPT = auto()
    CHANGED = auto()
    DROPPED = auto()


class Entry:
    """One tensor of a spool. All but `source` and `ahead` change under the spool's lock alone."""

    __slots__ = (
        "ahead",
        "changed",
        "checksum",
        "content",
        "extents",
        "is_own",
        "mover",
        "restarts",
        "source",
        "state",
        "version",
    )

    def __init__(self, content: Content, source: Tensor, extents: list[Extent]) -> None:
        self.content = content
        self.extents = extents
        self.source: Tensor | None = source
        self.version = version_of(source)
        self.is_own = False  # whether nobody else knows the source
        self.restarts = False  # whether what a thread writes now is to be written again
        self.state = State.WAITING
        self.mover: threading.Thread | None = None
        self.checksum = 0
        self.changed: str | None = None  # the message of the error, if it was written in place
        self.ahead: ReadAhead | None = None


class ReadAhead:
    """A read that was begun before anybody waited for it.

    Args:
        fresh: The memory for it, made by the thread that asks: whoever watches what that thread allocates sees it, at a
            moment that does not depend on when the disk is ready.
    """

    __slots__ = ("done", "mover", "tensor")

    def __init__(self, fresh: Tensor) -> None:
        self.mover: threading.Thread | None = None
        self.done = False
        self.tensor: Tensor | None = fresh  # none if the read has failed: who asks reads again, and sees why


@dataclass(frozen=True, slots=True)
class WriteOutcome:
    """What became of a write."""

    state: State
    checksum: int = 0
    message: str | None = None
