"""A store in host memory."""

from __future__ import annotations

import os

from torch import Tensor

from torchremat._compat.accelerators import accelerator_of
from torchremat.errors import MutationError, StoreError
from torchremat.stores.base import Content, Ledger, Remade, StoreStatistics, bytes_of, content_of, filled, limit_of
from torchremat.stores.pinned import Pool
from torchremat.stores.transfers import TransferHandle, Transfers
from torchremat.tensors.sizes import format_bytes
from torchremat.tensors.versioned import Versioned


class Host(Remade):
    """A store in host memory.

    Tensors of CUDA devices go to pinned memory and come back on their own streams, overlapping the device's
    computation; where no more memory can be pinned, they are copied while `put` runs. A tensor that is already in host
    memory is copied as well, so that it may be written in place afterwards: `get` returns what was put.

    Args:
        limit: The most that the store holds: bytes, or a size such as `"6GiB"`. None means no limit.
        pin: Whether memory for tensors of CUDA devices is pinned: True for at most half of the machine's memory, False
            for none, or the most as a size.
        strict: Whether a tensor for which the store has no room is an error; else it stays in place.

    Raises:
        UnsupportedError: `limit` or `pin` is not a size.
    """

    def __init__(self, limit: int | str | None = None, *, pin: bool | int | str = True, strict: bool = False) -> None:
        self.strict = strict
        self._ledger = Ledger(limit_of(limit, "Host(limit=...)"))
        self._transfers = None
        if pin is not False:
            pinned_bytes = _most_pinned() if pin is True else bytes_of(pin, "Host(pin=...)")
            limit_bytes = self._ledger.limit_bytes
            most = pinned_bytes if limit_bytes is None else min(pinned_bytes, limit_bytes)
            self._transfers = Transfers(Pool(most), self._ledger)

    @property
    def statistics(self) -> StoreStatistics:
        """The store's counts so far."""
        return self._ledger.statistics()

    def put(self, tensor: Tensor) -> HostHandle | TransferHandle | None:
        """Copy a tensor into host memory; None if that would exceed the limit.

        Raises:
            StoreError: It would exceed the limit, and the store is strict.
        """
        content = content_of(tensor)
        if not self._ledger.reserve(content.size_bytes):
            if self.strict:
                raise StoreError(f"no room for {content}: {self!r} {filled(self.statistics)}.")
            return None
        try:
            if self._transfers is not None and accelerator_of(content.device).pins:
                handle = self._transfers.out(tensor, content)
                if handle is not None:
                    return handle
            return HostHandle(tensor, content, self._ledger)
        except BaseException:
            self._ledger.release(content.size_bytes)
            raise

    def land(self, *, all_of_it: bool) -> None:
        """Wait until copies from a device have ended, so that the device memory is free.

        Args:
            all_of_it: Whether to wait for all copies; else as many may stay in flight as during `put`.
        """
        if self._transfers is not None:
            self._transfers.settle(most_bytes=0 if all_of_it else None)

    def __repr__(self) -> str:
        limit = self._ledger.limit_bytes
        return "Host()" if limit is None else f"Host({format_bytes(limit)!r})"


def _most_pinned() -> int:
    # Pinned memory cannot be swapped: pinning all of it would bring the machine down.
    if "SC_PHYS_PAGES" not in os.sysconf_names:
        return 2**32
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


class HostHandle:
    """A copy in host memory, made while `put` ran. See NOTE [ Who owns a stored tensor ]."""

    __slots__ = ("__weakref__", "_content", "_copy", "_ledger", "_written", "stored_bytes")

    def __init__(self, tensor: Tensor, content: Content, ledger: Ledger) -> None:
        self.stored_bytes = content.size_bytes
        self._content = content
        seen = Versioned(tensor)
        line = content.line(tensor)
        self._copy = line.clone() if tensor.device.type == "cpu" else line.cpu()
        # Another thread wrote to it meanwhile, so the copied values are unknown.
        self._written = seen.written() if seen.is_written else None
        ledger.copied(out_bytes=self.stored_bytes)
        self._ledger = ledger  # last: from here on the finalizer gives the bytes back

    def get(self) -> Tensor:
        """Return a copy on the device that the tensor came from, in fresh memory.

        Raises:
            MutationError: Another thread wrote to the tensor while it was copied.
        """
        if self._written is not None:
            raise MutationError(*self._written.args)
        device = self._content.device
        fresh = self._copy.clone() if device.type == "cpu" else self._copy.to(device)
        self._ledger.copied(in_bytes=self.stored_bytes)
        return self._content.back(fresh)

    def prefetch(self) -> None:
        """Do nothing: host memory is read when it is asked for."""

    def before_write(self) -> None:
        """Do nothing: the tensor was copied while `put` ran. See NOTE [ Who may write to what was put ]."""

    def __del__(self) -> None:
        # Missing if the constructor has raised.
        if hasattr(self, "_ledger"):
            self._ledger.release(self.stored_bytes)  # See NOTE [ What a finalizer may do ]
