"""The private names of torch that measuring needs, bound once and typed.

The lookup happens when this file is imported, so that a torch without one of them raises an error with its name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Protocol

import torch

from torchremat._compat.binding import private
from torchremat._compat.profiler import profiler_silenced


class ProfilerEvent(Protocol):
    """A node of the profiler's event tree."""

    @property
    def name(self) -> str: ...  # noqa: D102  as torch's
    @property
    def start_time_ns(self) -> int: ...  # noqa: D102  as torch's
    @property
    def children(self) -> list[ProfilerEvent]: ...  # noqa: D102  as torch's
    @property
    def extra_fields(self) -> object: ...  # noqa: D102  as torch's


class Allocation(Protocol):
    """An allocator's record: `alloc_size` bytes at `ptr`, negative for a free."""

    @property
    def ptr(self) -> int: ...  # noqa: D102  as torch's
    @property
    def alloc_size(self) -> int: ...  # noqa: D102  as torch's
    @property
    def device(self) -> torch.device: ...  # noqa: D102  as torch's


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
