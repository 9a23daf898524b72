"""`StepEvents`, and `MemoryTimeline`: live bytes over a training step, with the phase and the module at each event."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from torchremat.measuring.before import BytesBefore
from torchremat.measuring.traces import AllocationTrace, TraceMark


@dataclass(frozen=True, slots=True)
class OperatorLine:
    """An operator by torch's name, `aten.mul.Tensor`, and file and line of the code that called it; "" if unknown.

    In backward the line is that of the forward that the operator is the backward of. `recomputes` says whether the
    operator runs a piece of forward again.
    """

    operator: str
    line: str
    recomputes: bool = False

    def __str__(self) -> str:
        return f"{self.operator} at {self.line}" if self.line else self.operator


UNKNOWN = OperatorLine("", "")


@dataclass(frozen=True, kw_only=True, eq=False)
class MemoryTimeline:
    """The memory of a step after each event (an allocation or a free): arrays of one length.

    Attributes:
        seconds: Since the start of the step.
        live_bytes: Live after the event, bytes from before the step included.
        in_backward: False in forward, True in backward.
        module: Index into `names` of the module that ran.
        names: Names of modules. The first is empty and stands for the code outside all modules.
        operator: Index into `operators` of the operator that ran, where known; empty if none are.
        operators: Operators with the lines of the code that called them. The first stands for unknown operators.
    """

    seconds: NDArray[np.float64]
    live_bytes: NDArray[np.int64]
    in_backward: NDArray[np.bool_]
    module: NDArray[np.int64]
    names: tuple[str, ...]
    operator: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    operators: tuple[OperatorLine, ...] = (UNKNOWN,)

    def __len__(self) -> int:
        return len(self.live_bytes)

    @property
    def peak_at(self) -> int:
        """Index of the first event with the most live bytes.

        Raises:
            ValueError: The timeline is empty.
        """
        return int(self.live_bytes.argmax())

    def phase_at(self, index: int) -> str:
        """Return "forward" or "backward"."""
        return "backward" if self.in_backward[index] else "forward"

    def module_at(self, index: int) -> str:
        """Return the name of the module that ran; empty outside all modules."""
        return self.names[self.module[index]]

    def operator_at(self, index: int) -> OperatorLine:
        """Return the operator that ran, where known."""
        return self.operators[self.operator[index]] if len(self.operator) else UNKNOWN


@dataclass(frozen=True, kw_only=True, eq=False)
class StepEvents:
    """The events of one run of a step, recorded by an allocator or a tracker.

    Attributes:
        trace: The events. Its marks name the module that runs from then on, except for the two below.
        start: The id of the mark at the start of the step.
        backward: The id of the mark at the end of its forward.
        before_bytes: Live bytes before the step.
    """

    trace: AllocationTrace
    start: int
    backward: int
    before_bytes: int

    @property
    def peak_bytes(self) -> int:
        """The peak, without the bytes before the step and without the allocator's slack."""
        return self.trace.peak_bytes

    @property
    def kept_bytes(self) -> int:
        """The bytes live at the end of the forward, without those before the step."""
        return self.trace.live_bytes_at(self.backward)

    def peak_beyond(self, before: BytesBefore) -> int:
        """Return the peak with the part of the slack that is not in `before`."""
        return self.peak_bytes + max(0, self.trace.slack_bytes - before.slack_bytes)

    @cached_property
    def changes(self) -> list[TraceMark]:
        """The marks at which another module runs, in order."""
        own = (mark for mark in self.trace.marks if mark.id not in (self.start, self.backward))
        return sorted(own, key=lambda mark: mark.position)

    def timeline(self) -> MemoryTimeline:
        """Return the memory of the step after each event."""
        names, events = {"": 0}, np.arange(len(self.trace.ptr))
        modules = [0, *(names.setdefault(change.label, len(names)) for change in self.changes)]
        positions = np.array([change.position for change in self.changes], dtype=np.int64)
        # How many changes had happened by each event; none yet is the entry 0, outside.
        happened = np.searchsorted(positions, events, side="right")
        return MemoryTimeline(
            seconds=(self.trace.time_ns - self.trace.marks[self.start].time_ns) / 1e9,
            live_bytes=self.trace.live[1:] + self.before_bytes,
            in_backward=events >= self.trace.marks[self.backward].position,
            module=np.array(modules, dtype=np.int64)[happened],
            names=tuple(names),
        )
