"""Observers: no part of a forward, so a recompute neither restores nor removes them."""

from __future__ import annotations

import functools
import types
from collections.abc import Container
from typing import cast

from torchremat.ambient.global_state import WATCHES


def only_looks_on(item: object) -> bool:
    """Return whether an object was marked by `only_watches`, or is a function of this package: a hook that measures."""
    while isinstance(item, functools.partial):
        item = cast("functools.partial[object]", item).func
    if isinstance(item, types.MethodType):
        item = item.__func__
    if isinstance(item, types.FunctionType):
        return WATCHES in item.__dict__ or (item.__module__ or "").startswith("torchremat.")
    # Read from the classes: asking the object might run user code.
    return hasattr(cast("type", type(item)), WATCHES) or WATCHES in _attributes(item)


def _attributes(item: object) -> Container[object]:
    try:
        found = object.__getattribute__(item, "__dict__")
    except AttributeError:
        return ()
    return found if isinstance(found, dict) else ()  # pyright: ignore[reportUnknownVariableType]
