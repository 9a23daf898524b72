"""`MemoryTimeline`: the events of one run of a step, with the live bytes, the phase and the module at each."""

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
    """The memory of a step in one run, after each event of an allocator or a tracker (an allocation or a free).

    Attributes:
        trace: The events. Its marks name the module that runs from then on, except for the three below. Those of a
            watched step are its watcher's.
        start: The id of the mark at the start of the step.
        backward: The id of the mark at the end of its forward.
        ends: The id of the mark at the end of its backward.
        before: The bytes live before the step.
        gradients: The ids of the marks in gradients that the step has taken itself, before its backward.
        operator: For each event an index into `operators`: the operator that ran, where known; empty if none are.
        operators: Operators with the lines of the code that called them. The first stands for unknown operators.
    """

    trace: AllocationTrace
    start: int
    backward: int
    ends: int
    before: BytesBefore
    gradients: frozenset[int] = frozenset()
    operator: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    operators: tuple[OperatorLine, ...] = (UNKNOWN,)

    def __len__(self) -> int:
        return len(self.trace.ptr)

    @property
    def peak_bytes(self) -> int:
        """The peak, without the bytes before the step and without the allocator's slack."""
        return self.trace.peak_bytes

    @property
    def kept_bytes(self) -> int:
        """The bytes live at the end of the forward, without those before the step."""
        return self.trace.live_bytes_at(self.backward)

    @property
    def forward_peak_bytes(self) -> int:
        """The most bytes live before the backward, without those before the step; at least 0."""
        return int(self.trace.live[: self.trace.marks[self.backward].position + 1].max())

    @property
    def backward_peak_bytes(self) -> int:
        """The same from there on."""
        return max(0, int(self.trace.live[self.trace.marks[self.backward].position + 1 :].max(initial=0)))

    def peak_beyond(self, before: BytesBefore) -> int:
        """Return the peak with the part of the slack that is not in `before`."""
        return self.peak_bytes + max(0, self.trace.slack_bytes - before.slack_bytes)

    @cached_property
    def changes(self) -> list[TraceMark]:
        """The marks at which another module runs, in order."""
        own = (mark for mark in self.trace.marks if mark.id not in (self.start, self.backward, self.ends))
        return sorted(own, key=lambda mark: mark.position)

    @cached_property
    def seconds(self) -> NDArray[np.float64]:
        """For each event the seconds since the start of the step."""
        return (self.trace.time_ns - self.trace.marks[self.start].time_ns) / 1e9

    @cached_property
    def live_bytes(self) -> NDArray[np.int64]:
        """For each event the bytes live after it, those from before the step included."""
        return self.trace.live[1:] + self.before.total_bytes

    @cached_property
    def in_backward(self) -> NDArray[np.bool_]:
        """For each event whether it is one of the backward."""
        return np.arange(len(self)) >= self.trace.marks[self.backward].position

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The names of modules. The first is empty and stands for the code outside all modules."""
        return tuple(dict.fromkeys(["", *(change.label for change in self.changes)]))

    @cached_property
    def module(self) -> NDArray[np.int64]:
        """For each event an index into `names`: the module that ran."""
        numbers = {name: number for number, name in enumerate(self.names)}
        modules = np.array([0, *(numbers[change.label] for change in self.changes)], np.int64)
        return modules[self._changes_by]

    @cached_property
    def _changes_by(self) -> NDArray[np.int64]:
        """For each event how many changes had happened; none yet is outside."""
        positions = np.array([change.position for change in self.changes], np.int64)
        return np.searchsorted(positions, np.arange(len(self)), side="right")

    @cached_property
    def in_gradient(self) -> NDArray[np.bool_]:
        """For each event whether it is one of a gradient that the step has taken itself, before its backward."""
        own = np.array([False, *(change.id in self.gradients for change in self.changes)])
        return own[self._changes_by] & ~self.in_backward

    @property
    def peak_at(self) -> int:
        """Index of the first event with the most live bytes.

        Raises:
            ValueError: The timeline is empty.
        """
        return int(self.live_bytes.argmax())

    def phase_at(self, index: int) -> str:
        """Return "forward", "gradient" for one that the step takes itself, or "backward"."""
        return "backward" if self.in_backward[index] else "gradient" if self.in_gradient[index] else "forward"

    def module_at(self, index: int) -> str:
        """Return the name of the module that ran; empty outside all modules."""
        return self.names[self.module[index]]

    def operator_at(self, index: int) -> OperatorLine:
        """Return the operator that ran, where known."""
        return self.operators[self.operator[index]] if len(self.operator) else UNKNOWN
