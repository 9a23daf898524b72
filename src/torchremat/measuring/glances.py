"""A recording of the CPU's allocator that is begun in one place and ended in another, and gives way to any other.

Steps of the user's own are recorded by it. They are run by somebody who knows nothing of it, and who may start a
profiler at any moment, or measure something: then it ends and tells nothing.
"""

from __future__ import annotations

import threading
from contextlib import ExitStack, suppress
from threading import Event, get_ident
from weakref import WeakMethod

import torch

from torchremat._compat.autograd import current_graph_task
from torchremat._compat.profiler_starts import before_profilers
from torchremat.errors import UnsupportedError
from torchremat.measuring.profiled import ProfilerRecorder, in_passing, recorded_by_profiler
from torchremat.measuring.traces import AllocationTrace

# So long another thread waits until a recording is over before it starts its own: torch crashes where two do so.
_PATIENCE_S = 10.0


class Glance:
    """One such recording, in the thread that makes it. Dropping it ends it.

    Args:
        device: The CPU.
        is_free: Whether it is known that no profiler is active: another glance has just ended.

    Attributes:
        recorder: Takes marks.
        trace: What was recorded, when it has ended; None before, or if that is not known.
        is_wanted: Whether somebody has asked for its end, and records now.

    Raises:
        UnsupportedError: A profiler is active, or another recording.
    """

    def __init__(self, device: torch.device, *, is_free: bool = False) -> None:
        self._thread = get_ident()
        self._is_over = False
        self._over = Event()  # the same, when nothing is left of it
        self.trace: AllocationTrace | None = None
        self.is_wanted = False
        self._stack = ExitStack()
        if in_passing:
            raise UnsupportedError("another step is recorded")
        self.recorder: ProfilerRecorder = self._stack.enter_context(recorded_by_profiler(device, is_free=is_free))
        gives_way = WeakMethod(self.give_way)
        in_passing.append(gives_way)
        self._stack.callback(in_passing.remove, gives_way)
        self._stack.enter_context(before_profilers(lambda: None if (own := gives_way()) is None else own()))

    @property
    def is_over(self) -> bool:
        """Whether it has ended."""
        return self._is_over

    def end(self) -> None:
        """End it. It goes on in another thread that is alive, and in a backward, which would take its end back."""
        if not self._is_over and not self.is_elsewhere and current_graph_task() == -1:
            self._close()

    @property
    def is_elsewhere(self) -> bool:
        """Whether it goes on in another thread."""
        if self._is_over or get_ident() == self._thread:
            return False
        return any(one.ident == self._thread for one in threading.enumerate())

    def _close(self) -> None:
        self._is_over = True
        try:
            with suppress(UnsupportedError):  # a profiler was started past Python
                self._stack.close()
                self.trace = self.recorder.trace
        finally:
            self._over.set()

    def give_way(self) -> None:
        """End it, or wait for its end in another thread."""
        self.is_wanted = True
        self.end()
        if get_ident() != self._thread:
            self._over.wait(_PATIENCE_S)

    def __del__(self) -> None:
        if hasattr(self, "recorder") and not self._is_over:
            self._close()
