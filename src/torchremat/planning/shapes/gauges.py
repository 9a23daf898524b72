"""What a real step did: its peak, as the allocator saw it, and the calls that it made."""

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
    """What a block needed, once it has ended.

    Attributes:
        rise_bytes: The most bytes live at once over those at its start; None if that was not measured.
    """

    rise_bytes: int | None = None


@contextmanager
def gauge(device: torch.device, *, wanted: bool) -> Generator[Gauge]:
    """Measure the peak of a block.

    A device that counts does so anyway; there every block is measured that sets a new record of the process, and others
    were within one that was measured. The counters are read, never reset. On the CPU only the profiler knows, which
    costs some time, so a block is measured if that is `wanted`, and not under a profiler of the user's.
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
    """Note the names of the modules that are called in a block, in order; not those that its backward calls."""
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
