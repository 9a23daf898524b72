"""Finds the custom Function that saves a tensor.

Up to torch 2.13 its `apply` had a Python frame, from 2.14 on it has none, so a Function is identified by a call that
every version makes: `ctx.save_for_backward`.
"""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast
from weakref import ReferenceType, ref

from torch.autograd.function import BackwardCFunction, FunctionCtx

# NOTE [ A Function that saves ]
# The tensors that a Function passes to `save_for_backward` are saved when its forward has returned. Until then the
# context has them in `to_save`; from then on the node holds them. A Function without grad saves nothing, and its
# context is gone. So the Function that saves is the last one that has called, is alive, has nothing in `to_save`, and
# has not saved all of it yet. Contexts are held weakly, so that nothing lives longer for it.


@dataclass(slots=True)
class _Called:
    """A call of `save_for_backward`: its Function, and how many of its tensors have not been saved yet."""

    context: ReferenceType[Any]
    name: str
    left: int


@dataclass  # slots would be the same in all threads
class _RunningCalls(threading.local):
    """The calls of this thread whose tensors are not all saved, innermost last."""

    open: list[_Called] = field(default_factory=list[_Called])

    def settle(self) -> None:
        """Forget the innermost calls that are done."""
        while self.open and (self.open[-1].context() is None or not self.open[-1].left):
            self.open.pop()


_calls = _RunningCalls()
_watchers = 0
_lock = threading.Lock()
_save_for_backward = FunctionCtx.save_for_backward


def _noting(self: FunctionCtx, *tensors: object) -> None:
    cast("Any", _save_for_backward)(self, *tensors)
    if isinstance(self, BackwardCFunction):  # not the stand-in for a context while code is traced
        _calls.settle()
        name = cast("type", cast("Any", self)._forward_cls).__name__
        _calls.open.append(_Called(ref(self), name, sum(one is not None for one in tensors)))


@contextmanager
def noted_functions() -> Generator[None]:
    """Let `saving_function` track the custom Functions that are called in the block, in any thread."""
    global _watchers
    with _lock:
        _watchers += 1
        FunctionCtx.save_for_backward = _noting
    try:
        yield
    finally:
        with _lock:
            _watchers -= 1
            if not _watchers:
                FunctionCtx.save_for_backward = _save_for_backward
        _calls.settle()


def saving_function() -> str | None:
    """Return the name of the custom Function that is saving a tensor now, None if none is.

    Call it in `noted_functions()`, once for each tensor that is saved.
    """
    _calls.settle()  # See NOTE [ A Function that saves ]
    called = _calls.open[-1] if _calls.open else None
    context = called.context() if called is not None else None
    if called is None or context is None or context.to_save is not None:
        return None
    called.left -= 1
    return called.name
