"""Functions and modules as regions: `checkpoint`, `checkpointed`, `wrap` and `unwrap`."""

from __future__ import annotations

import difflib
import fnmatch
import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, ParamSpec, TypeVar

import torch
from torch import nn

from torchremat._compat.dynamo import outside_graphs
from torchremat.errors import UnsupportedError, WrapError
from torchremat.regions.compiling import call_in_graph
from torchremat.regions.decisions import AnyPolicy
from torchremat.regions.patches import check_replaceable, check_uncovered, is_wrapped, restore_forward, set_forward
from torchremat.regions.runs import continued
from torchremat.regions.settings import Check, Settings
from torchremat.regions.threads import makes_regions
from torchremat.regions.transforms import new_region
from torchremat.state.roots import Root
from torchremat.stores.offloading import offload

if TYPE_CHECKING:
    from torchremat.tensors.handles import Store


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
    policy: AnyPolicy | None = None,
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

    root = Root(function)

    @functools.wraps(function)
    def region(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_dynamo_compiling():
            return call_in_graph(function, settings, partial(_run, function, settings), args, kwargs)
        return _run(function, settings, args, kwargs, root)

    return region


@outside_graphs
def _run(
    function: Callable[..., R],
    settings: Settings,
    args: tuple[object, ...],
    kwargs: dict[str, object],
    root: Root | None = None,
) -> R:
    if not callable(function):
        raise UnsupportedError(f"function: expected a callable, got {type(function).__name__}.")
    if not makes_regions():
        return function(*args, **kwargs)
    body = continued(function)
    return new_region(settings).call(body, args, kwargs, (root or function,))  # pyright: ignore[reportReturnType]: it is what `function` returns


_DEFAULTS = Settings()


Pattern = str | type[nn.Module] | Callable[[str, nn.Module], bool]
M = TypeVar("M", bound=nn.Module)


def wrap(
    model: M,
    modules: Pattern,
    *,
    every: int = 1,
    store: Store | None = None,
    check: Check = "metadata",
    check_every: int = 1,
    preserve_rng: bool = True,
    early_stop: bool = True,
    guard: Sequence[object] = (),
    debug: bool = False,
    policy: AnyPolicy | None = None,
) -> M:
    """Make the calls of some modules of a model regions, or offload them with `store`, and return the model.

    Args:
        model: The model; only attributes of the instances named below change, see `unwrap`.
        modules: A glob over names as `named_modules()` has them (`"layers.*"` means the children of `layers`, not
            theirs: a `*` does not match a dot), a type, or a predicate of name and module.
        every: Wrap the first of every `every` matches, in the order of `named_modules()`.
        store: The store for the saved tensors of these calls, instead of recomputing them; see `offload`. The calls
            share a catalog: a tensor that several of them save is stored once. Such a call breaks the graph of a
            compiled function.
        check: See `checkpointed`.
        check_every: See `checkpointed`; every module counts its own calls.
        preserve_rng: See `checkpointed`.
        early_stop: See `checkpointed`.
        guard: See `checkpointed`.
        debug: See `checkpointed`.
        policy: See `checkpointed`.

    Raises:
        WrapError: Nothing matches (the message has the closest names), a match is wrapped already, or an option of
            recomputing is given together with a store.
    """
    settings = Settings(
        check=check,
        check_every=check_every,
        preserve_rng=preserve_rng,
        early_stop=early_stop,
        guard=guard,
        debug=debug,
        policy=policy,
    )
    if not isinstance(every, int) or isinstance(every, bool) or every < 1:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise WrapError(f"every={every!r}: expected an int of at least 1.")
    found = matching(model, modules)[::every]
    for name, module in found:
        check_replaceable(module, name)
    offloads = None if store is None else offload(store)
    if offloads is not None and settings != Settings():
        raise WrapError(
            "store=: what goes to a store is not recomputed, so `check`, `check_every`, `preserve_rng`, `early_stop`, "
            "`guard`, `debug` and `policy` mean nothing; leave them out."
        )
    for name, module in found:
        set_forward(module, name, offloads or replace(settings))  # each counts its own calls
    return model


def unwrap(model: M) -> M:
    """Restore the original forward of every module of a model, and return the model.

    Raises:
        WrapError: Another library has wrapped the forward of a module since; nothing has changed.
    """
    check_uncovered(model)
    for module in model.modules():
        if is_wrapped(module):
            restore_forward(module)
    return model


def matching(model: nn.Module, pattern: Pattern) -> list[tuple[str, nn.Module]]:
    """Return the modules that a pattern matches, with their names, in the order of `named_modules()`.

    Raises:
        WrapError: None does.
    """
    if not isinstance(model, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]: users are not type-checked
        raise WrapError(f"model: expected a torch.nn.Module, got {type(model).__name__}.")
    named = list(model.named_modules())
    if isinstance(pattern, str):
        matches = [(name, module) for name, module in named if _glob(name, pattern)]
    elif isinstance(pattern, type):
        if not issubclass(pattern, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise WrapError(f"modules={pattern.__name__}: expected a type of module.")
        matches = [(name, module) for name, module in named if isinstance(module, pattern)]
    elif callable(pattern):  # pyright: ignore[reportUnnecessaryComparison]
        matches = [(name, module) for name, module in named if pattern(name, module)]
    else:
        raise WrapError(f"modules={pattern!r}: expected a glob over names, a type, or a predicate of name and module.")
    if not matches:
        raise WrapError(_no_match(pattern, named))
    return matches


def _glob(name: str, pattern: str) -> bool:
    if not name:
        return not pattern  # the model itself, which `fnmatch` finds under "*" as well
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(map(fnmatch.fnmatchcase, parts, wanted))


def _no_match(pattern: Pattern, named: Iterable[tuple[str, nn.Module]]) -> str:
    if isinstance(pattern, str):
        names = [name for name, _ in named]
        close = difflib.get_close_matches(pattern, names, n=3, cutoff=0.3)
        found = close or names[1:4] or ["none, the model has no children"]
        return f"no module is named {pattern!r}. Closest names: {', '.join(found)}."
    kinds = sorted({type(module).__name__ for _, module in named})
    if isinstance(pattern, type):
        close = difflib.get_close_matches(pattern.__name__, kinds, n=3, cutoff=0.3)
        return f"no module is a {pattern.__name__}. Closest types: {', '.join(close) or ', '.join(kinds[:3])}."
    name = getattr(pattern, "__name__", pattern)
    return f"the predicate {name!r} matched none of the model's modules, of types {', '.join(kinds)}."
