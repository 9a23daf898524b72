"""The state that the records of one catalog share: its store and its totals."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from torch import Tensor

from torchremat.errors import StoreWarning, warn
from torchremat.tensors.handles import Handle, Store


@dataclass(kw_only=True)
class Totals:
    """The counts of a catalog so far.

    Attributes:
        saved: How many tensors autograd has saved.
        saved_bytes: Their bytes, each alias counted.
        kept: How many of them stayed in place: parameters, buffers, small tensors, those that no store takes.
        copied_out_bytes: Bytes that the store has taken.
        copied_in_bytes: Bytes that were brought back.
        narrowed_bytes: Bytes of saved tensors that were replaced by a mask, or by nothing.
        refused_bytes: Bytes for which the store had no room; they stay in place.
    """

    saved: int = 0
    saved_bytes: int = 0
    kept: int = 0
    copied_out_bytes: int = 0
    copied_in_bytes: int = 0
    narrowed_bytes: int = 0
    refused_bytes: int = 0


class Shared:
    """See the module docstring."""

    def __init__(self, store: Store, *, by_storage: bool = False) -> None:
        self.store = store
        self.by_storage = by_storage
        self.totals = Totals()
        self._lock = threading.Lock()
        self._has_warned = False

    def put(self, tensor: Tensor) -> Handle | None:
        """Give a tensor to the store; return None if it has no room."""
        handle = self.store.put(tensor)
        with self._lock:
            if handle is not None:
                self.totals.copied_out_bytes += tensor.nbytes
                return handle
            self.totals.refused_bytes += tensor.nbytes
            warns, self._has_warned = not self._has_warned, True
        if warns:
            told = "The peak may be above that of the plan." if self.by_storage else "`refused_bytes` counts them."
            warn(
                f"{type(self.store).__name__} has no room for a saved tensor of {tensor.nbytes} bytes, which stays "
                f"where it is until backward, and so will others. {told}",
                StoreWarning,
            )
        return None

    def saved(self, tensor: Tensor, *, kept: bool) -> None:
        """Count a saved tensor."""
        with self._lock:
            self.totals.saved += 1
            self.totals.saved_bytes += tensor.numel() * tensor.itemsize
            self.totals.kept += kept

    def narrowed(self, tensor: Tensor, mask_bytes: int) -> None:
        """Count a saved tensor that was replaced by a mask, or by nothing."""
        with self._lock:
            self.totals.saved += 1
            self.totals.saved_bytes += tensor.nbytes
            self.totals.narrowed_bytes += tensor.nbytes
            self.totals.copied_out_bytes += mask_bytes

    def loaded(self, loaded_bytes: int) -> None:
        """Count bytes that are brought back."""
        with self._lock:
            self.totals.copied_in_bytes += loaded_bytes
