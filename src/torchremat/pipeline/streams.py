"""Streams of devices, and their substitute for devices without streams."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch

from torchremat._compat.accelerators import CPU_STREAM, CpuStream, Stream, accelerator_of, record_stream

__all__ = ["CPU_STREAM", "CpuStream", "Stream", "record_stream"]


def device_of(stream: Stream) -> torch.device:
    """Return the device of a stream."""
    return stream.device


def current_stream(device: torch.device) -> Stream:
    """Return the stream that the caller uses."""
    return accelerator_of(device).current_stream(device)


def default_stream(device: torch.device) -> Stream:
    """Return the stream that a thread uses at first."""
    return accelerator_of(device).default_stream(device)


def new_stream(device: torch.device) -> Stream:
    """Return a stream of its own."""
    return accelerator_of(device).new_stream(device)


def use_device(device: torch.device) -> AbstractContextManager[object]:
    """Let a device be the current one."""
    return accelerator_of(device).use(device)


def use_stream(stream: Stream) -> AbstractContextManager[object]:
    """Let a stream, and its device, be the current ones."""
    return accelerator_of(stream.device).on(stream)


def wait_stream(waiting: Stream, awaited: Stream) -> None:
    """Let one stream wait for the current work of another; a CPU blocks, and a device need not wait for a CPU."""
    if isinstance(awaited, CpuStream):
        return
    if isinstance(waiting, CpuStream):
        awaited.synchronize()
    else:
        waiting.wait_stream(awaited)
