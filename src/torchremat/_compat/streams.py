"""Streams of devices: the one that the caller works on, and how one waits for another."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from torchremat._compat.accelerators import CpuStream, Stream, accelerator_of


def current_stream(device: torch.device) -> Stream:
    """Return the stream of a device on which the caller works."""
    return accelerator_of(device).current_stream(device)


def use_stream(stream: Stream | None) -> AbstractContextManager[object]:
    """Return a block in which a stream, and its device, are the current ones; those that are if there is none."""
    return nullcontext() if stream is None else accelerator_of(stream.device).on(stream)


def wait_stream(waiting: Stream, awaited: Stream) -> None:
    """Let one stream wait for the current work of another; a CPU blocks, and a device need not wait for a CPU."""
    if isinstance(awaited, CpuStream):
        return
    if isinstance(waiting, CpuStream):
        awaited.synchronize()
    else:
        waiting.wait_stream(awaited)


def record_stream(tensor: Tensor, stream: Stream) -> None:
    """Keep the memory of a tensor from being reused before a stream is done with it."""
    if isinstance(stream, CpuStream) or accelerator_of(tensor.device).is_host:
        return
    # For a view, torch would record an address inside of the block, which its allocator does not know.
    whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
    whole.record_stream(stream)
