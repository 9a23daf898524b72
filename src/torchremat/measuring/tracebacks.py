"""Errors of a user's step, shown as the plain step would show them: without our frames in between.

    error                                              frames of this package
    raised by the user's code, or by torch's for it    left out
    one of `errors.py`                                 left out: the message says it, and the caller's line is there
    anything else that is raised in here, or by
    NumPy or SciPy for us                              kept: it is a bug of ours

The same holds for an error's causes and contexts. With TORCHREMAT_FULL_TRACEBACKS=1 in the environment all frames are
kept.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from itertools import dropwhile
from types import TracebackType
from typing import ParamSpec, TypeVar

from torchremat.errors import TorchrematError
from torchremat.frames import OURS, steps_of

P = ParamSpec("P")
T = TypeVar("T")

_SWITCH = "TORCHREMAT_FULL_TRACEBACKS"


def without_our_frames(function: Callable[P, T]) -> Callable[P, T]:
    """Strip our frames from errors that leave a function of ours; see above."""

    @functools.wraps(function)
    def shown(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            if os.environ.get(_SWITCH, "0") in ("", "0"):
                for one in chain_of(error):
                    _shorten(one)
            raise

    return shown


def chain_of(error: BaseException) -> Iterator[BaseException]:
    """Yield an error with all its causes and contexts, each once."""
    pending: list[BaseException | None] = [error]
    seen: set[int] = set()
    while pending:
        one = pending.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            yield one
            pending += [one.__cause__, one.__context__]


def _shorten(error: BaseException) -> None:
    steps = list(steps_of(error.__traceback__))
    below = dropwhile(lambda step: _file(step).startswith(_NUMERIC), reversed(steps))
    if not steps or (_is_ours(next(below, steps[0])) and not isinstance(error, TorchrematError)):
        return
    rest: TracebackType | None = None
    for place in range(len(steps) - 1, -1, -1):
        step = steps[place]
        is_between = place > 0 and _file(step) == contextlib.__file__ and _is_ours(steps[place - 1])
        if not (_is_ours(step) or is_between):
            rest = TracebackType(rest, step.tb_frame, step.tb_lasti, step.tb_lineno)
    error.__traceback__ = rest


def _file(step: TracebackType) -> str:
    return step.tb_frame.f_code.co_filename


def _is_ours(step: TracebackType) -> bool:
    return _file(step).startswith(OURS)


# Where NumPy and SciPy are, which need not be imported for it.
_NUMERIC = tuple(
    place for name in ("numpy", "scipy") if (spec := find_spec(name)) for place in spec.submodule_search_locations or ()
)
