"""Streams of devices, and a thread for each device, so that enqueuing work on one does not wait for another."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import TypeVar

import torch

from torchremat._compat.accelerators import CPU_STREAM, CpuStream, Stream, accelerator_of, record_stream
from torchremat.ambient.handover import Handover
from torchremat.regions.sessions import Session, active_session

__all__ = ["CPU_STREAM", "CpuStream", "Stream", "record_stream"]


def current_stream(device: torch.device) -> Stream:
    """Return the stream that the caller uses."""
    return accelerator_of(device).current_stream(device)


def new_stream(device: torch.device) -> Stream:
    """Return a new stream."""
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


R = TypeVar("R")


class Worker:
    """A thread that works for one device, with the ambient state of the code that started it."""

    def __init__(self, device: torch.device, executor: ThreadPoolExecutor) -> None:
        self._device = device
        self._executor = executor
        self._handover = Handover()
        self._session = active_session()

    def submit(self, work: Callable[[], R]) -> Future[R]:
        """Let the thread do some work after its earlier work."""
        return self._executor.submit(self._handover.run, partial(_run, self._device, self._session, work))


@contextmanager
def spawn_workers(devices: Sequence[torch.device]) -> Generator[list[Worker]]:
    """Yield a worker for each device; the same device has the same worker. No thread outlives the block."""
    with ExitStack() as stack:
        threads = {device: _thread(device, stack) for device in dict.fromkeys(map(normalised, devices))}
        yield [threads[normalised(device)] for device in devices]


def normalised(device: torch.device) -> torch.device:
    """Return the unique name of a device: `"cuda"` is the current device, and every CPU is the same one."""
    return accelerator_of(device).normalised(device)


def _thread(device: torch.device, stack: ExitStack) -> Worker:
    name = f"torchremat.Pipe on {device}"
    return Worker(device, stack.enter_context(ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)))


def _run(device: torch.device, session: Session | None, work: Callable[[], R]) -> R:
    with ExitStack() as stack:
        stack.enter_context(use_device(device))
        if session is not None:
            stack.enter_context(session.active())
        return work()
