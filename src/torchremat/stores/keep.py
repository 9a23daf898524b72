"""A store that leaves a tensor in place, and detects writes to it."""

from __future__ import annotations

from torch import Tensor

from torchremat.stores.base import Ledger, Remade, StoreStatistics
from torchremat.tensors.copies import apart
from torchremat.tensors.versioned import Versioned


class Keep(Remade):
    """A store that copies nothing unless a write is announced: the tensor stays in place.

    By design it adds nothing to autograd without hooks: with hooks autograd no longer checks that a saved tensor is
    unchanged. This store does, and raises the error that autograd would.

    `stored_bytes` counts a tensor each time it is put, aliases included.
    """

    def __init__(self) -> None:
        self._ledger = Ledger(None)

    @property
    def statistics(self) -> StoreStatistics:
        """The store's counts so far."""
        return self._ledger.statistics()

    def put(self, tensor: Tensor) -> KeepHandle:
        """Keep an alias of the tensor, of any strides, together with its version."""
        return KeepHandle(tensor, self._ledger)

    def __repr__(self) -> str:
        return "Keep()"


class KeepHandle:
    """A tensor that stayed in place. See NOTE [ Who owns a stored tensor ]."""

    __slots__ = ("__weakref__", "_kept", "_ledger", "stored_bytes")

    def __init__(self, tensor: Tensor, ledger: Ledger) -> None:
        # `nbytes` does not give the size of a sparse tensor; it counts as if it were dense.
        self.stored_bytes = tensor.numel() * tensor.element_size()
        # Without a graph: else an output that its own node saves would keep that node alive, a cycle that is never
        # collected.
        self._kept = Versioned(tensor.detach())
        self._ledger = ledger
        ledger.reserve(self.stored_bytes)

    def get(self) -> Tensor:
        """Return an alias of the tensor.

        Raises:
            MutationError: The tensor was written in place since it was put.
        """
        return self._kept.get().detach()

    def before_write(self) -> None:
        """Keep a copy instead. See NOTE [ Who may write to what was put ]."""
        if not self._kept.is_written:
            self._kept = Versioned(apart(self._kept.tensor))

    def prefetch(self) -> None:
        """Do nothing: the tensor is in place."""

    def __del__(self) -> None:
        # Missing if the constructor has raised.
        if hasattr(self, "_ledger"):
            self._ledger.release(self.stored_bytes)  # See NOTE [ What a finalizer may do ]
