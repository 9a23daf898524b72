"""Recording a device's allocations and frees: one door for all devices."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch

from torchremat._compat.accelerators import accelerator_of
from torchremat.measuring.history import recorded_by_history
from torchremat.measuring.profiled import check_no_profiler, recorded_by_profiler
from torchremat.measuring.traces import AllocationRecorder


def record_allocations(device: torch.device) -> AbstractContextManager[AllocationRecorder]:
    """Record the allocations and frees on `device` during the block.

    It yields a recorder, which takes marks and has the `trace` after the block. An error in the block propagates, and
    the recording is closed.

    Args:
        device: A CPU or CUDA device; one without an index is the current one.

    Raises:
        UnsupportedError: The device has no such events; or something else records there: on the CPU a profiler, on CUDA
            a history of the allocator; or the block itself starts one.
    """
    accelerator = accelerator_of(device)
    if accelerator.records is None:
        raise accelerator.lacks("allocations can be recorded")
    device = torch.empty(0, device=device).device  # as events name it: a GPU with its index, the CPU without
    if accelerator.records == "history":
        return recorded_by_history(device)
    return recorded_by_profiler(device)


def check_free_to_record(device: torch.device) -> None:
    """Raise an error if something else records a device's allocations.

    Raises:
        UnsupportedError: Something else does.
    """
    accelerator = accelerator_of(device)
    if accelerator.records == "profiler":
        check_no_profiler()
    elif accelerator.records == "history":
        accelerator.check_no_history()
