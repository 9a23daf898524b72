"""A recording of the CPU's allocator that begins in one place, ends in another, and yields to any other recording.

It records the user's own steps. The code that runs them does not know of it and may start a profiler or a measurement
at any time: then the recording ends without a result.
"""

from __future__ import annotations

import threading
from contextlib import ExitStack, suppress
from threading import Event, get_ident
from weakref import WeakMethod

import torch

from torchremat._compat.autograd import current_graph_task
from torchremat._compat.profiler import before_profilers
from torchremat.errors import UnsupportedError
from torchremat.measuring.profiled import ProfilerRecorder, in_passing, recorded_by_profiler
from torchremat.measuring.traces import AllocationTrace

# Another thread waits this long for a recording to end before it starts its own: torch crashes if two threads record.
_PATIENCE_S = 10.0


class Glance:
    """One such recording, in the thread that makes it. Dropping it ends it.

    Args:
        device: The CPU.
        is_free: Whether the caller knows that no profiler is active: another glance has just ended.

    Attributes:
        recorder: Takes marks.
        trace: The recorded trace, once it has ended; None before, or if it is not known.
        is_wanted: Whether another recording has asked for its end, and records now.

    Raises:
        UnsupportedError: A profiler is active, or another recording.
    """

    def __init__(self, device: torch.device, *, is_free: bool = False) -> None:
        self._thread = get_ident()
        self._is_over = False
        self._over = Event()  # set once the recording is closed
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
        """End it. A no-op while it runs in another live thread, and in a backward, which would undo the end."""
        if not self._is_over and not self.is_elsewhere and current_graph_task() == -1:
            self._close()

    @property
    def is_elsewhere(self) -> bool:
        """Whether it runs in another thread."""
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
