"""What is asked of a store: two small interfaces, for our stores and for those of users.

NOTE [ Who owns a stored tensor ]
The handle does, and nothing else. Autograd keeps a handle as long as it would have kept the tensor, so the three hard
cases need no code:

    1. retain_graph=True      `get` is called again; the handle is still there
    2. graph dropped unused   the handle is collected, and its bytes with it
    3. forward pass raises    as 2

NOTE [ Who may write to what was put ]
Anybody may, at any time, and `get` gives what was put or an error, never what was written:

    unannounced   the version moves, and a store that reads the tensor later, or keeps it, compares versions: that is a
                  `MutationError`. A store that has read all of it when `put` returns need not look
    announced     whoever sees a write coming says so before, to the handle. From then on the handle has what was put in
                  memory that nobody else knows, and the write need not move any version

A handle is told with `before_write`, which costs a copy only where the tensor has not been read yet. A handle without
that method is asked for the tensor instead, and a copy of what it gives is put into its store anew: that is right for
every store, and it costs as much as `get` and `put`.
What `get` gives may be written by whoever has it. Who keeps the tensor itself, and so gives it to several, hears of
these writes as well.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from torch import Tensor


class Handle(Protocol):
    """One stored tensor. Dropping the handle frees what the store holds of it; nothing else does."""

    @property
    def stored_bytes(self) -> int:
        """How many bytes the store holds for it."""
        ...

    def get(self) -> Tensor:
        """Return the tensor: without graph, on the device that it came from.

        Its dimensions lie in memory in the order in which they lay, so what was put contiguous is contiguous. May be
        called many times, in any thread, in any order. A store that copies returns fresh memory each time.

        Raises:
            StoreError: It cannot be had any more; never other data.
            MutationError: The store keeps the tensor itself, and it was written in place since.
        """
        ...

    def prefetch(self) -> None:
        """Begin to bring the tensor back, and do not wait for it. Called once before a `get`, or never."""
        ...


@runtime_checkable
class Protecting(Protocol):
    """A handle that is told of writes. See NOTE [ Who may write to what was put ]."""

    def before_write(self) -> None:
        """Have what was put in memory of its own when this returns, since what was put is about to be written.

        May be called many times, and from another thread than `put`. Where the tensor was written before, unannounced,
        this does nothing, and `get` goes on to raise.
        """
        ...


class Store(Protocol):
    """Takes tensors in, gives handles back. Its methods are called from several threads."""

    def put(self, tensor: Tensor) -> Handle | None:
        """Take a tensor; return None if there is no room for it.

        Args:
            tensor: Without graph, any shape and dtype, at least one element; contiguous where the library itself puts,
                of any strides where somebody's own hooks do. It shares its memory and its version counter with the
                tensor that autograd saves. A store that reads it after `put` has returned compares its version before
                and after, and answers with a `MutationError` in `get` if it has moved.
                See NOTE [ Who may write to what was put ]

        Raises:
            StoreError: There is no room, or the medium failed, and the store was told to be strict.
        """
        ...
