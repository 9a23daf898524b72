"""The allocator's events of a step: which ones exist only because of regions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from torchremat.measuring.traces import AllocationTrace


def without_copies(trace: AllocationTrace, copying: list[tuple[int, int]]) -> AllocationTrace:
    """Return the trace without the copies that regions make before a call and drop after it, between marks `copying`.

    Another tree has more or fewer regions around the call; copies that regions keep for longer remain.
    """
    of_copies = np.zeros(len(trace.delta_bytes) + 2, np.bool_)
    for begin, end in copying:
        of_copies[trace.marks[begin].position : trace.marks[end].position] = True
    pairs = trace.pairs
    delta = trace.delta_bytes.copy()
    delta[pairs[of_copies[pairs].all(1)]] = 0
    return replace(trace, delta_bytes=delta)


def without_hidden(trace: AllocationTrace, hidden: Sequence[tuple[int, int]]) -> AllocationTrace:
    """Return the trace as if nothing had run in some stretches, given by the marks at their ends, apart and in order.

    What they allocate goes, with its frees, and so do their seconds. Memory from before them is freed where it was.
    """
    return trace.without(trace.made_in(hidden)).without_seconds(hidden) if hidden else trace
