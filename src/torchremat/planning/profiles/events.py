"""The allocator's events of a step: which ones belong together, and which ones exist only because of regions."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from torchremat.measuring.traces import AllocationTrace


def without_copies(
    trace: AllocationTrace, freed_at: dict[int, list[tuple[int, int]]], copying: list[tuple[int, int]]
) -> AllocationTrace:
    """Return the trace without the copies that regions make before a call and drop after it, between marks `copying`.

    Another tree has more or fewer regions around the call; copies that regions keep for longer remain.
    """
    of_copies = np.zeros(len(trace.delta_bytes) + 2, np.bool_)
    for begin, end in copying:
        of_copies[trace.marks[begin].position : trace.marks[end].position] = True
    delta = trace.delta_bytes.copy()
    for intervals in freed_at.values():
        for allocated, freed in intervals:
            if of_copies[allocated] and of_copies[freed]:
                delta[[allocated, freed]] = 0
    return replace(trace, delta_bytes=delta)


def intervals_of(trace: AllocationTrace) -> dict[int, list[tuple[int, int]]]:
    """For each address the events that allocated and freed it; a storage that stays is freed after the last event."""
    intervals: dict[int, list[tuple[int, int]]] = {}
    open_at: dict[int, int] = {}
    for event, (pointer, delta) in enumerate(zip(trace.ptr.tolist(), trace.delta_bytes.tolist(), strict=True)):
        if delta > 0:
            open_at[pointer] = event
        elif pointer in open_at:
            intervals.setdefault(pointer, []).append((open_at.pop(pointer), event))
    for pointer, event in open_at.items():
        intervals.setdefault(pointer, []).append((event, len(trace.ptr) + 1))
    return intervals
