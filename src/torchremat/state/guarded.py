"""The objects that users name in `guard=`, some of which manage their own state."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from torchremat.errors import UnsupportedError
from torchremat.state.containers import MUTABLE
from torchremat.state.foreign import FOREIGN
from torchremat.state.holders import Slots


@runtime_checkable
class Guarded(Protocol):
    """An object that can save and restore its own state."""

    def snapshot(self) -> object:
        """Return a copy of the current state, which later changes do not reach."""
        ...

    def restore(self, state: Any) -> None:
        """Restore the state that `snapshot` returned. May be called many times with the same value."""
        ...


def looks_after_itself(one: object) -> bool:
    """Return whether an object has `snapshot()` and `restore(state)`, and is no module."""
    return isinstance(one, Guarded) and not isinstance(one, nn.Module)


def check_named(one: object) -> None:
    """Refuse to guard an object without contents that can be restored.

    Raises:
        UnsupportedError: It is a tensor, a class, a constant, or an object that exposes none of its state.
    """
    if (
        isinstance(one, (Tensor, type))
        or (type(one).__module__ == "builtins" and type(one).__hash__ is not None)
        or not (
            isinstance(one, (Guarded, nn.Module, torch.Generator, *FOREIGN, *MUTABLE))
            or hasattr(one, "__dict__")
            or Slots.of(one) is not None
        )
    ):
        raise UnsupportedError(
            f"guard: the contents of {type(one).__name__} cannot be restored; name the object that holds it, or give "
            "it `snapshot()` and `restore(state)`."
        )
