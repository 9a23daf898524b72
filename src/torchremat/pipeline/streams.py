"""Streams of CUDA devices, and what stands for them where there are none."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import torch
from torch import Tensor


class CpuStream:
    """The order in which a CPU works: there is one, and nothing to wait for."""

    def __repr__(self) -> str:
        return "CPU_STREAM"


CPU_STREAM = CpuStream()

Stream = torch.cuda.Stream | CpuStream


def device_of(stream: Stream) -> torch.device:
    """Return the device of a stream."""
    return torch.device("cpu") if isinstance(stream, CpuStream) else stream.device


def current_stream(device: torch.device) -> Stream:
    """Return the stream that the caller works on."""
    return torch.cuda.current_stream(device) if device.type == "cuda" else CPU_STREAM


def default_stream(device: torch.device) -> Stream:
    """Return the stream that a thread works on at first."""
    return torch.cuda.default_stream(device) if device.type == "cuda" else CPU_STREAM


def new_stream(device: torch.device) -> Stream:
    """Return a stream of its own."""
    return torch.cuda.Stream(device) if device.type == "cuda" else CPU_STREAM


@contextmanager
def use_device(device: torch.device) -> Generator[None]:
    """Let a device be the current one."""
    if device.type != "cuda":
        yield
        return
    with torch.cuda.device(device):
        yield


@contextmanager
def use_stream(stream: Stream) -> Generator[None]:
    """Let a stream, and its device, be the current ones."""
    if isinstance(stream, CpuStream):
        yield
        return
    with torch.cuda.stream(stream):
        yield


def wait_stream(waiting: Stream, awaited: Stream) -> None:
    """Let one stream go on when what is in another by now is done; a CPU blocks, and a device need not wait for it."""
    if isinstance(awaited, CpuStream):
        return
    if isinstance(waiting, CpuStream):
        awaited.synchronize()
    else:
        waiting.wait_stream(awaited)


def record_stream(tensor: Tensor, stream: Stream) -> None:
    """Keep the memory of a tensor from being used again before a stream is done with it."""
    if isinstance(stream, CpuStream) or tensor.device.type != "cuda":
        return
    # For a view, torch records an address inside of the block, which its allocator does not know.
    whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
    whole.record_stream(stream)
