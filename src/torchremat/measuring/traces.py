"""The allocations and frees of a device during a block of code, in order, with marks between.

NOTE [ What records a step ]
A step is recorded as one list, an `AllocationTrace`. What else a reader has to know of the step, an observer marks in
it, so that no two orders or clocks have to agree. Four recorders make such a list, and readers do not tell them apart:

    recorder              its events                                                      not there
    `ProfilerRecorder`    of the CPU's allocator, also inside of kernels and of compiled  under a profiler of the user's
                          code
    `HistoryRecorder`     of a device's allocator, likewise                               under a history of the user's
    `Simulation`          of fakes, with a `KernelModel` for the inside of kernels        in compiled code
    `StorageTracker`      of tensors alone                                                in compiled code

    reader                reads
    `measure`             marks of modules, by hooks; operators and their lines, by `OperatorLines` in a second run
    profiles              the `StepRecord` of a forward; marks of regions, saves, what backward asks for, by `Watcher`
    certificates          the `StepRecord` of a step
    stages                as profiles; marks of weight gradients
    devices               marks around operators, by the timer of `calibration`, which waits for the device
    compiled graphs       marks around operators run by themselves, by `Trials`

A `StepRecord` is a list as well: calls entered and left, operators with the values that they read and make, saved
tensors and their graphs that are dropped, storages freed. `StepRecorder` makes it, in the order in which a mode and
hooks see these events; each operator has its marks in the allocations, if they are recorded.

`Watcher` makes no list but notes by unit: which unit a region is, and which address is an input of it, is known while
the region runs. A list would hold the same marks, and its reader would make these notes.

`saved` has a record of its own, `SaveLog`. It extends the log that names the operators of a region in errors, with its
rule for which operator saves a tensor. That log notes lines of code, by a walk up the Python stack: a small operator
takes 22 us more under it in a model two calls deep, 14 us under a `StepRecorder`, and each profile runs the latter.
"""

from __future__ import annotations

import itertools
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import UntypedStorage

from torchremat.errors import UnsupportedError

# By address, the events that allocated and freed something there.
Intervals = dict[int, list[tuple[int, int]]]


