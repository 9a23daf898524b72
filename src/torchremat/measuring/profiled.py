"""Allocations of the CPU, recorded by torch's own profiler.

It is the only access to the CPU's allocator: it sees temporaries inside kernels and allocations of compiled code, which
no dispatch mode does. Only memory events and marks are recorded, no operators.

Missing on purpose, since torch does not report it: allocations in the user's own threads (autograd's threads are seen),
and frees of memory that was allocated before the block.

torch's messages about it on stderr are suppressed, see `_compat.profiler`; errors are not.
"""

# NOTE [ Frees of foreign memory ]
#
# A free counts only if the block has seen the allocation. Torch knows a pointer's size only from a table that is
# written while a profiler runs. So for memory that was allocated before the block
#
#   1. usually no event exists at all;
#   2. if an earlier profiler saw this address allocated, but not freed, and the address was given out again since,
#      an event exists, with the size of the dead allocation.
#
# Nothing in the event tells 2 from an honest free, so all of them are dropped.
#
# The mirror image is an allocation at an address that is still in use: its free went unseen (in a user's thread), so
# the old one ends where the new one starts.

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import ExitStack, contextmanager, suppress
from threading import Event, Lock, get_ident
from weakref import WeakMethod

import numpy as np
import torch
from numpy.typing import NDArray

from torchremat._compat.autograd import current_graph_task
from torchremat._compat.gloo import settled_collectives
from torchremat._compat.profiler import (
    ALLOCATION,
    MEMORY,
    ProfilerEvent,
    a_profiler_runs,
    before_profilers,
    emit,
    errors_alone,
    may_warm_up,
    start_profiler,
    stop_profiler,
)
from torchremat.errors import UnsupportedError
from torchremat.measuring.interrupts import uninterrupted
from torchremat.measuring.traces import AllocationRecorder, AllocationTrace, TraceMark

_MARK = "torchremat.mark:"
_BLOCK = -1  # the id of the mark that shows whether the profiler was ours to the end
_CALL = "torchremat.call"  # before a collective, and after it


class ProfilerRecorder(AllocationRecorder):
    """See `AllocationRecorder`."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._marked: dict[int, tuple[str, int]] = {}

    def mark(self, label: str) -> int:
        """See `AllocationRecorder`. About 3 microseconds; from any thread.

        The position is exact in the thread of the block and in autograd's. Other threads are not watched: there the
        wall clock gives the position, which may be off by the events of a few microseconds.
        """
        mark = next(self._ids)
        self._marked[mark] = (label, time.time_ns())
        # An object that an error keeps alive may mark its end late, in the block of another recorder with its own ids.
        if not self._has_ended:
            emit(f"{_MARK}{mark}")
        return mark

    def _finish(self, roots: Iterable[ProfilerEvent]) -> None:
        """Build the trace from the profiler's events."""
        # Each attribute of an event is a C++ call, and events are many: read once, as numbers alone, since a tuple for
        # each would call the collector. A stack instead of recursion, since trees are as deep as the calls. Parents
        # first, so that equal times keep their order.
        raw, marked_ns, calls = list[int](), dict[int, int](), list[int]()
        waiting, device, begins = [*roots][::-1], self.device, len(_MARK)
        is_alone = torch.accelerator.current_accelerator() is None  # then each allocation is the CPU's
        while waiting:
            node = waiting.pop()
            name = node.name
            if name == MEMORY:
                one = node.extra_fields
                # Else an event that only shares the name.
                if type(one) is ALLOCATION and (is_alone or one.device == device):
                    raw += (node.start_time_ns, one.ptr, one.alloc_size)
            elif name.startswith(_MARK):
                marked_ns[int(name[begins:])] = node.start_time_ns
            else:
                if name == _CALL:
                    calls.append(node.start_time_ns)
                waiting += node.children[::-1]
        if _BLOCK not in marked_ns:
            raise UnsupportedError(
                "the block started a profiler of its own, which took the place of the one that records allocations. "
                "Take the profiler out of the step."
            )
        columns = _matched(np.array(raw, np.int64).reshape(-1, 3), calls=sorted(calls))
        marked = [(label, marked_ns.get(mark, wall_ns)) for mark, (label, wall_ns) in sorted(self._marked.items())]
        positions = np.searchsorted(columns[:, 0], [time_ns for _, time_ns in marked]).tolist()
        marks = [
            TraceMark(mark, label, time_ns, position)
            for mark, ((label, time_ns), position) in enumerate(zip(marked, positions, strict=True))
        ]
        self._trace = AllocationTrace.of(self.device, columns, marks)


# Held while a block is recorded. torch crashes if a second thread starts a profiler, and reports the first one only in
# the thread that started it.
_recording = Lock()

# Callbacks that end a recording in passing before another recording starts. See `Glance`.
_in_passing: list[WeakMethod[Callable[[], None]]] = []

