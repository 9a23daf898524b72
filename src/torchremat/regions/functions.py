"""Functions as regions."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from functools import partial
from typing import ParamSpec, TypeVar

import torch

from torchremat._compat.dynamo import outside_graphs
from torchremat.errors import UnsupportedError
from torchremat.regions.compiling import call_in_graph
from torchremat.regions.decisions import Policy
from torchremat.regions.runs import continued
from torchremat.regions.settings import Check, Settings
from torchremat.regions.threads import makes_regions
from torchremat.regions.transforms import new_region

P = ParamSpec("P")
R = TypeVar("R")


def checkpoint(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Return `function(*args, **kwargs)`; backward recomputes the tensors that autograd saves in it.

    Gradients are the same as in the plain call, bit for bit. Every tensor in `args` and `kwargs`, in nested containers
    too, is an input. Without grad mode it is a plain call. Options: see `checkpointed`.

    Raises:
        CheckpointError: In backward, when the recompute differs from the forward.
        MutationError: In backward, when an input or parameter was changed in place since the forward.
        UnsupportedError: `function` is not callable.

    >>> import torch
    >>> x = torch.ones(3, requires_grad=True)
    >>> checkpoint(lambda t: (t * t).sum(), x).backward()
    >>> x.grad
    tensor([2., 2., 2.])
    """
    if torch.compiler.is_dynamo_compiling():
        return call_in_graph(function, _DEFAULTS, partial(_run, function, _DEFAULTS), args, kwargs)
    return _run(function, _DEFAULTS, args, kwargs)


def checkpointed(
    function: Callable[P, R],
    *,
    check: Check = "metadata",
    check_every: int = 1,
    preserve_rng: bool = True,
    early_stop: bool = True,
    guard: Sequence[object] = (),
    debug: bool = False,
    policy: Policy | None = None,
) -> Callable[P, R]:
    """Return `function` as a function whose every call is a region. Usable as a decorator.

    Args:
        function: Any callable; a module's parameters and buffers are tracked if the module is the function, the
            function's `self`, in its closure, one of its global names, or an argument.
        check: What to compare of the tensors that autograd saves in forward and recompute. `"metadata"`: their number,
            shape, dtype, device, layout and the class of their strides. `"values"`: their bits as well, by a
            fingerprint computed on their device; on the CPU a difference is an error before any gradient is computed
            from it, elsewhere when the backward has ended and the gradients are written. `"none"`: only their number.
        check_every: With `check="values"`, compare values in the first call and in every `check_every`-th after it.
        preserve_rng: Whether the recompute draws the random numbers that the forward drew.
        early_stop: Whether a recompute ends at the last tensor that is needed.
        guard: Objects that the function changes and a recompute must see as the forward saw them: caches, counters, any
            object with `snapshot()` and `restore(state)`, and modules that the function reaches in hidden ways.
            Arguments are tracked anyway, except tensors inside them that are written in place; these are cloned if the
            object is named here.
        debug: Whether to log every operator of the forward, so that a `CheckpointError` shows both logs from where they
            part. Slow; compiled code runs eagerly.
        policy: Chooses the operators whose outputs are kept, or wait in a store, instead of running again; one of
            `torchremat.policies`, or a function as for `torch.utils.checkpoint.create_selective_checkpoint_contexts`.
            Compiled code runs eagerly.

    Raises:
        UnsupportedError: An option has a value other than those above.
        PolicyError: `policy` is not a function.
    """
    if not callable(function):
        raise UnsupportedError(f"function: expected a callable, got {type(function).__name__}.")
    settings = Settings(
        check=check,
        check_every=check_every,
        preserve_rng=preserve_rng,
        early_stop=early_stop,
        guard=guard,
        debug=debug,
        policy=policy,
    )

    @functools.wraps(function)
    def region(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_dynamo_compiling():
            return call_in_graph(function, settings, partial(_run, function, settings), args, kwargs)
        return _run(function, settings, args, kwargs)

    return region


@outside_graphs
def _run(function: Callable[..., R], settings: Settings, args: tuple[object, ...], kwargs: dict[str, object]) -> R:
    if not callable(function):
        raise UnsupportedError(f"function: expected a callable, got {type(function).__name__}.")
    if not makes_regions():
        return function(*args, **kwargs)
    body = continued(function)
    return new_region(settings).call(body, args, kwargs, (function,))  # pyright: ignore[reportReturnType]: it is what `function` returns


_DEFAULTS = Settings()
