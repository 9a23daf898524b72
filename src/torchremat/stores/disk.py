"""A store on a disk."""

from __future__ import annotations

import math
import os
import tempfile
import weakref
from pathlib import Path

import torch
from torch import Tensor

from torchremat.errors import StoreError, StoreWarning, UnsupportedError, warn
from torchremat.stores.base import (
    Content,
    Ledger,
    Remade,
    StoreStatistics,
    bytes_of,
    content_of,
    filled,
    goes_on_reading,
    limit_of,
)
from torchremat.stores.disk_file import DiskFile
from torchremat.stores.disk_writer import DiskWriter, Entry, State
from torchremat.stores.extents import Extent
from torchremat.tensors.sizes import format_bytes
from torchremat.tensors.versioned import Versioned

_HOST = torch.device("cpu")


class Disk(Remade):
    """A store in one temporary file without a name: nothing of it remains, however the process ends.

    Threads write behind the forward and read ahead of the backward. Each tensor has a checksum: `get` returns the
    tensor that was put, or raises. A tensor that cannot be written stays in place.

    Args:
        directory: The directory of the file; None for that of temporary files. On a `tmpfs` the file is in memory.
        limit: The most that the store holds: bytes, or a size such as `"100GiB"`. None means only the disk's limit.
        strict: Whether a tensor that cannot be stored is an error; else it stays in place.
        threads: How many threads write and read, at least 1.
        pending: How much may wait to be written: bytes, or a size. Above that the forward waits for the disk.
        timeout_s: How long to wait for a disk that makes no progress at all before that is an error, in seconds.

    Raises:
        StoreError: No file can be made in `directory`.
        UnsupportedError: Another argument is invalid.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str] | None = None,
        limit: int | str | None = None,
        *,
        strict: bool = False,
        threads: int = 2,
        pending: int | str = "32MiB",
        timeout_s: float = 120.0,
    ) -> None:
        pending_bytes = bytes_of(pending, "Disk(pending=...)")
        if type(threads) is not int or threads < 1:
            raise UnsupportedError(f"Disk(threads={threads!r}): expected an int of at least 1.")
        if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float) or not 0 < timeout_s < math.inf:  # pyright: ignore[reportUnnecessaryIsInstance]  user input
            raise UnsupportedError(f"Disk(timeout_s={timeout_s!r}): expected a number of seconds above 0.")
        if directory is not None and not isinstance(directory, str | os.PathLike):  # pyright: ignore[reportUnnecessaryIsInstance]  user input
            raise UnsupportedError(f"Disk(directory={directory!r}): expected a path.")
        self.strict = strict
        self.directory = Path(tempfile.gettempdir() if directory is None else directory)
        limit_bytes = limit_of(limit, "Disk(limit=...)")
        limited = "" if limit_bytes is None else f", {format_bytes(limit_bytes)!r}"
        self._described = f"Disk({str(self.directory)!r}{limited})"
        self._warned = False
        self._lease = _Lease(
            DiskWriter(
                DiskFile(self.directory, limit_bytes),
                Ledger(limit_bytes),
                threads=threads,
                pending_limit_bytes=pending_bytes,
                timeout_s=timeout_s,
                name=self._described,
            )
        )

    @property
    def statistics(self) -> StoreStatistics:
        """The store's counts so far."""
        writer = self._lease.writer()
        writer.settle()
        return writer.ledger.statistics()

    def put(self, tensor: Tensor) -> DiskHandle | None:
        """Have a tensor written to the file; None if the file has no room.

        Raises:
            StoreError: The file has no room or an earlier write has failed, and the store is strict; or the disk hangs.
        """
        writer = self._lease.writer()
        self._report(writer)
        content = content_of(tensor)
        # Before the limit check, so that dropped tensors no longer count.
        writer.settle()
        if not writer.ledger.reserve(content.size_bytes):
            if self.strict:
                raise StoreError(f"no room for {content}: {self!r} {filled(writer.ledger.statistics())}.")
            return None
        extents: list[Extent] | None = None
        try:
            extents = writer.take(content.size_bytes)
            handle = None if extents is None else self._handle(tensor, content, extents)
        except BaseException:
            if extents is not None:
                writer.give(extents)
            writer.ledger.release(content.size_bytes)
            raise
        if handle is None:
            writer.ledger.refuse(content.size_bytes)
            self._complain(f"no room for {content}: {self._described} cannot grow: {writer.file.full}.")
            return None
        # From here on the handle returns what was reserved.
        handle.begin()
        return handle

    def _handle(self, tensor: Tensor, content: Content, extents: list[Extent]) -> DiskHandle:
        seen = Versioned(tensor)
        # The tensor itself, or a copy that no other code knows.
        source = content.line(tensor).to(_HOST).resolve_conj().resolve_neg()
        is_own = source.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr()
        entry = Entry(content, Versioned(source), extents, is_own)
        goes_on_reading(source)
        if seen.is_written:  # another thread has written to it meanwhile
            entry.changed = str(seen.written())
        return DiskHandle(entry, self._lease)

    def _report(self, writer: DiskWriter) -> None:
        """Warn of a write that has failed in the background, after its `put` had returned."""
        if writer.failure is not None:
            failure, writer.failure = writer.failure, None
            self._complain(failure)

    def _complain(self, message: str) -> None:
        if self.strict:
            raise StoreError(message)
        if not self._warned:
            self._warned = True
            warn(f"{message} Such tensors stay where they are. This warning is shown once.", StoreWarning)

    def __repr__(self) -> str:
        return self._described


