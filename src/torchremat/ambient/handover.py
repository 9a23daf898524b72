"""The state that a worker thread needs from the thread that gives it work, so that the work is the same in both.

Torch keeps most of this state per thread, and a new thread starts without it: autocast, grad and inference mode,
function and dispatch modes, saved-tensor hooks, the default device. Context variables are Python's.

Modes that only watch are handed over as well: unlike a recompute, work in another thread is work that they have not
seen yet. Missing on purpose: locks. A mode that several threads run in must tolerate that.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from contextvars import copy_context
from typing import TypeVar

import torch

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

R = TypeVar("R")


class Handover:
    """The state that surrounds the caller, for work in other threads."""

    def __init__(self) -> None:
        self._ambient_state = ambient_state()
        self._function_modes = function_modes()
        self._dispatch_modes = dispatch_modes()
        self._grad = torch.is_grad_enabled()
        self._inference = torch.is_inference_mode_enabled()
        self._hooks = top_saved_tensor_hooks(True)
        self._context = copy_context()

    def run(self, work: Callable[[], R]) -> R:
        """Return `work()`, run in the calling thread under the state of the thread that made the handover."""
        return self._context.copy().run(self._run, work)

    def _run(self, work: Callable[[], R]) -> R:
        with torch.inference_mode(self._inference), torch.set_grad_enabled(self._grad), ExitStack() as stack:
            self._ambient_state.restore(stack)
            stack.enter_context(_entered(self._dispatch_modes, dispatch_modes, push_dispatch_mode, pop_dispatch_mode))
            stack.enter_context(_entered(self._function_modes, function_modes, push_function_mode, pop_function_mode))
            if self._hooks is not None:
                push_saved_tensor_hooks(*self._hooks)
                stack.callback(pop_saved_tensor_hooks)
            return work()


@contextmanager
def _entered(
    modes: list[object], here: Callable[[], list[object]], push: Callable[[object], None], pop: Callable[[], object]
) -> Generator[None]:
    known = list(map(id, here()))
    missing = [mode for mode in modes if id(mode) not in known]
    for mode in missing:
        push(mode)
    try:
        yield
    finally:
        for _ in missing:
            pop()
