"""The objects that a callable holds in plain sight, by their names in its code; and steps that use them up.

To plan and to measure, a step is run several times. Lists and dicts that it takes from are restored each time, see
`untouched`; an iterator cannot be.
"""

from __future__ import annotations

import functools
import io
from collections.abc import Iterator
from types import CodeType, FunctionType, MethodType
from typing import cast

from torchremat.errors import StepError
from torchremat.measuring.step import held_by_function


def used_up(step: object, error: Exception, runs: int) -> StepError:
    """Return the error for a step that has run and finds nothing more to run on.

    Args:
        step: The step.
        error: The error that it raised.
        runs: How often it has run before.
    """
    ran = {0: "", 1: "ran once, and then "}.get(runs, f"ran {runs} times, and then ")
    if isinstance(error, StopIteration):
        names = ", ".join(dict.fromkeys(f"`{name}`" for name, one in _held_within(step) if is_iterator(one)))
        found = f"took from an iterator that has ended{f' ({names})' if names else ''}"
        advice = "Take the batch before, and let the step hold it: `batch = next(loader)`."
    else:
        found = f"raised {type(error).__name__}: {error}"
        advice = "It seems to consume its input: let it take from a copy, such as `dict(batch).pop(...)`."
    return StepError(f"the step {ran}{found}. It is run several times here. {advice}")


def _held_within(function: object) -> Iterator[tuple[str, object]]:
    """Yield the objects that a callable and the functions that it holds have in plain sight."""
    waiting, seen = [function], set[int]()
    while waiting:
        one = waiting.pop()
        if id(one) not in seen:
            seen.add(id(one))
            held = list(held_by(one))
            yield from held
            waiting += [inner for _, inner in held if isinstance(inner, FunctionType | functools.partial)]


def held_by(function: object) -> Iterator[tuple[str, object]]:
    """Yield the objects that a callable holds in plain sight, with their names in its code."""
    if isinstance(function, functools.partial):
        partial = cast("functools.partial[object]", function)
        yield from ((f"argument {place}", one) for place, one in enumerate(partial.args))
        yield from partial.keywords.items()
        yield from held_by(partial.func)
    elif isinstance(function, FunctionType):
        yield from held_by_function(function)
    else:
        method = function if isinstance(function, MethodType) else getattr(function, "__call__", None)  # noqa: B004
        code = getattr(getattr(method, "__func__", None), "__code__", None)
        if isinstance(method, MethodType) and isinstance(code, CodeType):
            own = cast("dict[str, object]", getattr(method.__self__, "__dict__", {}))
            yield from ((name, own[name]) for name in _names_in(code) if name in own)
            yield from held_by(method.__func__)


def _names_in(code: CodeType) -> set[str]:
    inner = (one for one in code.co_consts if isinstance(one, CodeType))
    return set(code.co_names).union(*map(_names_in, inner))


def is_iterator(value: object) -> bool:
    """Return whether a value is used up by iteration."""
    # A file is one too; steps write to theirs.
    return hasattr(type(value), "__next__") and not isinstance(value, io.IOBase)
