"""The private names of torch that measuring needs, bound once and typed.

The lookup happens when this file is imported, so that a torch without one of them raises an error with its name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol, cast

import torch

from torchremat._compat.binding import private
from torchremat._compat.profiler import profiler_silenced

_MEASURING = "measuring live bytes"


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


MEMORY = "[memory]"  # the name of the events that carry an `Allocation`
_ALLOCATION = cast("type[object]", private("_C._profiler._ExtraFields_Allocation", needed_for=_MEASURING))
_CPU: object = private("_C._profiler.ProfilerActivity.CPU", needed_for=_MEASURING)
_KINETO: object = private("_C._profiler.ProfilerState.KINETO", needed_for=_MEASURING)
_USER_SCOPE: object = private("_C._profiler.RecordScope.USER_SCOPE", needed_for=_MEASURING)
_profiler_config = cast("Callable[..., object]", private("_C._profiler.ProfilerConfig", needed_for=_MEASURING))
_experimental_config = cast("Callable[[], object]", private("_C._profiler._ExperimentalConfig", needed_for=_MEASURING))
_prepare_profiler = cast(
    "Callable[[object, set[object]], None]",
    private("_C._autograd._prepare_profiler", needed_for=_MEASURING),
)
_enable_profiler = cast(
    "Callable[[object, set[object], set[object]], None]",
    private("_C._autograd._enable_profiler", needed_for=_MEASURING),
)
_disable_profiler = cast("Callable[[], _Results]", private("_C._autograd._disable_profiler", needed_for=_MEASURING))
_profiler_enabled = cast("Callable[[], bool]", private("_C._autograd._profiler_enabled", needed_for=_MEASURING))
_STEPS = private("profiler.profiler.PROFILER_STEP_NAME", needed_for=_MEASURING)
_enter_record = cast(
    "Callable[[str], object]", private("_C._autograd._record_function_with_args_enter", needed_for=_MEASURING)
)
_exit_record = cast(
    "Callable[[object], None]", private("_C._autograd._record_function_with_args_exit", needed_for=_MEASURING)
)


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


def allocation_of(event: ProfilerEvent) -> Allocation | None:
    """Return an event's allocator record; None for an event that only shares the name of such events."""
    fields = event.extra_fields
    return cast(Allocation, fields) if isinstance(fields, _ALLOCATION) else None


def emit(name: str) -> None:
    """Put an event with this name into the profiler of the thread; a no-op where none runs."""
    _exit_record(_enter_record(name))


def a_profiler_runs() -> bool:
    """Return whether a profiler of any kind records in this thread, or torch.profiler in any other."""
    anywhere = private("autograd.profiler._is_profiler_enabled", needed_for=_MEASURING)  # a variable, so read now
    return _profiler_enabled() or bool(anywhere)


def may_warm_up() -> bool:
    """Return whether a `torch.profiler.profile` may be warming up: each counts its steps here from when it is made."""
    steps = cast("dict[str, int]", private("autograd.profiler.KinetoStepTracker._step_dict", needed_for=_MEASURING))
    return _STEPS in steps
