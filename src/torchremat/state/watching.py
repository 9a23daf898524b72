"""What only looks on: no part of a forward, so that a recompute neither gives it back nor takes it away."""

from __future__ import annotations

import functools
import types
from collections.abc import Container
from typing import cast

from torchremat.ambient.global_state import WATCHES


def only_looks_on(item: object) -> bool:
    """Return whether something was marked by `only_watches`, or is a function of this package: a hook that measures."""
    while isinstance(item, functools.partial):
        item = cast("functools.partial[object]", item).func
    if isinstance(item, types.MethodType):
        item = item.__func__
    if isinstance(item, types.FunctionType):
        return WATCHES in item.__dict__ or (item.__module__ or "").startswith("torchremat.")
    # By what the classes have: to ask the object might run code of the user's.
    return hasattr(cast("type", type(item)), WATCHES) or WATCHES in _attributes(item)


def _attributes(item: object) -> Container[object]:
    try:
        found = object.__getattribute__(item, "__dict__")
    except AttributeError:
        return ()
    return found if isinstance(found, dict) else ()  # pyright: ignore[reportUnknownVariableType]
