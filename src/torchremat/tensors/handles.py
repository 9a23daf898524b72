"""The interface of a store: two small protocols, for our stores and for those of users.

NOTE [ Who owns a stored tensor ]
Only the handle does. Autograd keeps a handle as long as it would have kept the tensor, so the three hard
cases need no code:

    1. retain_graph=True      `get` is called again; the handle is still there
    2. graph dropped unused   the handle is collected, and its bytes with it
    3. forward pass raises    as 2

NOTE [ Who may write to what was put ]
Any code may, at any time, and `get` returns the tensor as it was put or raises, and never returns a written value:

    unannounced   the version moves, and a store that reads the tensor later, or keeps it, compares versions: a
                  difference is a `MutationError`. A store that has read all of it when `put` returns need not check
    announced     the code that is about to write tells the handle first. From then on the handle has the stored value
                  in memory that no other code knows, and the write need not move any version

A handle is told with `before_write`, which costs a copy only if the tensor has not been read yet. A handle without that
method is asked for the tensor instead, and a copy of the result is put into its store anew: this is right for every
store, and costs as much as `get` and `put`.
The caller of `get` may write to the result. A store that keeps the tensor itself, and so gives it to several callers,
is told of these writes as well.

NOTE [ What a store may have as well ]
`put` is all that a store needs, and a handle `get`, `prefetch` and `stored_bytes`. Other members are used where they
exist:

    store    `statistics`        its counts, a `StoreStatistics`: `Tiers` adds them up, messages and plans read them
             `strict`            whether `put` raises for want of room: `Tiers` refuses such a store
             `land(all_of_it=)`  waits until memory that it still reads after `put` is free: `stores.base.Landing`
             `lossy`             a codec that changes values, or None: plans refuse it without `allow_lossy`
             `store`, `stores`   the stores that it is made of, which are asked for `lossy` too
    handle   `before_write`      see NOTE [ Who may write to what was put ]
             `settle`            waits until the store reads the tensor no longer

A store that reads a tensor after `put` has returned calls `stores.base.goes_on_reading` for it.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from torch import Tensor


class Handle(Protocol):
    """One stored tensor. Dropping the handle frees its bytes in the store; nothing else does."""

    @property
    def stored_bytes(self) -> int:
        """How many bytes the store holds for it."""
        ...

    def get(self) -> Tensor:
        """Return the tensor: without graph, on the device from which it came.

        Its dimensions have the same order in memory as before, so a tensor that was contiguous is contiguous again. May
        be called many times, in any thread, in any order. A store that copies returns fresh memory each time.

        Raises:
            StoreError: The tensor cannot be brought back; the store never returns other data.
            MutationError: The store keeps the tensor itself, and the tensor was written in place since.
        """
        ...

    def prefetch(self) -> None:
        """Begin to bring the tensor back, without waiting for it. Called once before a `get`, or never."""
        ...


@runtime_checkable
class Protecting(Protocol):
    """A handle that is told of writes. See NOTE [ Who may write to what was put ]."""

    def before_write(self) -> None:
        """Move the stored value to new memory before returning, since the tensor is about to be written.

        May be called many times, and from another thread than `put`. If the tensor was already written, unannounced,
        this does nothing, and `get` still raises.
        """
        ...


class Store(Protocol):
    """Takes tensors in, gives handles back. Its methods are called from several threads."""

    def put(self, tensor: Tensor) -> Handle | None:
        """Take a tensor; return None if no room is left for it.

        Args:
            tensor: Without graph, any shape and dtype, at least one element; contiguous when the library itself calls
                `put`, of any strides when a user's own hooks do. It shares its memory and its version counter with the
                tensor that autograd saves. A store that reads it after `put` has returned compares its version before
                and after, and raises a `MutationError` in `get` if it has moved.
                See NOTE [ Who may write to what was put ]

        Raises:
            StoreError: The store is strict, and has no room or its medium failed.
        """
        ...
