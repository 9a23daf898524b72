"""Queries and requests for code that runs in a region, and names for its tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, cast

import torch
from torch import Tensor

from torchremat.errors import CheckpointError, UnsupportedError
from torchremat.regions.calls import Frozen
from torchremat.regions.selective.mode import SeenBy
from torchremat.regions.threads import thread


def name(tensor: Tensor, name: str) -> Tensor:
    """Return `tensor`, which policies know by `name` from now on.

    Put it where the tensor is made, in the model's code: `qkv = name(self.qkv(x), "qkv")`. The answer of a policy that
    reads names holds for the whole operator that made the tensor. Without such a policy, and in compiled functions,
    `name` is a no-op.

    Args:
        tensor: Any tensor, the result of a custom Function included.
        name: One name may be used for several tensors.

    Raises:
        UnsupportedError: `tensor` is not a tensor, or `name` is not a string.

    >>> import torch
    >>> from torchremat import checkpointed
    >>> from torchremat.policies import save_only_these_names
    >>> block = checkpointed(lambda x: name(x.exp(), "e").sin(), policy=save_only_these_names("e"))
    >>> block(torch.zeros(1, requires_grad=True)).sum().backward()  # `exp` runs once
    """
    if torch.compiler.is_dynamo_compiling():
        return tensor
    if not isinstance(tensor, Tensor) or not isinstance(name, str):  # pyright: ignore[reportUnnecessaryIsInstance]: users are not type-checked
        raise UnsupportedError(f"name(tensor, name): expected a tensor and a string, got {tensor!r} and {name!r}.")
    run = thread.now.selecting
    if run is not None:
        with SeenBy(None):
            run.named(_NAME, tensor, name)
    return tensor


_NAME = name


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