# Another thread waits this long for a recording to end before it starts its own: torch crashes if two threads record.
_PATIENCE_S = 10.0


@contextmanager
def recorded_by_profiler(device: torch.device, *, is_free: bool = False) -> Generator[ProfilerRecorder]:
    """Record the CPU's allocations and frees during the block.

    Args:
        device: The CPU.
        is_free: Whether the caller knows that no profiler is active; the check is slow.

    Raises:
        UnsupportedError: A profiler is active, and a second one would empty it; or the block itself started one; or
            another thread records.
    """
    if not is_free:
        check_no_profiler()
    if not _recording.acquire(blocking=False):  # another thread records
        raise _active()
    try:
        yield from _recorded(device)
    finally:
        _recording.release()


def _recorded(device: torch.device) -> Generator[ProfilerRecorder]:
    recorder = ProfilerRecorder(device)
    try:
        with uninterrupted():  # an interrupt in the middle would leave it unknown whether a profiler has to be stopped
            start_profiler()
        emit(f"{_MARK}{_BLOCK}")
        with errors_alone(), settled_collectives(_call):
            yield recorder
    finally:
        with uninterrupted():
            recorder._has_ended = True
            events = stop_profiler() if a_profiler_runs() else ()
    recorder._finish(events)


class Glance:
    """A recording that begins in one place, ends in another, in the thread that makes it, and yields to any other.

    It records the user's own steps. The code that runs them does not know of it and may start a profiler or a
    measurement at any time: then the recording ends without a result. Dropping it ends it.

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
        if _in_passing:
            raise UnsupportedError("another step is recorded")
        self.recorder: ProfilerRecorder = self._stack.enter_context(recorded_by_profiler(device, is_free=is_free))
        gives_way = WeakMethod(self.give_way)
        _in_passing.append(gives_way)
        self._stack.callback(_in_passing.remove, gives_way)
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


def profiler_is_active() -> bool:
    """Return whether a profiler runs in this process: torch.profiler, autograd's, a legacy one, NVTX or ITT emission.

    One that is warming up (`torch.profiler.schedule`) counts, and so does a block that another thread records: a second
    profiler then crashes the process. A recording in passing gives way.
    """
    for one in tuple(_in_passing):
        if (end := one()) is not None:
            end()
    if _recording.locked() or a_profiler_runs():
        return True
    # torch keeps no flag for the warm-up; only the profiler object shows it: entered, and without results. An object
    # refers to its type, so this finds all of them; the whole heap is searched, in tens of milliseconds, where a
    # profiler with a schedule has been made and not been left.
    if not may_warm_up():
        return False
    kind = torch.autograd.profiler.profile
    profilers = (thing for thing in gc.get_referrers(kind) if type(thing) is kind)
    return any(getattr(thing, "entered", False) and thing.kineto_results is None for thing in profilers)


def check_no_profiler() -> None:
    """Raise an error if a profiler is active.

    Raises:
        UnsupportedError: One is.
    """
    if profiler_is_active():
        raise _active()


def _active() -> UnsupportedError:
    return UnsupportedError(
        "a profiler is active, and torch runs one at a time: a second one would leave the first without events. "
        "Record allocations outside of it; plan and measure in one thread at a time."
    )


@contextmanager
def _call() -> Generator[None]:
    emit(_CALL)
    try:
        yield
    finally:
        emit(_CALL)


def _matched(events: NDArray[np.int64], *, calls: Sequence[int] = ()) -> NDArray[np.int64]:
    """Return the events that can be trusted, in order. See NOTE [ Frees of foreign memory ].

    Args:
        events: Each a row of its time, address and bytes.
        calls: Start and end times of collectives, alternating. See NOTE [ Who frees what gloo has worked on ].
    """
    rows = events[np.argsort(events[:, 0], kind="stable")]
    order = np.argsort(rows[:, 1], kind="stable")
    born, following = rows[order], np.roll(order, -1)
    is_last = born[:, 1] != np.roll(born[:, 1], -1)
    is_last[-1:] = True
    # What comes next at the address of an allocation ends it, whether it is a free or another allocation.
    ends_ns, is_seen = rows[following, 0], ~is_last & (rows[following, 2] <= 0)
    ends = np.append(np.array(calls, np.int64), 0)
    place = np.searchsorted(ends[:-1], born[:, 0], "right")
    is_called = ~is_seen & (place % 2 == 1)
    freed = np.stack([np.where(is_called, ends[place], ends_ns), born[:, 1], -born[:, 2]], 1)
    # Of equal times a free comes before an allocation.
    frees = np.where(is_last, len(rows) + order, following)
    is_born = born[:, 2] > 0
    is_freed = is_born & (~is_last | is_called)
    found = np.concatenate([freed[is_freed], born[is_born]])
    places = np.concatenate([2 * frees[is_freed], 2 * order[is_born] + 1])
    return found[np.lexsort([places, found[:, 0]])]
