"""The model and the step of a command: the result of a factory named `module:function`.

The folder that the command runs in is searched first. The factory takes no arguments and returns a model and a step,
and optionally an optimizer.
"""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
from torch import nn

from torchremat.measuring.step import loss_of, run_backward
from torchremat.planning.profiles.optimizers import step_alone
from torchremat.planning.profiles.tracing import Step

SHAPE = "(model, step) or (model, step, optimizer)"


class TargetError(Exception):
    """A command names something that does not exist or does not fit."""


@dataclass(frozen=True, kw_only=True, eq=False)
class TargetStep:
    """The result of a factory."""

    model: nn.Module
    step: Step
    optimizer: torch.optim.Optimizer | None

    def train_once(self) -> None:
        """Run one training step if there is an optimizer, so that its state exists, and is counted, from now on."""
        if self.optimizer is not None:
            run_backward(loss_of(self.step(self.model)))
            step_alone(self.optimizer, self.optimizer.step)
            self.optimizer.zero_grad()


def load(target: str) -> TargetStep:
    """Return the target that the factory `module:function` makes.

    Raises:
        TargetError: The module or function does not exist, or it returns something else.
    """
    module_name, colon, path = target.partition(":")
    if not colon or not module_name or not path:
        raise TargetError(f"{target!r}: expected `module:factory`, like `train:build`.")
    if module_name.endswith(".py") or "/" in module_name or module_name.startswith("."):
        raise TargetError(f"{module_name!r}: expected the name of a module, like `train`, not of a file.")
    found: object = _imported(module_name)
    for name in path.split("."):
        if not hasattr(found, name):
            raise TargetError(f"module {module_name!r} has no {path!r}.{_offered(module_name)}")
        found = getattr(found, name)
    if not callable(found):
        raise TargetError(f"{target} is a {type(found).__name__}, not a function that returns {SHAPE}.")
    try:
        inspect.signature(found).bind()
    except TypeError as error:
        raise TargetError(f"{target} has to take no arguments: {error}.") from error
    except ValueError:  # some callables of C have no signature
        pass
    return _subject(target, cast("Callable[[], object]", found)())


def _imported(name: str) -> object:
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        # A module that this module imports may be missing too; that is the user's own traceback.
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        raise TargetError(
            f"there is no module {error.name!r} in this folder or among the installed packages."
        ) from error


def _offered(module_name: str) -> str:
    """Return a sentence with the functions that a module defines."""
    names = [
        name
        for name, value in vars(sys.modules[module_name]).items()
        if callable(value) and getattr(value, "__module__", None) == module_name and not name.startswith("_")
    ]
    return f" It defines {', '.join(names[:8])}{', ...' if len(names) > 8 else ''}." if names else ""


def _subject(target: str, made: object) -> TargetStep:
    parts = cast("tuple[object, ...]", made) if isinstance(made, tuple) else ()
    if len(parts) not in (2, 3):
        raise TargetError(f"{target} returned {_described(made)}; expected {SHAPE}.")
    model, step, optimizer = (*parts, None)[:3]
    if not isinstance(model, nn.Module):
        raise TargetError(f"{target} returned {_described(made)}; the first must be a torch.nn.Module.")
    if not callable(step):
        raise TargetError(f"{target} returned {_described(made)}; the second must be a function, step(model).")
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        raise TargetError(f"{target} returned {_described(made)}; the third must be a torch.optim.Optimizer.")
    return TargetStep(model=model, step=cast("Step", step), optimizer=optimizer)


def _described(made: object) -> str:
    if isinstance(made, tuple):
        kinds = ", ".join(type(part).__name__ for part in cast("tuple[object, ...]", made))
        return f"a tuple ({kinds})"
    return "None (is a `return` missing?)" if made is None else f"a {type(made).__name__}"
