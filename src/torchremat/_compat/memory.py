"""Where objects lie in memory: in CPython a tuple is the addresses of its items."""

from __future__ import annotations

import ctypes
import sys

_HEAD, _ITEM = tuple.__basicsize__, tuple.__itemsize__


def addresses_of(items: tuple[object, ...]) -> object:
    """Return the addresses of objects, which are compared with others by equality, and keep no object alive."""
    if _IN_TUPLES:
        return ctypes.string_at(id(items) + _HEAD, len(items) * _ITEM)  # a tenth of the time
    return [*map(id, items)]


def _are_in_tuples() -> bool:
    if sys.implementation.name != "cpython":
        return False
    probe = object(), None
    found = ctypes.string_at(id(probe) + _HEAD, 2 * _ITEM)
    return found == b"".join(id(one).to_bytes(_ITEM, sys.byteorder) for one in probe)


_IN_TUPLES = _are_in_tuples()
