"""When what was put into a store has left the memory that it came from."""

from __future__ import annotations

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
