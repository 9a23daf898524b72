"""Which of two arguments is the model, and which the step: `(model, step)`, as everywhere in the library.

`measure` and `saved` took them the other way round up to 0.1. A call in the old order still works and warns with the
new order.
"""

# NOTE [ The old order of arguments ]
#
# `(step, model)` works in 0.2 and is removed in 0.3, with `model_first` and `DeprecatedWarning`'s only use.

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeAlias, TypeVar, cast

from torch import nn

from torchremat.errors import DeprecatedWarning, warn

P = ParamSpec("P")
R = TypeVar("R")

Step: TypeAlias = Callable[..., object]


def model_first(function: Callable[P, R]) -> Callable[P, R]:
    """Return a function of `(model, step)` that takes them in the old order as well, with one warning that says so."""
    name = getattr(function, "__name__", "")

    @wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        first, second = (*args, None, None)[:2]
        second = kwargs.get("model", second)
        # See NOTE [ The old order of arguments ]. The function itself rejects an argument that should be a model and is
        # not.
        if not args or isinstance(first, nn.Module) or not isinstance(second, nn.Module):
            return function(*args, **kwargs)
        warn(
            f"{name}(step, model) is now {name}(model, step), as with `plan`; 0.3 will remove the old order.",
            DeprecatedWarning,
        )
        named = {key: value for key, value in kwargs.items() if key != "model"}
        return cast("Callable[..., R]", function)(second, first, *args[2:], **named)

    return called


def model_and_step(model: nn.Module | Step, step: Step | None) -> tuple[Step, nn.Module | None]:
    """Return the step and the model; a single function is a step that needs no model."""
    if step is None and not isinstance(model, nn.Module):
        return model, None
    return cast("Step", step), cast("nn.Module", model)
