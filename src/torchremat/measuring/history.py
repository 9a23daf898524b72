"""Allocations of a device whose allocator keeps a history: CUDA's.

torch's profiler reports a device's allocations only below operators, and omits allocations outside of any operator. The
allocator's own history has all of them, from every thread, and frees of memory allocated before the block.

Marks are positions in it: the allocator counts the blocks that it gives out and takes back, and the history has one
entry for each, so no two clocks have to agree. Its sizes are the requested ones; the allocator rounds each one
up. See NOTE [ What a device holds ].

Seconds are the device's own: a mark is an event on the caller's stream, which is read when the block is over.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from torchremat._compat.accelerators import Happened, accelerator_of
from torchremat.errors import UnsupportedError
from torchremat.measuring.interrupts import uninterrupted
from torchremat.measuring.traces import AllocationRecorder, AllocationTrace, TraceMark, live_bytes_of

# NOTE [ What a device holds ]
#
# A device's `torch.cuda.memory_allocated` is the sum of three parts.
#
#   step      requested bytes, each block rounded up to 512 bytes: traces and plans count these, the same in every run
#   resident  memory that stays in a warm process and holds no tensor: workspaces of cuBLAS, for each thread and stream.
#             It is counted before a step, see `BytesBefore`
#   slack     bytes that the allocator gives beyond that: a large block whose rest is below 1 MiB is not split. It
#             depends on what is cached, so it is measured where it was seen, and no plan can lower it
#
# On the CPU the last two are zero.


# NOTE [ Seconds of a device ]
# A watched step needs many times longer to launch an operator than the device needs to run it. So the device would wait
# for the host, and the time between two marks would be the host's. To prevent that, a mark gives the device a kernel
# that does nothing for `_DELAY_S` when less than `_LEAD_S` of such work may be left, and the time of these kernels is
# subtracted. Code that waits for the device ends the host's lead; the next mark sees that on the host's clock.
_DELAY_S = 0.05
_LEAD_S = 0.02


@dataclass(frozen=True, slots=True, eq=False)
class _Moment:
    """When a mark was taken: on the host and on the device, and the allocator's count by then.

    Attributes:
        resumes: Fires after the delay that began at the mark, if one did.
    """

    label: str
    wall_ns: int
    event: torch.Event
    resumes: torch.Event | None
    position: int
    allocated_bytes: int


class HistoryRecorder(AllocationRecorder):
    """See `AllocationRecorder`."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._accelerator = accelerator_of(device)
        self._moments: dict[int, _Moment] = {}
        self._busy_until_s = 0.0
        self._start = self._moment("")

    def mark(self, label: str) -> int:
        """See `AllocationRecorder`."""
        mark = next(self._ids)
        # An object that an error keeps alive may mark its end late, when the history is over.
        if not self._has_ended:
            self._moments[mark] = self._moment(label)
        return mark

    def _moment(self, label: str) -> _Moment:
        counted = self._accelerator.counters(self.device)
        wall_ns, event = time.time_ns(), self._event()
        return _Moment(label, wall_ns, event, self._delayed(), counted.position, counted.allocated_bytes)

    def _event(self) -> torch.Event:
        return self._accelerator.event(self._accelerator.current_stream(self.device), timed=True)

    def _delayed(self) -> torch.Event | None:
        """Keep the device behind the host, see NOTE [ Seconds of a device ]; return what fires when it goes on."""
        now_s = time.perf_counter()
        if self._busy_until_s > now_s + _LEAD_S:
            return None
        self._busy_until_s = max(now_s, self._busy_until_s) + _DELAY_S
        self._accelerator.delay(self.device, _DELAY_S)
        return self._event()

    def _finish(self, history: Sequence[Happened], end: _Moment) -> None:
        """Build the trace from the allocator's history."""
        start = self._start
        counted = end.position - start.position
        if len(history) < counted:
            raise UnsupportedError(
                f"the allocator of {self.device} counted {counted} allocations and frees in the block, and its history "
                f"has {len(history)}: the block has begun or ended a history of its own "
                "(torch.cuda.memory._record_memory_history). Take that out of the step."
            )
        history = history[:counted]  # autograd's thread may free something after the block
        self._accelerator.synchronize(self.device)
        moments = [self._moments.get(mark, end) for mark in range(next(self._ids))]
        clock = _DeviceClock(start, [*moments, end])
        deltas = _deltas(history, self._accelerator.block_bytes)
        self._trace = AllocationTrace(
            device=self.device,
            time_ns=clock.times_ns([one.time_ns for one in history]),
            ptr=np.array([one.ptr for one in history], dtype=np.int64),
            delta_bytes=deltas,
            marks=tuple(
                TraceMark(id=mark, label=one.label, time_ns=clock.time_ns(one), position=one.position - start.position)
                for mark, one in enumerate(moments)
            ),
            slack_bytes=_slack_bytes(deltas, start, [*moments, end]),
            has_device_time=True,
        )


class _DeviceClock:
    """Device times, in nanoseconds: the host's clock at the start plus the device's own time since, without delays."""

    def __init__(self, start: _Moment, moments: Sequence[_Moment]) -> None:
        in_order = sorted([start, *moments], key=lambda one: one.wall_ns)
        self._of: dict[_Moment, int] = {}
        delayed_ms = 0.0
        for one in in_order:
            self._of[one] = start.wall_ns + round(1e6 * (start.event.elapsed_time(one.event) - delayed_ms))
            if one.resumes is not None:
                delayed_ms += one.event.elapsed_time(one.resumes)
        self._wall_ns = [one.wall_ns for one in in_order]
        self._device_ns = np.maximum.accumulate([self._of[one] for one in in_order])

    def time_ns(self, moment: _Moment) -> int:
        return self._of[moment]

    def times_ns(self, wall_ns: Sequence[int]) -> NDArray[np.int64]:
        """Map host times to device times, interpolated between the marks before and after."""
        return np.interp(wall_ns, self._wall_ns, self._device_ns).astype(np.int64)


def _deltas(history: Sequence[Happened], block_bytes: int) -> NDArray[np.int64]:
    """Return the bytes of each event, rounded up. A block from before knows its own size when it is freed."""
    deltas = np.array([one.delta_bytes for one in history], dtype=np.int64)
    return np.sign(deltas) * (-(-np.abs(deltas) // block_bytes) * block_bytes)


def _slack_bytes(deltas: NDArray[np.int64], start: _Moment, moments: Sequence[_Moment]) -> int:
    """Return the largest excess, at any mark, of allocated over requested bytes."""
    live = live_bytes_of(deltas)
    over = [one.allocated_bytes - start.allocated_bytes - live[one.position - start.position] for one in moments]
    return max(0, *map(int, over))


@contextmanager
def recorded_by_history(device: torch.device) -> Generator[HistoryRecorder]:
    """Record a device's allocations and frees during the block.

    Raises:
        UnsupportedError: Something else records its history, or the block itself does; or this allocator keeps none.
    """
    accelerator = accelerator_of(device)
    with uninterrupted():
        accelerator.begin_history()
    try:
        recorder = HistoryRecorder(device)
        yield recorder
        recorder._has_ended = True
        end = recorder._moment("")
    finally:
        with uninterrupted():
            history = accelerator.end_history(device)
    recorder._finish(history, end)
