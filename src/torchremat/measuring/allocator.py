"""What the allocator of a device did during a block of code: each allocation and free, in order, with marks between.

The events come from torch's own profiler, the only door to the CPU allocator: it sees temporaries inside kernels and
what compiled code allocates, which no dispatch mode does. Only memory events and marks are recorded, no operators.

Missing on purpose, since torch does not report it: what threads of the user's own allocate (autograd's threads are
seen), and, on the CPU, frees of memory that was allocated before the block.

torch writes "profiler_start" and "profiler_stop" to stderr each time. Only KINETO_LOG_LEVEL=6 in the environment of
the process stops it, and then real errors of later profilers are silent too; so whoever owns the process decides.
"""

# NOTE [ Frees of foreign memory ]
#
# A free counts only if the block has seen the allocation. On the CPU torch knows a pointer's size from a table that is
# written while a profiler runs, and by nothing else. So for memory that was allocated before the block
#
#   1. usually there is no event at all;
#   2. if an earlier profiler saw this address allocated, but not freed, and the address was given out again since,
#      there is an event, and its size is that of the dead allocation.
#
# Nothing in the event tells 2 from an honest free, so on the CPU all of them are dropped. A CUDA block knows its own
# size: there the free is counted.
#
# The mirror image is an allocation at an address that is still taken: its free went unseen (in a thread of the
# user's), so the old one ends where the new one starts.

from __future__ import annotations

import gc
import itertools
import time
from bisect import bisect_right
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from threading import Lock
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import UntypedStorage

from torchremat._compat.collectives import settled_collectives
from torchremat.errors import UnsupportedError
from torchremat.measuring.bindings import (
    MEMORY,
    Allocation,
    ProfilerEvent,
    a_profiler_runs,
    allocation_of,
    emit,
    start_profiler,
    stop_profiler,
)
from torchremat.measuring.interrupts import uninterrupted

_MARK = "torchremat.mark:"
_BLOCK = -1  # the id of the mark that tells whether the profiler was ours to the end
_CALL = "torchremat.call"  # before a collective, and after it


@dataclass(frozen=True, kw_only=True)
class Mark:
    """A moment between two events of a trace.

    `position` is the index of the first event after it, or the number of events if there is none. `time_ns` is on the
    clock of the trace (nanoseconds since 1970).
    """

    id: int
    label: str
    time_ns: int
    position: int


@dataclass(frozen=True, kw_only=True, eq=False)
class AllocationTrace:
    """The events of one device's allocator in order of time: three arrays of one length, and the marks.

    `delta_bytes` is positive for an allocation and negative for its free. `marks[i]` is the mark with the id i.
    `foreign_freed_bytes` is what was freed but allocated before the block; None on the CPU, where nobody can know it.
    """

    device: torch.device
    start_ns: int
    time_ns: NDArray[np.int64]
    ptr: NDArray[np.int64]
    delta_bytes: NDArray[np.int64]
    marks: tuple[Mark, ...]
    foreign_freed_bytes: int | None

    @cached_property
    def _live_bytes(self) -> NDArray[np.int64]:
        # With the start of the block in front, so that entry p is what is live before event p.
        return np.concatenate([np.zeros(1, np.int64), np.cumsum(self.delta_bytes, dtype=np.int64)])

    def live_bytes(self) -> NDArray[np.int64]:
        """Return the bytes live after each event, relative to the start; negative where foreign memory went."""
        return self._live_bytes[1:].copy()

    def live_bytes_at(self, mark: int) -> int:
        """Return the bytes live at the mark with this id, relative to the start of the block."""
        return int(self._live_bytes[self.marks[mark].position])

    @property
    def peak_bytes(self) -> int:
        """The most bytes live at once, relative to the start of the block; at least 0."""
        return int(self._live_bytes.max())

    def peak_bytes_between(self, first: int, last: int) -> int:
        """Return the most bytes live at once between two marks, given by id in order of time, relative to the start.

        What is live at the first mark counts too.
        """
        begin, end = self.marks[first].position, self.marks[last].position
        return int(self._live_bytes[begin : end + 1].max())

    def has(self, pointer: int, mark: int) -> bool:
        """Return whether an address lies, at the mark with this id, in memory that was allocated in the block."""
        end = self.marks[mark].position
        # Whatever is live at one time does not overlap, so the last event there tells.
        there = (self.ptr[:end] <= pointer) & (pointer < self.ptr[:end] + np.abs(self.delta_bytes[:end]))
        deltas = self.delta_bytes[:end][there]
        return len(deltas) > 0 and bool(deltas[-1] > 0)


