"""Objects that torch hands over from the thread that calls a backward to the threads in which it runs."""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import cast

from torchremat._compat.binding import private
from torchremat.errors import VersionError

# NOTE [ What torch holds of a stashed object ]
#
# Torch 2.11 releases one reference when another object is stored under the same key, but has taken none: the object is
# freed while in use, and the process crashes or continues with whatever lies there now. So on that torch the object
# gets one extra reference for torch to release. Whether torch takes one itself is tested on an unused object; this goes
# with the last torch that takes none.
#
# When a thread ends, torch releases the object that the thread has under a key, None as well, and needs the GIL for it:
# if the interpreter is shutting down meanwhile, the process is aborted. So a key is removed. A torch that cannot do so
# (before https://github.com/pytorch/pytorch/pull/182083) gets None in its place.

_bind = partial(private, needed_for="a session")

_stash: Callable[[str, object], None] = _bind("_C._stash_obj_in_tls")
get_from_tls: Callable[[str], object] = _bind("_C._get_obj_in_tls")
is_in_tls: Callable[[str], bool] = _bind("_C._is_key_in_tls")


def _stash_referenced(key: str, value: object, /) -> None:
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))
    _stash(key, value)


def _stash_none(key: str, /) -> None:
    stash_in_tls(key, None)


def _bound() -> tuple[Callable[[str, object], None], Callable[[str], None]]:
    """Return the functions that store an object under a key and that remove it."""
    # See NOTE [ What torch holds of a stashed object ]
    key, probe = "torchremat.probe", object()
    before = sys.getrefcount(probe)
    _stash(key, probe)
    stash = _stash
    if sys.getrefcount(probe) == before:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(probe))
        stash = _stash_referenced
    try:
        remove: Callable[[str], None] = _bind("_C._remove_obj_from_tls")
    except VersionError:
        remove = _stash_none
        stash(key, None)
    else:
        remove(key)
    return stash, remove


stash_in_tls, remove_from_tls = _bound()

_active = cast("dict[int, threading.Thread]", threading._active)  # pyright: ignore[reportAttributeAccessIssue]


def is_pythons_thread() -> bool:
    """Return whether Python started this thread, and not torch, whose threads serve all callers of a backward."""
    # Asking for the current thread would create a dummy object for a thread that is not Python's.
    known = _active.get(threading.get_ident())
    return known is not None and not isinstance(known, threading._DummyThread)