def live_bytes_of(delta_bytes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the bytes live before each event and after the last, over those at the beginning."""
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(delta_bytes, dtype=np.int64)])


class TraceMark(NamedTuple):
    """A point between two events of a trace.

    `position` is the index of the first event after it, or the number of events if none follows. `time_ns` is on the
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
    `slack_bytes` is the most that the allocator gave beyond these, see NOTE [ What a device holds ].
    `has_device_time` is whether marks have the device's times, not the host's.
    """

    device: torch.device
    time_ns: NDArray[np.int64]
    ptr: NDArray[np.int64]
    delta_bytes: NDArray[np.int64]
    marks: tuple[TraceMark, ...]
    slack_bytes: int = 0
    has_device_time: bool = False

    @classmethod
    def of(cls, device: torch.device, events: ArrayLike, marks: Iterable[TraceMark]) -> AllocationTrace:
        """Return the trace of events, each a row of its time, address and bytes."""
        time_ns, ptr, delta_bytes = np.asarray(events, np.int64).reshape(-1, 3).T
        return cls(device=device, time_ns=time_ns, ptr=ptr, delta_bytes=delta_bytes, marks=tuple(marks))

    @cached_property
    def live(self) -> NDArray[np.int64]:
        """The bytes live before each event and after the last, relative to the start of the block; not to be written.

        Negative where foreign memory went.
        """
        return live_bytes_of(self.delta_bytes)

    @cached_property
    def pairs(self) -> NDArray[np.int64]:
        """The events that allocated and freed each memory, as rows; what stays is freed after the last event."""
        order = np.argsort(self.ptr, kind="stable")
        pointers, grows = self.ptr[order], self.delta_bytes[order] > 0
        is_last, is_freed = np.ones_like(grows), np.zeros_like(grows)
        is_last[:-1] = pointers[1:] != pointers[:-1]
        is_freed[:-1] = ~is_last[:-1] & ~grows[1:]
        freed = np.where(is_freed, np.roll(order, -1), len(order) + 1)
        return np.stack([order, freed], 1)[grows & (is_freed | is_last)]

    @cached_property
    def intervals(self) -> Intervals:
        """The same by address, in order."""
        intervals: Intervals = {}
        for pointer, (allocated, freed) in zip(self.ptr[self.pairs[:, 0]].tolist(), self.pairs.tolist(), strict=True):
            intervals.setdefault(pointer, []).append((allocated, freed))
        return intervals

    def live_bytes_at(self, mark: int) -> int:
        """Return the bytes live at the mark with this id, relative to the start of the block."""
        return int(self.live[self.marks[mark].position])

    def seconds_between(self, first: int, last: int) -> float:
        """Return the seconds between two marks, given by id."""
        return 1e-9 * (self.marks[last].time_ns - self.marks[first].time_ns)

    @property
    def peak_bytes(self) -> int:
        """The most bytes live at once, relative to the start of the block; at least 0."""
        return int(self.live.max())

    def peak_bytes_between(self, first: int, last: int) -> int:
        """Return the most bytes live at once between two marks, given by id in order of time, relative to the start.

        Bytes live at the first mark count too.
        """
        begin, end = self.marks[first].position, self.marks[last].position
        return int(self.live[begin : end + 1].max())

    def rise_bytes_between(self, first: int, last: int) -> int:
        """Return the peak between two marks over the bytes live at the first."""
        return self.peak_bytes_between(first, last) - self.live_bytes_at(first)

    def within(self, stretches: Sequence[tuple[int, int]]) -> NDArray[np.bool_]:
        """Return for each event whether it is in one of some stretches.

        Args:
            stretches: The ids of the marks at their ends; the stretches are apart, and in order.
        """
        begins, ends = np.array(stretches, np.int64).reshape(-1, 2).T
        positions = np.array([mark.position for mark in self.marks], np.int64)
        events = np.arange(len(self.ptr))
        return np.searchsorted(positions[begins], events, "right") > np.searchsorted(positions[ends], events, "right")

    def made_in(self, stretches: Sequence[tuple[int, int]]) -> NDArray[np.bool_]:
        """Return for each event whether it allocates in one of some stretches, or frees what was allocated there."""
        made = np.append(self.within(stretches) & (self.delta_bytes > 0), [False, False])
        made[self.pairs[made[self.pairs[:, 0]], 1]] = True
        return made[:-2]

    @property
    def is_of_before(self) -> NDArray[np.bool_]:
        """For each event whether it frees what was allocated before the block."""
        frees = np.append(self.delta_bytes < 0, [False, False])
        frees[self.pairs[:, 1]] = False
        return frees[:-2]

    def without(self, events: NDArray[np.bool_]) -> AllocationTrace:
        """Return the trace without some events, with all its marks and times."""
        before = np.concatenate([[0], np.cumsum(~events)]).tolist()
        return replace(
            self,
            time_ns=self.time_ns[~events],
            ptr=self.ptr[~events],
            delta_bytes=self.delta_bytes[~events],
            marks=tuple([one._replace(position=before[one.position]) for one in self.marks]),
        )

    def without_seconds(self, stretches: Sequence[tuple[int, int]]) -> AllocationTrace:
        """Return the trace as if some stretches, given as for `within`, took no time."""
        if not stretches:
            return self
        begins, ends = np.array(stretches).T
        times = np.array([mark.time_ns for mark in self.marks])
        passed_ns = np.concatenate([[0], np.cumsum(times[ends] - times[begins])])

        def shown_ns(moments: NDArray[np.int64]) -> NDArray[np.int64]:
            count = np.searchsorted(times[begins], moments, "right")
            last = np.maximum(count - 1, 0)
            over = np.where(count > 0, np.maximum(times[ends][last] - moments, 0), 0)
            return moments - passed_ns[count] + over

        shown = zip(self.marks, shown_ns(times).tolist(), strict=True)
        return replace(
            self,
            time_ns=shown_ns(self.time_ns),
            marks=tuple([one._replace(time_ns=time_ns) for one, time_ns in shown]),
        )

    def has(self, pointer: int, mark: int) -> bool:
        """Return whether an address is, at the mark with this id, in memory that was allocated in the block."""
        end = self.marks[mark].position
        # Live allocations do not overlap, so the last event at this address decides.
        there = (self.ptr[:end] <= pointer) & (pointer < self.ptr[:end] + np.abs(self.delta_bytes[:end]))
        deltas = self.delta_bytes[:end][there]
        return len(deltas) > 0 and bool(deltas[-1] > 0)


class AllocationRecorder(ABC):
    """Takes marks while a block runs, and has the `trace` afterwards; of this machine, or simulated.

    Attributes:
        device: The device whose allocations are recorded; the CPU for a simulated one.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._ids = itertools.count()  # next() on it is atomic, so two threads get two ids
        self._trace: AllocationTrace | None = None
        self._has_ended = False

    @abstractmethod
    def mark(self, label: str) -> int:
        """Mark the current time and return the mark's id: 0, 1, 2, ...; from any thread."""

    def seconds(self) -> float:
        """Return the time now, the host's or the simulated one; waits for no device."""
        return time.perf_counter()

    def pointer_of(self, storage: UntypedStorage) -> int:
        """Return the address that a storage has in the trace; 0 for one without memory."""
        return 0 if storage.device.type == "meta" else storage.data_ptr()

    def hide(self, stretches: Sequence[tuple[int, int]]) -> None:
        """Leave some stretches, given as for `AllocationTrace.within`, out of the trace, as if they took no time.

        What they allocated goes, with its frees; and what was there before the block, and was freed in them, stays.
        """
        if stretches:
            trace = self.trace
            goes = trace.made_in(stretches) | (trace.within(stretches) & trace.is_of_before)
            self._trace = trace.without(goes).without_seconds(stretches)

    @property
    def trace(self) -> AllocationTrace:
        """The events of the block.

        Raises:
            UnsupportedError: The block has not ended, or it ended with an error.
        """
        if self._trace is None:
            raise UnsupportedError("there is no trace yet: it is made when the block of record_allocations ends.")
        return self._trace