class Recorder(Protocol):
    """Takes marks while a block runs, has the `trace` afterwards; of this machine, or simulated."""

    def mark(self, label: str) -> int:
        """Mark this moment and return the mark's id: 0, 1, 2, ..."""
        ...

    def seconds(self) -> float:
        """Return the time now."""
        ...

    def pointer_of(self, storage: UntypedStorage) -> int:
        """Return the address that a storage has in the trace."""
        ...

    @property
    def trace(self) -> AllocationTrace:
        """The events of the block."""
        ...


class AllocationRecorder:
    """Takes marks while the block runs, has the `trace` afterwards. Made by `record_allocations`."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._ids = itertools.count()  # next() on it is atomic, so two threads get two ids
        self._marked: dict[int, tuple[str, int]] = {}
        self._trace: AllocationTrace | None = None
        self._has_ended = False

    def mark(self, label: str) -> int:
        """Mark this moment and return the mark's id: 0, 1, 2, ... About 3 microseconds; from any thread.

        The position is exact in the thread of the block and in autograd's. Other threads are not watched: there it is
        found by the wall clock, and may be off by the events of a few microseconds.
        """
        mark = next(self._ids)
        self._marked[mark] = (label, time.time_ns())
        # What an error keeps alive may mark its end late, in the block of another recorder with ids of its own.
        if not self._has_ended:
            _emit(mark)
        return mark

    def seconds(self) -> float:
        """See `Recorder`."""
        return time.perf_counter()

    def pointer_of(self, storage: UntypedStorage) -> int:
        """See `Recorder`; 0 for a storage without memory."""
        return 0 if storage.device.type == "meta" else storage.data_ptr()

    @property
    def trace(self) -> AllocationTrace:
        """The events of the block.

        Raises:
            UnsupportedError: The block has not ended, or it ended with an error.
        """
        if self._trace is None:
            raise UnsupportedError("there is no trace yet: it is made when the block of record_allocations ends.")
        return self._trace

    def _finish(self, nodes: Iterable[ProfilerEvent], start_ns: int) -> None:
        """Make the trace of the profiler's events."""
        # Each attribute of an event is a call of C++, and events are many: read once.
        seen = sorted(((node.start_time_ns, node.name, node) for node in nodes), key=lambda one: one[0])
        marked_ns = {int(name.removeprefix(_MARK)): time_ns for time_ns, name, _ in seen if name.startswith(_MARK)}
        if _BLOCK not in marked_ns:
            raise UnsupportedError(
                "the block started a profiler of its own, which took the place of the one that records allocations. "
                "Take the profiler out of the step."
            )
        said = ((time_ns, allocation_of(node)) for time_ns, name, node in seen if name == MEMORY)
        raw, calls = _raw_events(said, self.device), [time_ns for time_ns, name, _ in seen if name == _CALL]
        events, foreign_freed_bytes = _matched(raw, calls=calls, keep_foreign=self.device.type == "cuda")
        columns = np.array(events, dtype=np.int64).reshape(-1, 3)
        times = columns[:, 0]
        marked = [(label, marked_ns.get(mark, wall_ns)) for mark, (label, wall_ns) in sorted(self._marked.items())]
        positions = np.searchsorted(times, [time_ns for _, time_ns in marked]).tolist()
        marks = [
            Mark(id=mark, label=label, time_ns=time_ns, position=position)
            for mark, ((label, time_ns), position) in enumerate(zip(marked, positions, strict=True))
        ]
        self._trace = AllocationTrace(
            device=self.device,
            start_ns=start_ns,
            time_ns=times,
            ptr=columns[:, 1],
            delta_bytes=columns[:, 2],
            marks=tuple(marks),
            foreign_freed_bytes=foreign_freed_bytes if self.device.type == "cuda" else None,
        )


# Held while a block is recorded. torch crashes where a second thread starts a profiler, and tells of the first one only
# in the thread that has started it.
_recording = Lock()


