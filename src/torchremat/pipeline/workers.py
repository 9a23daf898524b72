"""A thread for each device, so that enqueuing work on one does not wait for another."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TypeVar

import torch

from torchremat._compat.accelerators import accelerator_of
from torchremat.ambient.handover import Handover
from torchremat.regions.sessions import Session, active_session

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
    names = [accelerator_of(device).normalised(device) for device in devices]
    with ExitStack() as stack:
        threads = {device: _thread(device, stack) for device in dict.fromkeys(names)}
        yield [threads[name] for name in names]


def _thread(device: torch.device, stack: ExitStack) -> Worker:
    name = f"torchremat.Pipe on {device}"
    return Worker(device, stack.enter_context(ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)))


def _run(device: torch.device, session: Session | None, work: Callable[[], R]) -> R:
    with ExitStack() as stack:
        stack.enter_context(accelerator_of(device).use(device))
        if session is not None:
            stack.enter_context(session.active())
        return work()
