"""The machine that a step is profiled on: this one, or one that is only described.

Whoever profiles asks the machine to record allocations, and for nothing else that depends on whether tensors are real.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Protocol

import torch

from torchremat._compat.accelerators import accelerator_of
from torchremat.errors import UnsupportedError
from torchremat.measuring.allocator import check_free_to_record, record_allocations
from torchremat.measuring.runs import Subject
from torchremat.measuring.traces import AllocationRecorder
from torchremat.planning.budgets import capacity_of, free_on
from torchremat.planning.profiles.dropping import nothing_kept
from torchremat.planning.profiles.overheads import Overheads, overheads


class Machine(Protocol):
    """Where steps run.

    Attributes:
        device: The device that tensors say they are on.
        name: What plans call it.
        is_here: Whether steps can really run.
        generator_bytes: Of the state of a generator, where these lie on the device.
    """

    device: torch.device
    name: str
    is_here: bool
    generator_bytes: int

    @property
    def notice(self) -> str:
        """What is to be said of its figures, if anything."""
        ...

    def entered(self) -> AbstractContextManager[object]:
        """Return the context that all runs of one profile share."""
        ...

    def record(self) -> AbstractContextManager[AllocationRecorder]:
        """Record what the allocator does during a block."""
        ...

    def logged(self) -> AbstractContextManager[AllocationRecorder | None]:
        """Return the context for a step whose operators are logged; None if its allocations cannot be recorded now."""
        ...

    def stepping(self) -> AbstractContextManager[object]:
        """Return the context for the step of an optimizer."""
        ...

    def capacity_bytes(self) -> int | None:
        """Return the bytes that it has in all; None if nobody knows."""
        ...

    def free_bytes(self) -> int | None:
        """Return the bytes that are free for a profile now; None if nobody knows."""
        ...

    def forward_seconds(self, subject: Subject) -> float | None:
        """Return the seconds of a forward that nothing watches; None if only kernels take time."""
        ...

    def overheads(self) -> Overheads:
        """Return what the executor takes by itself."""
        ...


def has_room(machine: Machine, needed_bytes: int) -> bool:
    """Return whether so many bytes are free on a machine, as far as anybody knows."""
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

    def record(self) -> AbstractContextManager[AllocationRecorder]:
        """See `Machine`."""
        return record_allocations(self.device)

    @contextmanager
    def logged(self) -> Generator[AllocationRecorder | None]:
        """See `Machine`."""
        with ExitStack() as stack:
            try:
                recorder = stack.enter_context(self.record())
            except UnsupportedError:  # somebody else records
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

    def forward_seconds(self, subject: Subject) -> float | None:
        """See `Machine`."""
        # Grad mode stays on: without it models go other ways, hooks on tensors raise, and compiled code is another.
        with subject.untouched(), nothing_kept():
            accelerator = accelerator_of(self.device)
            start_s = accelerator.seconds(self.device)
            subject.run()
            return accelerator.seconds(self.device) - start_s

    def overheads(self) -> Overheads:
        """See `Machine`."""
        return overheads()