@contextmanager
def record_allocations(device: torch.device) -> Generator[AllocationRecorder]:
    """Record what the allocator of `device` does during the block.

    The recorder that it gives takes marks; its `trace` is there after the block. An error in the block goes through,
    and the profiler is closed.

    Args:
        device: A CPU or CUDA device; one without an index is the current one.

    Raises:
        UnsupportedError: A profiler is active, and a second one would empty it; or the block itself started one; or
            another thread records; or the device has no such events.
    """
    if device.type not in ("cpu", "cuda"):
        raise UnsupportedError(f"allocations can be recorded on cpu and cuda, not on {device}.")
    check_no_profiler()
    if not _recording.acquire(blocking=False):  # another thread was faster
        raise _active()
    try:
        yield from _recorded(device)
    finally:
        _recording.release()


def _recorded(device: torch.device) -> Generator[AllocationRecorder]:
    device = torch.empty(0, device=device).device  # as events name it: a GPU with its index, the CPU without
    recorder = AllocationRecorder(device)
    start_ns = time.time_ns()
    try:
        with uninterrupted():  # in the midst of it, nobody could say whether there is one to stop
            start_profiler()
        _emit(_BLOCK)
        with settled_collectives(_call) if device.type == "cpu" else nullcontext():
            yield recorder
    finally:
        with uninterrupted():
            recorder._has_ended = True
            events = stop_profiler() if a_profiler_runs() else ()
    recorder._finish(_walk(events), start_ns)


def profiler_is_active() -> bool:
    """Return whether a profiler runs in this process: torch.profiler, autograd's, a legacy one, NVTX or ITT emission.

    One that is warming up (`torch.profiler.schedule`) counts, and so does a block that another thread records: a second
    profiler then crashes the process.
    """
    if _recording.locked() or a_profiler_runs():
        return True
    # torch keeps no flag for the warm-up, only the profiler object itself knows. It has entered, and has no results.
    # An object refers to its type, so this finds all of them; the whole heap is searched, in tens of milliseconds.
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
    # A stack and no recursion, for trees are as deep as the calls. Parents first, so that equal times keep their order.
    waiting = [*roots][::-1]
    while waiting:
        node = waiting.pop()
        yield node
        waiting += node.children[::-1]


def _raw_events(said: Iterable[tuple[int, Allocation | None]], device: torch.device) -> Iterator[tuple[int, int, int]]:
    """Yield (time_ns, ptr, delta_bytes) of each allocation or free on `device`."""
    for time_ns, allocation in said:
        if allocation is not None and allocation.device == device:
            yield time_ns, allocation.ptr, allocation.alloc_size


def _matched(
    events: Iterable[tuple[int, int, int]], *, keep_foreign: bool, calls: Sequence[int] = ()
) -> tuple[list[tuple[int, int, int]], int]:
    """Return the events that can be trusted, and the bytes of foreign frees. See NOTE [ Frees of foreign memory ].

    Args:
        events: Time, address and bytes of each.
        keep_foreign: Whether foreign frees are trusted.
        calls: When collectives began and ended, in turn. See NOTE [ Who frees what gloo has worked on ].
    """
    live: dict[int, tuple[int, int]] = {}
    kept: list[tuple[int, int, int]] = []
    foreign_freed_bytes = 0
    for time_ns, ptr, delta in events:
        known = live.pop(ptr, None)
        if known is not None:
            born_ns, size = known
            ends_ns = _end_of_call(calls, born_ns) if delta > 0 else None
            kept.append((time_ns if ends_ns is None else ends_ns, ptr, -size))
        elif delta < 0:
            foreign_freed_bytes -= delta
            if keep_foreign:
                kept.append((time_ns, ptr, delta))
        if delta > 0:
            live[ptr] = time_ns, delta
            kept.append((time_ns, ptr, delta))
    for ptr, (born_ns, size) in live.items():
        ends_ns = _end_of_call(calls, born_ns)
        if ends_ns is not None:
            kept.append((ends_ns, ptr, -size))
    return sorted(kept, key=lambda event: event[0]), foreign_freed_bytes


def _end_of_call(calls: Sequence[int], time_ns: int) -> int | None:
    """Return when the call ended in which a moment lies, or None for one in no call."""
    place = bisect_right(calls, time_ns)
    return calls[place] if place % 2 else None
