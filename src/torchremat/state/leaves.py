"""The version, the flag and the hooks of tensors."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any, cast

from torch import Tensor

from torchremat.state.containers import Dict

flags_of = cast("Callable[[Tensor], tuple[int, bool]]", attrgetter("_version", "requires_grad"))
_hooks = cast("Callable[[Tensor], tuple[Any, Any]]", attrgetter("_backward_hooks", "_post_accumulate_grad_hooks"))
_NO_HOOKS = (None, None)


def copied_hooks(tensors: list[Tensor]) -> list[tuple[Dict | None, Dict | None]] | None:
    """Return copies of the hooks of tensors, which a recompute must not add to; None if they have none."""
    found = [*map(_hooks, tensors)]
    if found.count(_NO_HOOKS) == len(found):
        return None
    return [
        (None if before is None else dict(before), None if after is None else dict(after)) for before, after in found
    ]


def put_hooks_back(tensors: list[Tensor], hooks: list[tuple[Dict | None, Dict | None]] | None) -> None:
    """Restore the hooks of tensors from the result of `copied_hooks`."""
    found = [*map(_hooks, tensors)]
    if hooks is None and all(one == _NO_HOOKS for one in found):
        return
    for now, had in zip(found, hooks or [_NO_HOOKS] * len(found), strict=True):
        for own, before in zip(now, had, strict=True):
            if own is not None and own != (before or {}):
                own.clear()
                own.update(before or {})
