"""Keep the garbage collector off objects that are not ours, and return unused memory."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Generator
from contextlib import contextmanager

import torch

# How much more rarely than usual the collector visits objects in a block that are not young: they are the records that
# we make of a step, far more than what it makes itself. What it leaves behind dies young, and is found as always.
_RARELY = 10

# Whether a block of ours is open. The collector can count the frozen objects, but only by a pass over all of them.
_is_set_aside = False


@contextmanager
def heap_set_aside() -> Generator[None]:
    """Exclude all objects on the heap from garbage collection, for the block.

    Otherwise garbage of the caller's that dies in the middle of a step would count as the step's. And a pass over
    everything that a process has imported takes longer than a step of a small model, or than a plan.

    `profiler_is_active` does not find objects that are set aside either: call it before. Inside another such block, or
    if the caller has frozen the heap, this collects instead, since a thaw thaws everything at once.
    """
    global _is_set_aside
    if _is_set_aside or gc.get_freeze_count():
        gc.collect()
        yield
        return
    gc.freeze()
    _is_set_aside = True
    young, middle, old = gc.get_threshold()
    gc.set_threshold(young, middle * _RARELY, old)
    try:
        yield
    finally:
        _is_set_aside = False
        gc.set_threshold(young, middle, old)
        gc.unfreeze()


def free_unused() -> None:
    """Free unused memory: cycles, autocast's copies of weights, blocks that allocators cache."""
    gc.collect()
    torch.clear_autocast_cache()
    if torch.accelerator.is_available() and torch.get_device_module().is_initialized():
        torch.get_device_module().empty_cache()
    trim = getattr(_C, "malloc_trim", None)  # only the GNU allocator has it
    if trim is not None:
        trim(0)


def _c_library() -> object:
    try:
        return ctypes.CDLL(None)
    except (OSError, TypeError):  # not on every system
        return None


_C = _c_library()
