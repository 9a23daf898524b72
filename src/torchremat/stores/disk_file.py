"""One file without a name, the bytes of it that are free, and checksums of the bytes that are not.

The file is never mapped into memory: on a full disk, or past the end of a file, a mapping kills the process, where
`pwrite` and `preadv` raise.
"""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torchremat.errors import StoreError, UnsupportedError
from torchremat.stores.extents import Extent, Extents

# Space is reserved in steps of at least this size, since each costs a call to the file system.
_STEP_BYTES = 64 * 2**20
# The error codes of a file system that does not support files without a name.
_NO_TMPFILE = {errno.EISDIR, errno.EOPNOTSUPP, errno.EINVAL}
# The error codes of one that cannot reserve space; a full disk then shows in a write.
_NO_RESERVE = {errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS, errno.ENODEV}


class DiskFile:
    """A temporary file without a name: nothing of it remains once it is closed, however the process ends.

    Extents are taken under the lock of the owner of the disk file; bytes may be read and written by several threads.

    Args:
        limit_bytes: How large it may become; None without a limit.

    Raises:
        StoreError: No file can be made there.
    """

    def __init__(self, directory: Path, limit_bytes: int | None) -> None:
        self.limit_bytes = limit_bytes
        # Why it failed to grow, the last time. Text, not the error: an error keeps frames alive, and these keep
        # tensors.
        self.full = ""
        self._extents = Extents()
        self._descriptor = _open(directory)

    def take(self, size: int) -> list[Extent] | None:
        """Take space for one tensor, in a single extent if possible; None if the disk or the limit has no more."""
        extents = self._extents
        taken = extents.take_one(size)
        if taken is None and self._grow(size - extents.tail_bytes):
            taken = extents.take_one(size)
        if taken is None and (size <= extents.free_bytes or self._grow(size - extents.free_bytes)):
            taken = extents.take_any(size)
        return taken

    def give(self, extents: list[Extent]) -> None:
        """Give space back."""
        self._extents.give(extents)

    def write(self, extents: Sequence[Extent], data: NDArray[np.uint8]) -> int:
        """Write bytes to the extents reserved for them, and return their checksum.

        Raises:
            OSError: The bytes cannot be written.
        """
        # A copy of each block is what is summed and written, since a kernel may write to the tensor meanwhile past its
        # version counter: oneDNN's and cuDNN's backwards use what their forwards saved as scratch memory.
        copy = np.empty(min(BLOCK_BYTES, data.size), dtype=np.uint8)
        checksum = Checksum(data.size)
        for place, done, size in _blocks(extents):
            start = done % BLOCK_BYTES
            if not start:
                block = data[done : done + BLOCK_BYTES]
                copy[: block.size] = block
                checksum.add(copy[: block.size])
            # Python retries after an interruption by itself; a call may write less than it was asked to.
            while size:
                written = os.pwrite(self._descriptor, copy.data[start : start + size], place)
                if written <= 0:
                    raise OSError(errno.EIO, "nothing was written")
                place, start, size = place + written, start + written, size - written
        return checksum.number

    def read(self, extents: Sequence[Extent], data: NDArray[np.uint8]) -> int:
        """Read the bytes of extents into memory, and return their checksum.

        Raises:
            OSError: The bytes cannot be read, or the file is too short.
        """
        view, checksum = data.data, Checksum(data.size)
        for place, done, size in _blocks(extents):
            while size:
                read = os.preadv(self._descriptor, [view[done : done + size]], place)
                if read <= 0:
                    raise OSError(errno.EIO, f"the file ends before byte {place + size}")
                place, done, size = place + read, done + read, size - read
            if done % BLOCK_BYTES == 0 or done == data.size:
                checksum.add(data[(done - 1) // BLOCK_BYTES * BLOCK_BYTES : done])
        return checksum.number

    def __reduce__(self) -> str:
        # The default would copy the file descriptor, and closing the copy would close the original's file.
        raise TypeError("a file without a name cannot be copied, nor go to another process.")

    def __del__(self) -> None:
        descriptor = getattr(self, "_descriptor", None)
        if descriptor is not None:
            os.close(descriptor)

    def _grow(self, needed: int) -> bool:
        """Reserve space at the end of the file, so that no write finds the disk full; return whether that worked."""
        end = self._extents.end
        most = needed if self.limit_bytes is None else self.limit_bytes - end
        if needed > most:
            return False
        step = _STEP_BYTES if self.limit_bytes is None else min(_STEP_BYTES, most)
        for size in sorted({max(needed, step), needed}, reverse=True):
            try:
                _reserve(self._descriptor, end, size)
            except OSError as error:
                self.full = str(error)
            else:
                self._extents.grow(size)
                return True
        return False


def _blocks(extents: Sequence[Extent]) -> Iterator[tuple[int, int, int]]:
    """Yield offset in the file, offset in the tensor, and size, of runs that lie in one extent and one block."""
    done = 0
    for extent in extents:
        place = extent.start
        while place < extent.end:
            size = min(BLOCK_BYTES - done % BLOCK_BYTES, extent.end - place)
            yield place, done, size
            place, done = place + size, done + size


def _reserve(descriptor: int, start: int, size: int) -> None:
    if not hasattr(os, "posix_fallocate"):
        return
    try:
        os.posix_fallocate(descriptor, start, size)
    except OSError as error:
        if error.errno not in _NO_RESERVE:
            raise


def _open(directory: Path) -> int:
    if not hasattr(os, "preadv"):
        raise UnsupportedError("Disk(): this system has no `preadv`.")
    try:
        if hasattr(os, "O_TMPFILE"):
            try:
                return os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_EXCL, 0o600)
            except OSError as error:
                if error.errno not in _NO_TMPFILE:
                    raise
        descriptor, name = tempfile.mkstemp(prefix="torchremat-", dir=directory)
        try:
            os.unlink(name)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor
    except OSError as error:
        raise StoreError(f"Disk({str(directory)!r}): no file can be made there: {error}.") from error


def bytes_of(tensor: Tensor) -> NDArray[np.uint8]:
    """Return the bytes of a host tensor in a line, of any dtype."""
    # A tensor of one element may have any stride, but a view as bytes needs the stride 1.
    return tensor.detach().contiguous().as_strided((tensor.numel(),), (1,)).view(torch.uint8).numpy()


# Bytes are processed as rows of 64 words of 8 bytes: one disk sector.
_WORDS = 64
_SECTOR_BYTES = 8 * _WORDS
_BLOCK_ROWS = 2**10
# A tensor is copied, summed and written in blocks, few enough bytes to stay in a processor's cache meanwhile.
BLOCK_BYTES = _BLOCK_ROWS * _SECTOR_BYTES
_BITS = 2**64 - 1
# Odd, so that multiplying by it loses no bit; from Knuth's generator MMIX.
_FACTOR = 6364136223846793005
# Odd weights lose no bit either, and distinct weights detect an exchange.
_ODD = np.arange(1, 2 * _BLOCK_ROWS, 2, dtype=np.int64)


class Checksum:
    """The checksum of some bytes, computed block by block: a number of 64 bits.

    Any change within 8 bytes changes it, so each flipped bit does, and so does another length. Sectors that are
    exchanged, lost, or reverted to an earlier content go undetected in one case of 2**64 or so. Changes in one sector
    that cancel in a sum are not detected. The checksum guards against failing disks, not against intent.

    Args:
        size: How many bytes there are in all.

    Attributes:
        number: The checksum of the blocks so far.
    """

    def __init__(self, size: int) -> None:
        self.number = size

    def add(self, block: NDArray[np.uint8]) -> None:
        """Add the next block: `BLOCK_BYTES`, or what is left."""
        if block.size % _SECTOR_BYTES:
            padded = np.zeros(-(-block.size // _SECTOR_BYTES) * _SECTOR_BYTES, dtype=np.uint8)
            padded[: block.size] = block
            block = padded
        # Sums of arrays wrap around.
        rows = block.view(np.int64).reshape(-1, _WORDS)
        self.number = (self.number * _FACTOR + int(rows.sum(axis=1) @ _ODD[: len(rows)])) & _BITS
