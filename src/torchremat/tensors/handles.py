"""What is asked of a store: two small interfaces, for our stores and for those of users.

NOTE [ Who owns a stored tensor ]
The handle does, and nothing else. Autograd keeps a handle as long as it would have kept the tensor, so the three hard
cases need no code:

    1. retain_graph=True      `get` is called again; the handle is still there
    2. graph dropped unused   the handle is collected, and its bytes with it
    3. forward pass raises    as 2
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Handle(Protocol):
    """One stored tensor. Dropping the handle frees what the store holds of it; nothing else does."""

    @property
    def stored_bytes(self) -> int:
        """How many bytes the store holds for it."""
        ...

    def get(self) -> Tensor:
        """Return the tensor: contiguous, without graph, on the device that it came from.

        May be called many times, in any thread, in any order. A store that copies returns fresh memory each time.

        Raises:
            StoreError: It cannot be had any more; never other data.
            MutationError: The store keeps the tensor itself, and it was written in place since.
        """
        ...

    def prefetch(self) -> None:
        """Begin to bring the tensor back, and do not wait for it. Called once before a `get`, or never."""
        ...


class Store(Protocol):
    """Takes tensors in, gives handles back. Its methods are called from several threads."""

    def put(self, tensor: Tensor) -> Handle | None:
        """Take a tensor; return None if there is no room for it.

        Args:
            tensor: Contiguous, without graph, any shape and dtype, at least one element. It shares its memory and its
                version counter with the tensor that autograd saves. A store that reads it after `put` has returned
                compares its version before and after, and answers with a `MutationError` in `get` if it has moved.

        Raises:
            StoreError: There is no room, or the medium failed, and the store was told to be strict.
        """
        ...
