"""Objects that torch carries over from the thread that calls a backward to those in which it runs."""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Callable
from typing import cast

from torchremat._compat.binding import private
from torchremat.errors import VersionError

# NOTE [ What torch holds of a stashed object ]
#
# Torch 2.11 lets go of one reference when another object comes under the same key, and has taken none: the object is
# freed while it is used, and the process crashes or goes on with what lies there now. So there it is given one, for it
# to let go of. Whether it takes one itself is seen on an object that nobody uses; this goes with the last torch that
# takes none.
#
# What a thread has under a key when it ends, None as well, torch lets go of then, and needs the GIL for it: where the
# interpreter ends meanwhile, the process is aborted. So a key is removed. A torch that cannot do so (before
# https://github.com/pytorch/pytorch/pull/182083) gets None in its place.

_SESSION = "a session"

_stash = cast("Callable[[str, object], None]", private("_C._stash_obj_in_tls", needed_for=_SESSION))
get_from_tls = cast("Callable[[str], object]", private("_C._get_obj_in_tls", needed_for=_SESSION))
is_in_tls = cast("Callable[[str], bool]", private("_C._is_key_in_tls", needed_for=_SESSION))


def _stash_referenced(key: str, value: object, /) -> None:
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))
    _stash(key, value)


def _stash_none(key: str, /) -> None:
    stash_in_tls(key, None)


def _bound() -> tuple[Callable[[str, object], None], Callable[[str], None]]:
    """Return what puts an object under a key, and what takes it away again."""
    # See NOTE [ What torch holds of a stashed object ]
    key, probe = "torchremat.probe", object()
    before = sys.getrefcount(probe)
    _stash(key, probe)
    stash = _stash
    if sys.getrefcount(probe) == before:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(probe))
        stash = _stash_referenced
    try:
        remove = cast("Callable[[str], None]", private("_C._remove_obj_from_tls", needed_for=_SESSION))
    except VersionError:
        remove = _stash_none
        stash(key, None)
    else:
        remove(key)
    return stash, remove


stash_in_tls, remove_from_tls = _bound()

_active = cast("dict[int, threading.Thread]", threading._active)  # pyright: ignore[reportAttributeAccessIssue]


def is_pythons_thread() -> bool:
    """Return whether Python has started this thread, and not torch, whose threads serve whoever calls a backward."""
    # To ask for the current thread would make a stand-in for one that is not Python's.
    known = _active.get(threading.get_ident())
    return known is not None and not isinstance(known, threading._DummyThread)
