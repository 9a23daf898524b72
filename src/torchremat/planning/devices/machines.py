"""The machine that a step is profiled on: this one, or one that is only described.

Profiling code asks the machine to record allocations; nothing else in that code depends on whether tensors are real.
"""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch

from torchremat._compat.accelerators import accelerator_of
from torchremat.errors import UnsupportedError
from torchremat.measuring.allocator import check_free_to_record, record_allocations
from torchremat.measuring.dropping import nothing_kept
from torchremat.measuring.runs import Subject
from torchremat.measuring.traces import AllocationRecorder
from torchremat.planning.budgets import capacity_of, free_on
from torchremat.planning.devices.overheads import Overheads, overheads
from torchremat.stores.parameter_moves import marking_moves


@dataclass(frozen=True, kw_only=True)
class ForwardSeconds:
    """Seconds of a forward: until the host has launched it, and until the device is done."""

    launched_s: float
    done_s: float


class Machine(Protocol):
    """Where steps run.

    Attributes:
        device: The device that tensors claim to be on.
        name: Its name in plans.
        is_here: Whether steps can really run.
        generator_bytes: Bytes of a generator's state, if such states are on the device.
    """

    device: torch.device
    name: str
    is_here: bool
    generator_bytes: int

    @property
    def notice(self) -> str:
        """A message about its figures; empty if not needed."""
        ...

    def entered(self) -> AbstractContextManager[object]:
        """Return the context that all runs of one profile share."""
        ...

    def record(self) -> AbstractContextManager[AllocationRecorder]:
        """Record the allocator's events during a block, without those of moves of parameters to a store and back."""
        ...

    def logged(self) -> AbstractContextManager[AllocationRecorder | None]:
        """Return the context for a step whose operators are logged; None if its allocations cannot be recorded now."""
        ...

    def stepping(self) -> AbstractContextManager[object]:
        """Return the context for the step of an optimizer."""
        ...

    def capacity_bytes(self) -> int | None:
        """Return its total bytes; None if unknown."""
        ...

    def free_bytes(self) -> int | None:
        """Return the bytes that are free for a profile now; None if unknown."""
        ...

    def forward_seconds(self, subject: Subject) -> ForwardSeconds | None:
        """Return the seconds of an unwatched forward; None if only kernels take time."""
        ...

    def overheads(self) -> Overheads:
        """Return the executor's own overheads."""
        ...


def has_room(machine: Machine, needed_bytes: int) -> bool:
    """Return whether `needed_bytes` are free on a machine; True if unknown."""
    free_bytes = machine.free_bytes()
    return free_bytes is None or free_bytes >= needed_bytes


class Here:
    """This machine, with one of its devices."""

    is_here = True
    notice = ""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.name = str(device)
        self.generator_bytes = torch.get_rng_state().nbytes if device.type == "cpu" else 0

    def entered(self) -> AbstractContextManager[object]:
        """See `Machine`."""
        check_free_to_record(self.device)
        accelerator_of(self.device).warm(self.device)
        return nullcontext()

    @contextmanager
    def record(self) -> Generator[AllocationRecorder]:
        """See `Machine`."""
        with record_allocations(self.device) as recorder, marking_moves(recorder.mark) as moves:
            yield recorder
        recorder.hide(moves)

    @contextmanager
    def logged(self) -> Generator[AllocationRecorder | None]:
        """See `Machine`."""
        with ExitStack() as stack:
            try:
                recorder = stack.enter_context(self.record())
            except UnsupportedError:  # another recording is active
                recorder = None
            yield recorder

    def stepping(self) -> AbstractContextManager[object]:
        """See `Machine`."""
        return nullcontext()

    def capacity_bytes(self) -> int | None:
        """See `Machine`."""
        return capacity_of(self.device)

    def free_bytes(self) -> int | None:
        """See `Machine`."""
        return free_on(self.device)

    def forward_seconds(self, subject: Subject) -> ForwardSeconds | None:
        """See `Machine`."""
        # Grad mode stays on: without it models take other branches, hooks on tensors raise, and compiled code differs.
        with subject.untouched(), nothing_kept(), marking_moves(lambda _: time.perf_counter_ns()) as moves:
            accelerator = accelerator_of(self.device)
            start_s = accelerator.seconds(self.device)
            subject.run()
            launched_s = time.perf_counter() - start_s
            done_s = accelerator.seconds(self.device) - start_s
        moved_s = 1e-9 * sum(ends - begins for begins, ends in moves)
        return ForwardSeconds(launched_s=launched_s - moved_s, done_s=done_s - moved_s)

    def overheads(self) -> Overheads:
        """See `Machine`."""
        return overheads()
