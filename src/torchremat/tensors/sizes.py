"""Bytes as people write them: "6GiB" in, "6.00 GiB" out; and flops, which only go out.

Decimal units (kB, MB, GB, TB) are powers of 1000, binary ones (KiB, MiB, GiB, TiB) powers of 1024. Case does not
matter, and the B may be left out: "6G" is 6GB, the smaller of its two readings, since a budget must not be exceeded.
Missing on purpose: bits.
"""

from __future__ import annotations

import math
import re
from fractions import Fraction

from torchremat.errors import BudgetError

_UNITS = {
    "B": 1,
    "kB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
}
# As they are read: in lower case, with the B or without.
_READ = {name: size for unit, size in _UNITS.items() for name in (unit.lower(), unit.lower().removesuffix("b")) if name}
# Beyond this limit a number is not a size, and Python refuses to print or read numbers that are much longer.
_MOST_BITS = 128
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?|\.\d+)\s*([A-Za-z]+)\s*", re.ASCII)
_ALLOWED = f'Give an int of bytes, or a number and one of {", ".join(_UNITS)}: "6GiB", "1.5 GiB", "800MB".'


def parse_bytes(size: int | str, *, least: int = 1) -> int:
    """Return the bytes that `size` stands for; a fraction of a byte is cut off, since a budget must not grow.

    Args:
        size: An int of bytes, or a number and a unit: `"6GiB"`, `"800MB"`, `"1.5 GiB"`.
        least: The fewest bytes that are allowed, 1 or 0.

    Raises:
        BudgetError: `size` is neither, or less than that.

    >>> parse_bytes("1.5 KiB")
    1536
    """
    # A bool is an int to Python; as a budget it is a mistake. All floats are refused: 6.0 of which unit?
    if isinstance(size, bool) or not isinstance(size, int | str):  # pyright: ignore[reportUnnecessaryIsInstance]  user input
        raise BudgetError(f"a size cannot be {size!r} ({type(size).__name__}). {_ALLOWED}")
    if isinstance(size, int):
        if size.bit_length() > _MOST_BITS:
            raise BudgetError(f"a size of 2**{size.bit_length() - 1} B or more is too large. {_ALLOWED}")
        count = size
    else:
        if len(size) > _MOST_BITS:
            raise BudgetError(f"{size[:20]!r}..., {len(size)} characters long, is not a size. {_ALLOWED}")
        match = _SIZE.fullmatch(size)
        if match is None or match[2].lower() not in _READ:
            raise BudgetError(f"{size!r} is not a size. {_ALLOWED}")
        # Fractions, since 0.1 * 2**40 in floats is not the number as written.
        count = math.floor(Fraction(match[1]) * _READ[match[2].lower()])
    if count < least:
        raise BudgetError(f"a size must be at least {least} B, but {size!r} is {count} B. {_ALLOWED}")
    return count


def format_bytes(count: int) -> str:
    """Return `count` bytes in the largest binary unit that keeps the number at 1 or more.

    >>> format_bytes(28_313_608)
    '27.00 MiB'
    """
    sign, size = ("-", -count) if count < 0 else ("", count)
    if size < 1024:
        return f"{sign}{size} B"
    for unit in ("KiB", "MiB", "GiB"):
        if size < 1024 * _UNITS[unit]:
            return f"{sign}{size / _UNITS[unit]:.2f} {unit}"
    return f"{sign}{size / _UNITS['TiB']:.2f} TiB"


def axis_unit(highest: int, *, least: int = 2) -> tuple[str, int]:
    """Return the largest unit up to GiB of which `highest` bytes, the end of an axis, are `least`, and its bytes.

    >>> axis_unit(28_313_608)
    ('MiB', 1048576)
    """
    return next(((unit, _UNITS[unit]) for unit in ("GiB", "MiB", "KiB") if highest >= least * _UNITS[unit]), ("B", 1))


def format_flops(count: int) -> str:
    """Return `count` flops in GFLOP, or in the larger unit that keeps the number below 1000.

    >>> format_flops(83_886_080), format_flops(16_046_003_000_000)
    ('0.08 GFLOP', '16.05 TFLOP')
    """
    for unit, size in (("GFLOP", 10**9), ("TFLOP", 10**12)):
        if count < 999.995 * size:  # from here on it would be rounded to 1000
            return f"{count / size:.2f} {unit}"
    return f"{count / 10**15:.2f} PFLOP"
