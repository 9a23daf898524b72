"""The events of a step, made by hand."""

import numpy as np
import torch

from torchremat.measuring.timeline import StepEvents
from torchremat.measuring.traces import AllocationTrace, TraceMark


def step_events(deltas, modules=(), *, backward_at, before_bytes=0):
    """Events of these bytes, one each second; `modules` tells from which of them on which module runs."""
    labels = [(0, "start"), (backward_at, "end of forward"), *modules]
    marks = [TraceMark(id=i, label=name, time_ns=0, position=at) for i, (at, name) in enumerate(labels)]
    columns = np.array([(10**9 * (i + 1), i, delta) for i, delta in enumerate(deltas)], dtype=np.int64).reshape(-1, 3)
    trace = AllocationTrace.of(torch.device("cpu"), columns, marks, start_ns=0)
    return StepEvents(trace=trace, start=0, backward=1, before_bytes=before_bytes)
