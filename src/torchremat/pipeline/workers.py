"""A thread for each device, so that enqueuing work on one does not wait for another.

The work is the same as in the thread that gives it, so the state around it is handed over. Torch keeps most of that per
thread, and a new thread starts without it: autocast, grad and inference mode, function and dispatch modes, saved-tensor
hooks, the default device. Context variables are Python's.

Modes that only watch are handed over as well: unlike a recompute, work in another thread is work that they have not
seen yet. Missing on purpose: locks. A mode that several threads run in must tolerate that.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from contextvars import copy_context
from functools import partial
from typing import TypeVar

import torch

from torchremat._compat.accelerators import accelerator_of
from torchremat._compat.autograd import pop_saved_tensor_hooks, push_saved_tensor_hooks, top_saved_tensor_hooks
from torchremat._compat.modes import (
    dispatch_modes,
    function_modes,
    pop_dispatch_mode,
    pop_function_mode,
    push_dispatch_mode,
    push_function_mode,
)
from torchremat.ambient.global_state import ambient_state
from torchremat.regions.sessions import active_session

R = TypeVar("R")


class Handover:
    """The state that surrounds the caller, for work in other threads."""

    def __init__(self) -> None:
        self._ambient_state = ambient_state()
        self._modes = (
            (dispatch_modes(), dispatch_modes, push_dispatch_mode, pop_dispatch_mode),
            (function_modes(), function_modes, push_function_mode, pop_function_mode),
        )
        self._grad = torch.is_grad_enabled()
        self._inference = torch.is_inference_mode_enabled()
        self._hooks = top_saved_tensor_hooks(True)
        self._context = copy_context()
        self._session = active_session()

    def run(self, work: Callable[[], R]) -> R:
        """Return `work()`, run in the calling thread under the state of the thread that made the handover."""
        return self._context.copy().run(self._run, work)

    def _run(self, work: Callable[[], R]) -> R:
        with torch.inference_mode(self._inference), torch.set_grad_enabled(self._grad), ExitStack() as stack:
            self._ambient_state.restore(stack)
            for modes, here, push, pop in self._modes:
                known = list(map(id, here()))
                for mode in modes:
                    if id(mode) not in known:
                        push(mode)
                        stack.callback(pop)
            if self._hooks is not None:
                push_saved_tensor_hooks(*self._hooks)
                stack.callback(pop_saved_tensor_hooks)
            if self._session is not None:
                stack.enter_context(self._session.active())
            return work()


class Worker:
    """A thread that works for one device, with the state around the code that started it."""

    def __init__(self, device: torch.device, executor: ThreadPoolExecutor) -> None:
        self._device = device
        self._executor = executor
        self._handover = Handover()

    def submit(self, work: Callable[[], R]) -> Future[R]:
        """Let the thread do some work after its earlier work."""
        return self._executor.submit(self._handover.run, partial(self._run, work))

    def _run(self, work: Callable[[], R]) -> R:
        with accelerator_of(self._device).use(self._device):
            return work()


@contextmanager
def spawn_workers(devices: Sequence[torch.device]) -> Generator[list[Worker]]:
    """Yield a worker for each device; the same device has the same worker. No thread outlives the block."""
    names = [accelerator_of(device).normalised(device) for device in devices]
    with ExitStack() as stack:
        workers: dict[torch.device, Worker] = {}
        for device in dict.fromkeys(names):
            executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"torchremat.Pipe on {device}")
            workers[device] = Worker(device, stack.enter_context(executor))
        yield [workers[name] for name in names]
