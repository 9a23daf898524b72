"""Torch's profiler: started for memory events alone, silenced, and a notice before a user starts one.

It and the allocators write three kinds of lines to stderr, each stopped where it is made, so that everything else gets
through:

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
from collections.abc import Callable, Generator, Iterable
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import IO, Any, Protocol

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


class ProfilerEvent(Protocol):
    """A node of the profiler's event tree."""

    name: str
    start_time_ns: int
    children: list[ProfilerEvent]
    extra_fields: object


class Allocation(Protocol):
    """An allocator's record: `alloc_size` bytes at `ptr`, negative for a free."""

    ptr: int
    alloc_size: int
    device: torch.device


class _Results(Protocol):
    def experimental_event_tree(self) -> list[ProfilerEvent]: ...


_bind = partial(private, needed_for="measuring live bytes")
MEMORY = "[memory]"  # the name of the events that carry an `Allocation`
ALLOCATION: type[Allocation] = _bind("_C._profiler._ExtraFields_Allocation")
_CPU: object = _bind("_C._profiler.ProfilerActivity.CPU")
_KINETO: object = _bind("_C._profiler.ProfilerState.KINETO")
_USER_SCOPE: object = _bind("_C._profiler.RecordScope.USER_SCOPE")
_profiler_config: Callable[..., object] = _bind("_C._profiler.ProfilerConfig")
_experimental_config: Callable[[], object] = _bind("_C._profiler._ExperimentalConfig")
_prepare_profiler: Callable[[object, set[object]], None] = _bind("_C._autograd._prepare_profiler")
_enable_profiler: Callable[[object, set[object], set[object]], None] = _bind("_C._autograd._enable_profiler")
_disable_profiler: Callable[[], _Results] = _bind("_C._autograd._disable_profiler")
_profiler_enabled: Callable[[], bool] = _bind("_C._autograd._profiler_enabled")
_STEPS: str = _bind("profiler.profiler.PROFILER_STEP_NAME")
_enter_record: Callable[[str], object] = _bind("_C._autograd._record_function_with_args_enter")
_exit_record: Callable[[object], None] = _bind("_C._autograd._record_function_with_args_exit")


def start_profiler() -> None:
    """Start torch's profiler for memory events and `emit` alone.

    `torch.profiler.profile` would record every operator as well: on a small model that doubles the time of a step, and
    its `record_function` costs four times what `emit` does.
    """
    config = _profiler_config(
        _KINETO,
        False,  # shapes
        True,  # memory
        False,  # stacks
        False,  # flops
        False,  # modules
        _experimental_config(),
    )
    # CUDA's allocator reports through the CPU activity as well; the CUDA activity is about kernels, and slow.
    activities = {_CPU}
    with profiler_silenced():
        _prepare_profiler(config, activities)
        # Memory events come in any scope; this one keeps operators out, and `emit` in.
        _enable_profiler(config, activities, {_USER_SCOPE})


def stop_profiler() -> Iterable[ProfilerEvent]:
    """Stop torch's profiler and return the roots of its event trees; none if another one took its place."""
    with profiler_silenced():
        return _disable_profiler().experimental_event_tree()


def emit(name: str) -> None:
    """Put an event with this name into the profiler of the thread; a no-op where none runs."""
    _exit_record(_enter_record(name))


def a_profiler_runs() -> bool:
    """Return whether a profiler of any kind records in this thread, or torch.profiler in any other."""
    anywhere = _bind("autograd.profiler._is_profiler_enabled")  # a variable, so read now
    return _profiler_enabled() or bool(anywhere)


def may_warm_up() -> bool:
    """Return whether a `torch.profiler.profile` may be warming up: each counts its steps here from when it is made."""
    steps: dict[str, int] = _bind("autograd.profiler.KinetoStepTracker._step_dict")
    return _STEPS in steps


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
