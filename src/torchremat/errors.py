"""The exception tree. Every class is also the builtin that a caller would expect.

    TorchrematError
    ├── BudgetError        (ValueError)    a budget that is no size, or that no plan fits
    ├── CheckpointError    (RuntimeError)  a recompute differs from its forward; torch's error of that name as well
    ├── DeviceError        (ValueError)    a description of a device that is none, or that lacks something
    ├── GuardError         (RuntimeError)  a step that ran out of memory, and could not be run again
    ├── MutationError      (RuntimeError)  an input or buffer changed between forward and recompute
    ├── PipelineError      (ValueError)    a pipe that cannot be made, or a batch that it cannot take
    ├── PlanError          (ValueError)    a plan that does not belong to this model, or a file that is none
    ├── PolicyError        (ValueError)    a policy that cannot be, or that names what does not exist
    ├── ScheduleError      (ValueError)    a schedule that breaks its own rules
    ├── SkipError          (RuntimeError)  a skip that is stashed or popped otherwise than declared
    ├── SkippableError     (TypeError)     stashes and pops that do not fit together, or declarations that are none
    ├── StepError          (ValueError)    a training step that cannot be measured or planned
    ├── StoreError         (RuntimeError)  a stored tensor that cannot be had back, or a store without room
    ├── UnsupportedError   (RuntimeError)  something that cannot be honoured here; a ValueError as well, as options are
    ├── VersionError       (ImportError)   this torch lacks a name that a part needs
    └── WrapError          (ValueError)    modules that cannot be wrapped, or a pattern that matches none

    BudgetWarning          (UserWarning)   a step above its budget, if that was asked to be a warning
    DeprecatedWarning      (FutureWarning) a way of calling that works for one more version
    DeviceWarning          (UserWarning)   a described device of which a plan needs to know more
    CompileWarning         (UserWarning)   a compiler that cannot be told which peak to keep to
    ShapeWarning           (UserWarning)   a call larger than those planned for
    PlanWarning            (UserWarning)   a model that trains under other conditions than it was planned under
    OrderWarning           (UserWarning)   a model that called its modules in another order than planned
    RepeatWarning          (UserWarning)   modules that are not recomputed, as that would not be their forward
    StoreWarning           (UserWarning)   a store without room, or one that takes more than it might

`bug` makes the error for what cannot happen, and `warn` warns at a line of the user's.
"""

from __future__ import annotations

import os
import sys
import typing
import warnings

import torch
from torch.utils import checkpoint as _torch_checkpoint

# The folders of torch and of this package, whose files are not the user's.
PACKAGES = (os.path.dirname(torch.__file__) + os.sep, os.path.dirname(os.path.abspath(__file__)) + os.sep)


class TorchrematError(Exception):
    """The base of every error that torchremat raises."""


class BudgetError(TorchrematError, ValueError):
    """A budget that is no size, or that no plan fits."""


class CheckpointError(TorchrematError, _torch_checkpoint.CheckpointError):
    """A recompute that differs from its forward. It is torch's error of that name as well."""


class DeviceError(TorchrematError, ValueError):
    """A description of a device that is none, or that lacks something."""


class GuardError(TorchrematError, RuntimeError):
    """A step that ran out of memory in all attempts, or could not be run again.

    Attributes:
        attempts: The `Attempt`s that failed, in order.
    """

    def __init__(self, message: str, attempts: tuple[typing.Any, ...] = ()) -> None:
        super().__init__(message)
        # `Attempt` is further down the house than errors, so that it cannot be named here.
        self.attempts = attempts


class MutationError(TorchrematError, RuntimeError):
    """An input or a buffer that was changed in place between a forward and its recompute."""


class PipelineError(TorchrematError, ValueError):
    """A pipe that cannot be made, a batch that it cannot take, or skips that do not match."""


class PlanError(TorchrematError, ValueError):
    """A plan that does not belong to this model, or a file that holds none."""


class PolicyError(TorchrematError, ValueError):
    """A policy that cannot be, or that names something which does not exist."""


class ScheduleError(TorchrematError, ValueError):
    """A schedule that breaks its own rules."""


class SkipError(TorchrematError, RuntimeError):
    """A skip that is stashed or popped otherwise than declared."""


class SkippableError(TorchrematError, TypeError):
    """Stashes and pops that do not fit together, or declarations that are none."""


class StepError(TorchrematError, ValueError):
    """A training step that cannot be measured or planned."""


class StoreError(TorchrematError, RuntimeError):
    """A stored tensor that cannot be had back, or a store that has no room for one. Never other data instead."""

    def add(self, fact: str) -> None:
        """Add a sentence to the message.

        A store knows shape and bytes. Who knows more, for example which node saved the tensor, adds it on the way.
        """
        self.args = (f"{self} {fact}",)


class UnsupportedError(TorchrematError, RuntimeError, ValueError):
    """Something that cannot be honoured here, such as an option of another kind; never a silent fallback."""


class VersionError(TorchrematError, ImportError):
    """This torch lacks a name that a part of the library needs."""


class WrapError(TorchrematError, ValueError):
    """Modules that cannot be wrapped, or a pattern that matches none."""


class BudgetWarning(UserWarning):
    """A step above its budget, where that was asked to be a warning, or where it was seen when it was over."""


class DeprecatedWarning(FutureWarning):
    """A way of calling that works for one more version. Users see it, as they do not Python's DeprecationWarning."""


class DeviceWarning(UserWarning):
    """A described device of which a plan needs to know more, so that its bytes are too low."""


class CompileWarning(UserWarning):
    """A compiled step that may need more than its budget: the compiler is not told of it, or not of all that runs."""


class ShapeWarning(UserWarning):
    """A call whose inputs are larger than those that were planned for."""


class PlanWarning(UserWarning):
    """A model that trains in another mode, precision or sharding than a plan was made for, or recomputes by itself."""


class OrderWarning(UserWarning):
    """A model that called its modules, or ran operators, in another order than the plan was made for."""


class RepeatWarning(UserWarning):
    """Modules that a plan does not recompute since that would not be their forward, or that nobody could try."""


class StoreWarning(UserWarning):
    """A store that has no room, so that a saved tensor stays where it is, or one that takes more than it might."""


def bug(fact: str) -> AssertionError:
    """Return the error for a state that the library's own rules exclude; `fact` carries the numbers."""
    return AssertionError(f"{fact}. This is a bug in torchremat, please report it with this message.")


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the innermost line that runs and is neither torch's nor ours; at that of the caller if there is none.

    A `stacklevel` would have to know how many calls of hooks, modes and modules lie between.
    """
    frame = caller = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(PACKAGES):
        frame = frame.f_back
    found = caller if frame is None else frame
    # As `warnings.warn` does, so that filters by module and by line hold.
    warnings.warn_explicit(
        message,
        category,
        found.f_code.co_filename,
        found.f_lineno,
        module=found.f_globals.get("__name__", "<string>"),
        registry=found.f_globals.setdefault("__warningregistry__", {}),
    )


def check_flags(*, may_be_none: bool = False, **flags: object) -> None:
    """Raise where an option that is on or off has another value: "no" would be on, and users are not type-checked.

    Args:
        may_be_none: Whether None is a value as well.
        flags: The options, by name.

    Raises:
        UnsupportedError: One is something else.
    """
    for name, value in flags.items():
        if not isinstance(value, bool) and not (may_be_none and value is None):
            allowed = "True, False or None" if may_be_none else "True or False"
            raise UnsupportedError(f"{name}={value!r}: {allowed} is needed.")
