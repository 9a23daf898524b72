"""A checksum of bytes in memory, at about the speed of copying them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

# Bytes are looked at as rows of 64 words of 8 bytes: a sector of a disk. Blocks of so many rows bound what lies in
# memory beside them.
_WORDS = 64
_SECTOR = 8 * _WORDS
_ROWS = 2**15
_BITS = 2**64 - 1
# Odd, so that multiplying by it loses no bit; from Knuth's generator MMIX.
_FACTOR = 6364136223846793005

# Odd weights lose no bit either, and different ones tell what was exchanged.
_ODD = np.arange(1, 2 * _ROWS, 2, dtype=np.int64)


def checksum(data: NDArray[np.uint8]) -> tuple[int, int]:
    """Return the checksum of bytes: two numbers of 64 bits.

    Any one flipped bit changes both numbers. Sectors that are exchanged or shifted change the first one; two flips in
    one sector, which may cancel in the first, change the second. Other bytes altogether have the same checksum in one
    case of 2**64 or fewer. It is no protection against intent.

    Args:
        data: Any number of bytes.
    """
    by_row = by_column = data.size
    whole = data.size // _SECTOR * _SECTOR
    rows = data[:whole].view(np.int64).reshape(-1, _WORDS)
    for start in range(0, len(rows), _ROWS):
        by_row, by_column = _add(by_row, by_column, rows[start : start + _ROWS])
    if whole < data.size:
        last = np.zeros(_SECTOR, dtype=np.uint8)
        last[: data.size - whole] = data[whole:]
        by_row, by_column = _add(by_row, by_column, last.view(np.int64).reshape(1, _WORDS))
    return by_row, by_column


def _add(by_row: int, by_column: int, rows: NDArray[np.int64]) -> tuple[int, int]:
    # Sums of arrays wrap around.
    of_rows = rows.sum(axis=1) @ _ODD[: len(rows)]
    of_columns = rows.sum(axis=0) @ _ODD[:_WORDS]
    return (by_row * _FACTOR + int(of_rows)) & _BITS, (by_column * _FACTOR + int(of_columns)) & _BITS
