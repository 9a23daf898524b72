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
import time
from bisect import bisect_right
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from operator import itemgetter
from threading import Lock
from typing import cast
from weakref import WeakMethod

import numpy as np
import torch

from torchremat._compat.collectives import settled_collectives
from torchremat._compat.profiler import errors_alone
from torchremat.errors import UnsupportedError
from torchremat.measuring.bindings import (
    MEMORY,
    ProfilerEvent,
    a_profiler_runs,
    allocation_of,
    emit,
    may_warm_up,
    start_profiler,
    stop_profiler,
)
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
            _emit(mark)
        return mark

    def _finish(self, nodes: Iterable[ProfilerEvent]) -> None:
        """Build the trace from the profiler's events."""
        # Each attribute of an event is a C++ call, and events are many: read once.
        raw, marked_ns, calls = list[tuple[int, int, int]](), dict[int, int](), list[int]()
        for node in nodes:
            name = node.name
            if name == MEMORY:
                one = allocation_of(node)
                if one is not None and one.device == self.device:
                    raw.append((node.start_time_ns, one.ptr, one.alloc_size))
            elif name.startswith(_MARK):
                marked_ns[int(name.removeprefix(_MARK))] = node.start_time_ns
            elif name == _CALL:
                calls.append(node.start_time_ns)
        if _BLOCK not in marked_ns:
            raise UnsupportedError(
                "the block started a profiler of its own, which took the place of the one that records allocations. "
                "Take the profiler out of the step."
            )
        raw.sort(key=_time)
        columns = np.array(_matched(raw, calls=sorted(calls)), dtype=np.int64).reshape(-1, 3)
        times = columns[:, 0]
        marked = [(label, marked_ns.get(mark, wall_ns)) for mark, (label, wall_ns) in sorted(self._marked.items())]
        positions = np.searchsorted(times, [time_ns for _, time_ns in marked]).tolist()
        marks = [
            TraceMark(id=mark, label=label, time_ns=time_ns, position=position)
            for mark, ((label, time_ns), position) in enumerate(zip(marked, positions, strict=True))
        ]
        self._trace = AllocationTrace.of(self.device, columns, marks)


# Held while a block is recorded. torch crashes if a second thread starts a profiler, and reports the first one only in
# the thread that started it.
_recording = Lock()

# Callbacks that end a recording in passing before another recording starts. See `glances`.
in_passing: list[WeakMethod[Callable[[], None]]] = []


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
        _emit(_BLOCK)
        with errors_alone(), settled_collectives(_call):
            yield recorder
    finally:
        with uninterrupted():
            recorder._has_ended = True
            events = stop_profiler() if a_profiler_runs() else ()
    recorder._finish(_walk(events))


def profiler_is_active() -> bool:
    """Return whether a profiler runs in this process: torch.profiler, autograd's, a legacy one, NVTX or ITT emission.

    One that is warming up (`torch.profiler.schedule`) counts, and so does a block that another thread records: a second
    profiler then crashes the process. A recording in passing gives way.
    """
    for one in tuple(in_passing):
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


def _emit(mark: int) -> None:
    emit(f"{_MARK}{mark}")


@contextmanager
def _call() -> Generator[None]:
    emit(_CALL)
    try:
        yield
    finally:
        emit(_CALL)


def _walk(roots: Iterable[ProfilerEvent]) -> Iterator[ProfilerEvent]:
    # A stack instead of recursion, since trees are as deep as the calls. Parents first, so that equal times keep their
    # order.
    waiting = [*roots][::-1]
    while waiting:
        node = waiting.pop()
        yield node
        if node.name != MEMORY:
            waiting += node.children[::-1]


_time = cast("Callable[[tuple[int, int, int]], int]", itemgetter(0))


def _matched(events: Iterable[tuple[int, int, int]], *, calls: Sequence[int] = ()) -> list[tuple[int, int, int]]:
    """Return the events that can be trusted. See NOTE [ Frees of foreign memory ].

    Args:
        events: Time, address and bytes of each.
        calls: Start and end times of collectives, alternating. See NOTE [ Who frees what gloo has worked on ].
    """
    live: dict[int, tuple[int, int]] = {}
    kept: list[tuple[int, int, int]] = []
    for time_ns, ptr, delta in events:
        known = live.pop(ptr, None)
        if known is not None:
            born_ns, size = known
            ends_ns = _end_of_call(calls, born_ns) if delta > 0 else None
            kept.append((time_ns if ends_ns is None else ends_ns, ptr, -size))
        if delta > 0:
            live[ptr] = time_ns, delta
            kept.append((time_ns, ptr, delta))
    for ptr, (born_ns, size) in live.items():
        ends_ns = _end_of_call(calls, born_ns)
        if ends_ns is not None:
            kept.append((ends_ns, ptr, -size))
    return sorted(kept, key=_time)


def _end_of_call(calls: Sequence[int], time_ns: int) -> int | None:
    """Return the end of the call that was running at a time, or None if none was."""
    place = bisect_right(calls, time_ns)
    return calls[place] if place % 2 else None
