"""The exception tree. Every class is also the builtin that a caller would expect.

    TorchrematError
    ├── BudgetError        (ValueError)    a budget that is not a size, or that no plan fits
    ├── CheckpointError    (RuntimeError)  a recompute differs from its forward; torch's error of that name as well
    ├── DeviceError        (ValueError)    an invalid or incomplete description of a device
    ├── GuardError         (RuntimeError)  a step that ran out of memory, and could not be repeated
    ├── MutationError      (RuntimeError)  an input or buffer changed between forward and recompute
    ├── PipelineError      (ValueError)    an invalid pipe, or a batch that it cannot take
    ├── PlanError          (ValueError)    a plan that does not belong to this model, or a file that holds none
    ├── PolicyError        (ValueError)    an invalid policy, or one that names something that does not exist
    ├── ScheduleError      (ValueError)    a schedule that breaks its own rules
    ├── SkipError          (RuntimeError)  a skip that is not stashed or popped as declared
    ├── SkippableError     (TypeError)     mismatched stashes and pops, or invalid declarations
    ├── StepError          (ValueError)    a training step that cannot be measured or planned
    ├── StoreError         (RuntimeError)  a stored tensor that cannot be brought back, or a store without room
    ├── UnsupportedError   (RuntimeError)  a request that cannot be honoured here; also a ValueError, as for options
    ├── VersionError       (ImportError)   this torch lacks a name that a part needs
    └── WrapError          (ValueError)    modules that cannot be wrapped, or a pattern that matches none

    BudgetWarning          (UserWarning)   a step above its budget, if the user asked for a warning
    DeprecatedWarning      (FutureWarning) a way of calling that works for one more version
    DeviceWarning          (UserWarning)   a device description that lacks data for a plan
    CompileWarning         (UserWarning)   a compiler that cannot be given the budget
    ShapeWarning           (UserWarning)   a call larger than those planned for
    PlanWarning            (UserWarning)   a model that trains under other conditions than planned
    OrderWarning           (UserWarning)   a model that called its modules in another order than planned
    RepeatWarning          (UserWarning)   modules that are not recomputed, as that would not repeat their forward
    StoreWarning           (UserWarning)   a store without room, or one that takes more than it should

`bug` makes the error for states that cannot occur, `warn` warns at a line of user code, and `first_of` shortens names
for messages.
"""

from __future__ import annotations

import collections.abc
import sys
import typing
import warnings

from torch.utils import checkpoint as _torch_checkpoint

from torchremat.frames import user_frame


class TorchrematError(Exception):
    """The base of every error that torchremat raises."""


class BudgetError(TorchrematError, ValueError):
    """A budget that is not a size, or that no plan fits."""


class CheckpointError(TorchrematError, _torch_checkpoint.CheckpointError):
    """A recompute that differs from its forward. It is also torch's error of that name."""


class DeviceError(TorchrematError, ValueError):
    """An invalid or incomplete description of a device."""


class GuardError(TorchrematError, RuntimeError):
    """A step that ran out of memory in all attempts, or could not be repeated.

    Attributes:
        attempts: The `Attempt`s that failed, in order.
    """

    def __init__(self, message: str, attempts: tuple[typing.Any, ...] = ()) -> None:
        super().__init__(message)
        # `Attempt` is defined in a later layer than errors, so it cannot be named here.
        self.attempts = attempts


class MutationError(TorchrematError, RuntimeError):
    """An input or a buffer that was changed in place between a forward and its recompute."""


class PipelineError(TorchrematError, ValueError):
    """An invalid pipe, a batch that it cannot take, or skips that do not match."""


class PlanError(TorchrematError, ValueError):
    """A plan that does not belong to this model, or a file that holds none."""


class PolicyError(TorchrematError, ValueError):
    """An invalid policy, or one that names something that does not exist."""


class ScheduleError(TorchrematError, ValueError):
    """A schedule that breaks its own rules."""


class SkipError(TorchrematError, RuntimeError):
    """A skip that is not stashed or popped as declared."""


class SkippableError(TorchrematError, TypeError):
    """Mismatched stashes and pops, or invalid declarations."""


class StepError(TorchrematError, ValueError):
    """A training step that cannot be measured or planned."""


class StoreError(TorchrematError, RuntimeError):
    """A stored tensor that cannot be brought back, or a store without room for one. Never wrong data instead."""


class UnsupportedError(TorchrematError, RuntimeError, ValueError):
    """A request that cannot be honoured here, for example an option of the wrong kind; never a silent fallback."""


class VersionError(TorchrematError, ImportError):
    """This torch lacks a name that a part of the library needs."""


class WrapError(TorchrematError, ValueError):
    """Modules that cannot be wrapped, or a pattern that matches none."""


class BudgetWarning(UserWarning):
    """A step above its budget, where the user asked for a warning, or where this was seen only after the step."""


class DeprecatedWarning(FutureWarning):
    """A way of calling that works for one more version. Shown to users, unlike Python's DeprecationWarning."""


class DeviceWarning(UserWarning):
    """A device description that lacks data for a plan, so that the plan's bytes are too low."""


class CompileWarning(UserWarning):
    """A compiled step that may exceed its budget: the compiler does not know the budget, or not all that runs."""


class ShapeWarning(UserWarning):
    """A call whose inputs are larger than the planned ones."""


class PlanWarning(UserWarning):
    """A model that trains in another mode, precision or sharding than planned, or that recomputes by itself."""


class OrderWarning(UserWarning):
    """A model that called its modules, or ran operators, in another order than the plan was made for."""


class RepeatWarning(UserWarning):
    """Modules that a plan does not recompute since that would not repeat their forward, or that could not be tried."""


class StoreWarning(UserWarning):
    """A store without room, so that a saved tensor stays in place, or a store that takes more than it should."""


def bug(fact: str) -> AssertionError:
    """Return the error for a state that the library's own rules exclude; `fact` carries the numbers."""
    return AssertionError(f"{fact}. This is a bug in torchremat, please report it with this message.")


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the innermost running line outside of torch and this package; at the caller's if none is.

    A `stacklevel` would have to count the calls of hooks, modes and modules in between.
    """
    found = user_frame() or sys._getframe(1)
    # Like `warnings.warn`, so that filters by module and by line apply.
    warnings.warn_explicit(
        message,
        category,
        found.f_code.co_filename,
        found.f_lineno,
        module=found.f_globals.get("__name__", "<string>"),
        registry=found.f_globals.setdefault("__warningregistry__", {}),
    )


def first_of(names: collections.abc.Sequence[str], most: int = 3) -> str:
    """Return the first of many names for a message, with commas: "a, b, c, ..."."""
    return ", ".join(names[:most]) + (", ..." if len(names) > most else "")


def check_flags(*, may_be_none: bool = False, **flags: object) -> None:
    """Raise if an on/off option has another value: "no" would mean on, and users are not type-checked.

    Args:
        may_be_none: Whether None is allowed as well.
        flags: The options, by name.

    Raises:
        UnsupportedError: An option has another value.
    """
    for name, value in flags.items():
        if not isinstance(value, bool) and not (may_be_none and value is None):
            allowed = "True, False or None" if may_be_none else "True or False"
            raise UnsupportedError(f"{name}={value!r}: expected {allowed}.")
