"""The allocator's events of a step: which ones belong together, and which ones exist only because of regions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from torchremat.measuring.traces import AllocationTrace


def without_copies(trace: AllocationTrace, copying: list[tuple[int, int]]) -> AllocationTrace:
    """Return the trace without the copies that regions make before a call and drop after it, between marks `copying`.

    Another tree has more or fewer regions around the call; copies that regions keep for longer remain.
    """
    of_copies = np.zeros(len(trace.delta_bytes) + 2, np.bool_)
    for begin, end in copying:
        of_copies[trace.marks[begin].position : trace.marks[end].position] = True
    delta = trace.delta_bytes.copy()
    for intervals in trace.intervals.values():
        for allocated, freed in intervals:
            if of_copies[allocated] and of_copies[freed]:
                delta[[allocated, freed]] = 0
    return replace(trace, delta_bytes=delta)


def without_hidden(trace: AllocationTrace, hidden: Sequence[tuple[int, int]]) -> AllocationTrace:
    """Return the trace as if nothing had run in some stretches, given by the marks at their ends, apart and in order.

    What they allocate goes, with its frees, and so do their seconds. Memory from before them is freed where it was.
    """
    if not hidden:
        return trace
    begins, ends = (np.array(one) for one in zip(*hidden, strict=True))
    positions = np.array([mark.position for mark in trace.marks])
    events = np.arange(len(trace.ptr))
    within = np.searchsorted(positions[begins], events, "right") > np.searchsorted(positions[ends], events, "right")
    goes = within & (trace.delta_bytes > 0)
    for intervals in trace.intervals.values():
        for allocated, freed in intervals:
            if goes[allocated] and freed < len(goes):
                goes[freed] = True
    before = np.concatenate([[0], np.cumsum(~goes)])
    timed = without_seconds(trace, hidden)
    return replace(
        timed,
        time_ns=timed.time_ns[~goes],
        ptr=trace.ptr[~goes],
        delta_bytes=trace.delta_bytes[~goes],
        marks=tuple(
            replace(mark, position=position)
            for mark, position in zip(timed.marks, before[positions].tolist(), strict=True)
        ),
    )


def without_seconds(trace: AllocationTrace, stretches: Sequence[tuple[int, int]]) -> AllocationTrace:
    """Return the trace as if some stretches, given by the marks at their ends, apart and in order, took no time."""
    if not stretches:
        return trace
    begins, ends = (np.array(one) for one in zip(*stretches, strict=True))
    times = np.array([mark.time_ns for mark in trace.marks])
    passed_ns = np.concatenate([[0], np.cumsum(times[ends] - times[begins])])

    def shown_ns(moments: NDArray[np.int64]) -> NDArray[np.int64]:
        count = np.searchsorted(times[begins], moments, "right")
        last = np.maximum(count - 1, 0)
        over = np.where(count > 0, np.maximum(times[ends][last] - moments, 0), 0)
        return moments - passed_ns[count] + over

    marks = zip(trace.marks, shown_ns(times).tolist(), strict=True)
    return replace(
        trace,
        time_ns=shown_ns(trace.time_ns),
        marks=tuple(replace(mark, time_ns=time_ns) for mark, time_ns in marks),
    )
