"""Notifies a running recording that a torch profiler is about to start."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch.autograd import profiler

from torchremat._compat.binding import private

# Every torch profiler begins with one of these, in Python: the first warms one up, the second starts it.
_STARTS = ("_prepare_profiler", "_enable_profiler")
for _name in _STARTS:
    private(f"autograd.profiler.{_name}", needed_for="measuring steps under a plan")


@contextmanager
def before_profilers(told: Callable[[], None]) -> Generator[None]:
    """While the block runs, call a function before any thread starts or warms up a torch profiler."""
    names = profiler.__dict__
    had = {name: names[name] for name in _STARTS}
    names.update({name: partial(_told, told, start) for name, start in had.items()})
    try:
        yield
    finally:
        names.update(had)


def _told(told: Callable[[], None], start: Callable[..., object], /, *args: Any, **kwargs: Any) -> object:
    told()
    return start(*args, **kwargs)
