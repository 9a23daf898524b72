"""Queries and requests for code that runs in a region."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, cast

from torch import Tensor

from torchremat.errors import CheckpointError, UnsupportedError
from torchremat.regions.frozen_values import Frozen
from torchremat.regions.threads import thread

P = ParamSpec("P")


def is_checkpointing() -> bool:
    """Return whether the caller runs in the forward of a region, whose saved tensors will be recomputed.

    Also true in a region that is met inside a recompute. Other threads do not matter.
    """
    return bool(thread.now.calls)


def is_recomputing() -> bool:
    """Return whether the caller runs in a recompute. Other threads do not matter."""
    return thread.now.recomputing > 0


def run_once(function: Callable[P, object], *args: P.args, **kwargs: P.kwargs) -> None:
    """Call a function for its side effect, only in the forward: a recompute skips it.

    Its result is dropped, since a recompute would not have it; see `frozen` for tensors. It should not save tensors for
    backward, as a recompute would not.

    >>> import torch
    >>> from torchremat import checkpoint
    >>> seen = []
    >>> def body(x):
    ...     run_once(seen.append, "forward")
    ...     return x.exp().sin()
    >>> checkpoint(body, torch.ones(2, requires_grad=True)).sum().backward()
    >>> seen
    ['forward']
    """
    if thread.now.recomputing == 0:
        function(*args, **kwargs)


def frozen(name: str, tensor: Tensor) -> Tensor:
    """Return `tensor`; in a recompute, the tensor that the forward had there.

    For decisions that must not be made again: the expert that a router picked, a mask, a permutation. The tensor is
    kept until the region's saved tensors are gone. Outside of a region it is returned as it is.

    Args:
        name: The words for it in messages. One name may be used several times in a region.
        tensor: Any shape and dtype.

    Raises:
        CheckpointError: In a recompute, when the forward had frozen fewer tensors of that name.
        MutationError: In a recompute, when the tensor was written in place since the forward.
        UnsupportedError: `tensor` is not a tensor.
    """
    if not isinstance(tensor, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]: users are not type-checked
        raise UnsupportedError(f"frozen({name!r}, ...): expected a tensor, got {type(tensor).__name__}.")
    if thread.now.recomputing:
        kept = next(thread.now.frozen.get(name, iter(())), None)
        if kept is None:
            raise CheckpointError(
                f"frozen({name!r}, ...) was called more often in a recompute than in its forward. The function does "
                "not do the same twice: look for a branch on data or on state that has changed."
            )
        tensor = cast("Tensor", kept.thaw(f"frozen({name!r}, ...)"))
    if thread.now.calls:
        frozen_now = Frozen(tensor)
        for call in thread.now.calls:
            call.freeze(name, frozen_now)
    return tensor
