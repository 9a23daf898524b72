"""Modules as regions, by name, type or predicate, without editing the model."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from torch import nn

from torchremat.errors import WrapError
from torchremat.regions.decisions import Policy
from torchremat.regions.patches import check_replaceable, check_uncovered, is_wrapped, restore_forward, set_forward
from torchremat.regions.settings import Check, Settings
from torchremat.stores.offloading import offload

if TYPE_CHECKING:
    from torchremat.tensors.handles import Store

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
    policy: Policy | None = None,
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
