"""A checksum of bytes in memory, at about the speed of copying them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

# Bytes are processed as rows of 64 words of 8 bytes: one disk sector.
_WORDS = 64
_SECTOR_BYTES = 8 * _WORDS
_BLOCK_ROWS = 2**10
# Bytes added per step: few enough to stay in a processor's cache between one pass over them and the next.
BLOCK_BYTES = _BLOCK_ROWS * _SECTOR_BYTES
_BITS = 2**64 - 1
# Odd, so that multiplying by it loses no bit; from Knuth's generator MMIX.
_FACTOR = 6364136223846793005
# Odd weights lose no bit either, and distinct weights detect an exchange.
_ODD = np.arange(1, 2 * _BLOCK_ROWS, 2, dtype=np.int64)


class Checksum:
    """The checksum of some bytes, computed while they come in: a number of 64 bits.

    Any change within 8 bytes changes it, so each flipped bit does, and so does another length. Sectors that are
    exchanged, lost, or reverted to an earlier content go undetected in one case of 2**64 or so. Changes in one sector
    that cancel in a sum are not detected. The checksum guards against failing disks, not against intent.

    Args:
        data: All of the bytes; bytes that have not come in yet may have any value.
    """

    def __init__(self, data: NDArray[np.uint8]) -> None:
        self._data = data
        self._sum = data.size
        self._done = 0

    def advance(self, ready: int) -> None:
        """Add the whole blocks among the bytes that are ready, and the rest if all are.

        Args:
            ready: How many bytes have come in, from the beginning.
        """
        while self._done + BLOCK_BYTES <= ready:
            self._add(self._data[self._done : self._done + BLOCK_BYTES])
            self._done += BLOCK_BYTES
        rest = self._data[self._done :]
        if rest.size and ready == self._data.size:
            padded = np.zeros(-(-rest.size // _SECTOR_BYTES) * _SECTOR_BYTES, dtype=np.uint8)
            padded[: rest.size] = rest
            self._add(padded)
            self._done = ready

    def number(self) -> int:
        """Return the checksum, now that all bytes have come in."""
        self.advance(self._data.size)
        return self._sum

    def _add(self, data: NDArray[np.uint8]) -> None:
        # Sums of arrays wrap around.
        rows = data.view(np.int64).reshape(-1, _WORDS)
        self._sum = (self._sum * _FACTOR + int(rows.sum(axis=1) @ _ODD[: len(rows)])) & _BITS
