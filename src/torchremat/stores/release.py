"""When what was put into a store has left the memory that it came from.

A store may go on reading after `put` has returned, by threads of its own: the tensor that it was given, or what it has
made of it. Whoever puts holds the one, and may have the other held as well: its memory then goes where he lets go, and
not from some thread at some moment.
"""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from torchremat.tensors.handles import Handle


@runtime_checkable
class Settling(Protocol):
    """A handle of a store that goes on reading a tensor after `put` has returned."""

    def settle(self) -> None:
        """Wait until the store reads the tensor no longer."""
        ...


def settle(handle: Handle) -> None:
    """Wait until a store no longer reads what it was given; a store that has copied at once is not waited for."""
    if isinstance(handle, Settling):
        handle.settle()


@runtime_checkable
class Landing(Protocol):
    """A store whose copies may end after `put` has returned, and that can be waited for."""

    def land(self, *, all_of_it: bool) -> None:
        """Wait until the memory of what was put is free: of all of it, or but for so much as it always may hold."""
        ...


def land(store: object, *, all_of_it: bool) -> None:
    """Wait until a store has let go of what it was given, if it is one of those that let go later."""
    if isinstance(store, Landing):
        store.land(all_of_it=all_of_it)


class _Read(threading.local):
    held: list[object] | None = None


_read = _Read()


@contextmanager
def held_in(held: list[object]) -> Generator[None]:
    """Have what stores go on to read after a `put` in the block added to `held`."""
    outer, _read.held = _read.held, held
    try:
        yield
    finally:
        _read.held = outer


def goes_on_reading(tensor: object) -> None:
    """Say, in `put`, that the store reads a tensor after it has returned."""
    if _read.held is not None:
        _read.held.append(tensor)
