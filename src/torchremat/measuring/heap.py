"""The garbage collector, kept from what is not ours; and memory that nobody uses, given back."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Generator
from contextlib import contextmanager

import torch

# Whether a block of ours is open. The collector can tell how much is frozen, but walks through all of it to do so.
_is_set_aside = False


@contextmanager
def heap_set_aside() -> Generator[None]:
    """Keep the garbage collector from all that lies on the heap already, for the block.

    Garbage of the caller's that died in the middle of a step would be taken for the step's. And to look through
    everything that a process has imported takes longer than the step of a small model, or than a plan.

    `profiler_is_active` finds none of what is set aside either: ask before. Inside another such block, or if the caller
    has set the heap aside, it is collected instead, since what is thawed is thawed at once.
    """
    global _is_set_aside
    if _is_set_aside or gc.get_freeze_count():
        gc.collect()
        yield
        return
    gc.freeze()
    _is_set_aside = True
    try:
        yield
    finally:
        _is_set_aside = False
        gc.unfreeze()


def free_unused() -> None:
    """Give back what nobody uses: cycles, autocast's copies of weights, what allocators keep for later."""
    gc.collect()
    torch.clear_autocast_cache()
    if torch.accelerator.is_available() and torch.get_device_module().is_initialized():
        torch.get_device_module().empty_cache()
    trim = getattr(_C, "malloc_trim", None)  # the GNU allocator alone has it
    if trim is not None:
        trim(0)


def _c_library() -> object:
    try:
        return ctypes.CDLL(None)
    except (OSError, TypeError):  # not on every system
        return None


_C = _c_library()