class _Lease:
    """What the store and its handles share; with the last of them the threads end, then the file is closed."""

    def __init__(self, writer: DiskWriter) -> None:
        self._writer = writer
        self._process = os.getpid()
        weakref.finalize(self, _close, writer, self._process)

    def writer(self) -> DiskWriter:
        """Return the disk writer, in the process that made it.

        Raises:
            StoreError: This process is a fork of that one: it does not have the threads, its locks are in an unknown
                state, and the file belongs to the other process.
        """
        if os.getpid() != self._process:
            raise StoreError(
                f"a Disk of process {self._process} is used in process {os.getpid()}, a fork of it. Make a Disk of its "
                "own there."
            )
        return self._writer

    def drop(self, entry: Entry) -> None:
        """Forget a tensor. See NOTE [ What a finalizer may do ]."""
        self._writer.dropped.append(entry)
        # After the entry is in the queue, so that code that finds no source finds the entry there.
        entry.source = None
        entry.ahead = None


def _close(writer: DiskWriter, process: int) -> None:
    if os.getpid() == process:
        writer.close()


class DiskHandle:
    """A tensor in the file, or being written to it. See NOTE [ Who owns a stored tensor ]."""

    __slots__ = ("__weakref__", "_entry", "_lease")

    def __init__(self, entry: Entry, lease: _Lease) -> None:
        self._entry = entry
        self._lease = lease

    @property
    def stored_bytes(self) -> int:
        """How many bytes the file holds for it; none if they could not be written."""
        return 0 if self._entry.state is State.KEPT else self._entry.content.size_bytes

    def begin(self) -> None:
        """Have the tensor written; the store calls this once."""
        self._lease.writer().add(self._entry)

    def get(self) -> Tensor:
        """Return the tensor on the device that it came from, in fresh memory.

        Raises:
            StoreError: The tensor cannot be read, or differs from what was written.
            MutationError: The tensor was written in place before it was in the file.
        """
        fresh = self._lease.writer().get(self._entry)
        return self._entry.content.back(fresh.to(self._entry.content.device))

    def prefetch(self) -> None:
        """Have a thread read the tensor, for the next `get`."""
        self._lease.writer().prefetch(self._entry)

    def before_write(self) -> None:
        """Switch to a copy if the tensor is not in the file yet. See NOTE [ Who may write to what was put ]."""
        self._lease.writer().own(self._entry)

    def settle(self) -> None:
        """Wait until the tensor is in the file and its own memory is free, or until it is known to stay in place.

        Raises:
            StoreError: The disk hangs.
        """
        self._lease.writer().wait_until_written(self._entry)

    def __del__(self) -> None:
        self._lease.drop(self._entry)
