"""Torch's profiler: the lines that it and the allocators write to stderr, and a notice before a user starts one.

Three kinds of lines, each stopped where it is made, so that everything else gets through:

    USDT:... profiler_start       at each start and each stop, above the level of errors: only a level that also stops
                                  errors would stop it. So the output during these two calls is filtered.
    ERROR:... gpuGetDeviceCount   at the first start, from a torch built for CUDA on a machine without a device; nothing
                                  is wrong there.
    W... CPUAllocator.cpp:...     a warning for frees of older memory; code that records drops these frees by itself.
                                  Meanwhile the level of torch's own log is at errors.
"""

from __future__ import annotations

import ctypes
import os
import re
import tempfile
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import IO, Any

import torch
from torch.autograd import profiler

from torchremat._compat.binding import overridden, private

_NOISE = re.compile(rb"USDT:.*\bprofiler_(start|stop)\s*|ERROR:.*\bgpuGetDeviceCount failed with code \d+\s*")
_STDERR = 2
_ERRORS = 2  # of torch's log: 0 is information, 1 a warning


def _level_of_log() -> ctypes.c_int | None:
    """Return the variable with the lowest level that torch's log writes; None if it is not accessible."""
    for path in sorted(Path(torch.__file__).parent.glob("lib/*c10.*")):
        with suppress(OSError, ValueError):
            return ctypes.c_int.in_dll(ctypes.CDLL(str(path)), "FLAGS_caffe2_log_level")
    return None


_level = _level_of_log()


@contextmanager
def errors_alone() -> Generator[None]:
    """Keep warnings of torch's C++ log from stderr during a block; its errors are written."""
    if _level is None:
        yield
        return
    before = _level.value
    _level.value = max(before, _ERRORS)
    try:
        yield
    finally:
        _level.value = before


@contextmanager
def profiler_silenced() -> Generator[None]:
    """Keep the profiler's own lines from stderr during a block, which must be short.

    All other output in the block, by other threads too, appears when it ends.
    """
    try:
        real, caught = os.dup(_STDERR), tempfile.TemporaryFile()  # noqa: SIM115  closed below
    except OSError:  # stderr does not exist, or no room is left for a file
        yield
        return
    with caught:
        os.dup2(caught.fileno(), _STDERR)
        try:
            yield
        finally:
            os.dup2(real, _STDERR)
            os.close(real)
            _pass_on(caught)


def _pass_on(caught: IO[bytes]) -> None:
    caught.seek(0)
    lines = [line for line in caught.read().splitlines(keepends=True) if not _NOISE.fullmatch(line)]
    if lines:
        with suppress(OSError):
            os.write(_STDERR, b"".join(lines))


# Every torch profiler begins with one of these, in Python: the first warms one up, the second starts it.
_STARTS = ("_prepare_profiler", "_enable_profiler")
for _name in _STARTS:
    private(f"autograd.profiler.{_name}", needed_for="measuring steps under a plan")


def before_profilers(told: Callable[[], None]) -> AbstractContextManager[None]:
    """Return a context in which a function is called before any thread starts or warms up a torch profiler."""
    return overridden([profiler], **{name: partial(_told, told, vars(profiler)[name]) for name in _STARTS})


def _told(told: Callable[[], None], start: Callable[..., object], /, *args: Any, **kwargs: Any) -> object:
    told()
    return start(*args, **kwargs)
