"""Measurements of a real step: its peak, as the allocator saw it, and its calls."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from torchremat._compat.accelerators import accelerator_of
from torchremat._compat.autograd import current_graph_task
from torchremat.measuring.allocator import record_allocations
from torchremat.measuring.interrupts import uninterrupted
from torchremat.measuring.modules import visible_modules
from torchremat.measuring.profiled import profiler_is_active


@dataclass
class Gauge:
    """The measured bytes of a block, once it has ended.

    Attributes:
        rise_bytes: Its peak over the live bytes at its start; None if not measured.
    """

    rise_bytes: int | None = None


@contextmanager
def gauge(device: torch.device, *, wanted: bool) -> Generator[Gauge]:
    """Measure the peak of a block.

    A device with counters counts anyway; there each block that sets a new record of the process is measured, and any
    other block stayed within a measured one. The counters are read, never reset. On the CPU only the profiler knows the
    peak, which costs some time, so a block is measured if `wanted`, and not under a profiler of the user's.
    """
    found = Gauge()
    accelerator = accelerator_of(device)
    if accelerator.counts:
        before = accelerator.counters(device)
        yield found
        peak_bytes = accelerator.counters(device).peak_bytes
        found.rise_bytes = peak_bytes - before.allocated_bytes if peak_bytes > before.peak_bytes else None
    elif wanted and not profiler_is_active():
        with record_allocations(device) as recorder:
            yield found
        found.rise_bytes = recorder.trace.peak_bytes
    else:
        yield found


@contextmanager
def calls_noted(model: nn.Module) -> Generator[list[str]]:
    """Record the names of the modules that a block calls, in order, without those that its backward calls."""
    names: list[str] = []

    def note(name: str) -> Callable[[nn.Module, object], None]:
        return lambda module, args: names.append(name) if current_graph_task() == -1 else None

    handles = [module.register_forward_pre_hook(note(name)) for name, module in visible_modules(model)]
    try:
        yield names
    finally:
        with uninterrupted():
            for handle in handles:
                handle.remove()
