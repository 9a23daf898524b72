"""Types that torch's pytree flattens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, cast

from torch.utils import _pytree


class Registration(Protocol):
    """How torch's pytree flattens a container."""

    flatten_fn: Callable[[object], tuple[list[object], object]]
    unflatten_fn: Callable[[list[object], object], object]


registered_containers = cast("dict[type, Registration]", _pytree.SUPPORTED_NODES)
