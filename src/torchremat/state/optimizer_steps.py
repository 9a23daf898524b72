"""Who hears that an optimizer steps: torch's hooks around every step, registered once, and for good.

torch goes through the dict of these hooks in each step of each optimizer, in whatever thread, and raises if it changes
meanwhile. So ours are there from the import on, and who listens is looked up in each step. With nobody there, a
compiled step holds nothing of ours.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeAlias, cast

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

Arguments: TypeAlias = tuple[tuple[object, ...], Mapping[str, object]]
"""The arguments of a step, and those by name."""
Before: TypeAlias = Callable[[Optimizer, tuple[object, ...], Mapping[str, object]], Arguments | None]
"""Called before a step; it may return other arguments for it, and end it by an error."""
After: TypeAlias = Callable[[Optimizer], object]

_before: dict[object, Before] = {}
_after: dict[object, After] = {}


def before_each_step(listener: Before) -> Callable[[], object]:
    """Call a function before each step of any optimizer of torch, in any thread; return what ends that."""
    return _listening(_before, listener)


def after_each_step(listener: After) -> Callable[[], object]:
    """Call a function after each step of any optimizer of torch, in any thread; return what ends that."""
    return _listening(_after, listener)


def _listening(listeners: dict[object, Any], listener: object) -> Callable[[], object]:
    key = object()
    listeners[key] = listener
    return partial(listeners.pop, key, None)


def _begins(optimizer: Optimizer, args: tuple[object, ...], kwargs: dict[str, object]) -> Any:
    changed: Arguments | None = None
    for listener in _before.copy().values():  # copied, since other threads begin and end to listen
        changed = listener(optimizer, *(changed or (args, kwargs))) or changed
    return changed


def _ends(optimizer: Optimizer, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
    for listener in _after.copy().values():
        listener(optimizer)


register_optimizer_step_pre_hook(cast("Any", _begins))
register_optimizer_step_post_hook(cast("Any", _ends))
