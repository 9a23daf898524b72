"""When the memory of a tensor that was put into a store becomes free.

A store may go on reading after `put` has returned, in threads of its own: the tensor that it was given, or a tensor
made from it. The caller keeps the first alive, and may keep the second alive too: its memory is then freed where the
caller drops it, and not by some thread at an arbitrary time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from torchremat.tensors.handles import Handle


def settle(handle: Handle) -> None:
    """Wait until a store no longer reads the tensor it was given; no wait for a store that copied at once.

    A handle of a store that goes on reading after `put` has a method `settle` for this.
    """
    wait: Callable[[], None] | None = getattr(handle, "settle", None)
    if wait is not None:
        wait()


@runtime_checkable
class Landing(Protocol):
    """A store whose copies may end after `put` has returned, and that can be waited for."""

    def land(self, *, all_of_it: bool) -> None:
        """Wait until the memory of all tensors that were put is free, or all except what may always be in flight."""
        ...


def land(store: object, *, all_of_it: bool) -> None:
    """Wait until a store has released the tensors it was given, if it is one that releases them later."""
    if isinstance(store, Landing):
        store.land(all_of_it=all_of_it)


class _PendingReads(threading.local):
    held: list[object] | None = None


_read = _PendingReads()


@contextmanager
def held_in(held: list[object]) -> Generator[None]:
    """Collect in `held` the tensors that stores go on reading after a `put` in the block."""
    outer, _read.held = _read.held, held
    try:
        yield
    finally:
        _read.held = outer


def goes_on_reading(tensor: object) -> None:
    """Declare, in `put`, that the store reads a tensor after it has returned."""
    if _read.held is not None:
        _read.held.append(tensor)
