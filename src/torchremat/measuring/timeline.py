"""`MemoryTimeline`: live bytes over a training step, with the phase and the module at each event."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, kw_only=True)
class ModuleChange:
    """From the event with this index on, `module` runs."""

    position: int
    module: str


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


def timeline_of(
    *,
    time_ns: NDArray[np.int64],
    live_bytes: NDArray[np.int64],
    start_ns: int,
    backward_at: int,
    changes: Sequence[ModuleChange],
) -> MemoryTimeline:
    """Return the timeline of events.

    Args:
        time_ns: Time of each event, in nanoseconds of any one clock.
        live_bytes: Live after each event.
        start_ns: Start of the step on that clock.
        backward_at: Index of the first event of the backward.
        changes: Of the running module, in order.
    """
    names = {"": 0}
    modules = [0, *(names.setdefault(change.module, len(names)) for change in changes)]
    positions = np.array([change.position for change in changes], dtype=np.int64)
    events = np.arange(len(time_ns))
    # How many changes had happened by each event; none yet is the entry 0, outside.
    happened = np.searchsorted(positions, events, side="right")
    return MemoryTimeline(
        seconds=(time_ns - start_ns) / 1e9,
        live_bytes=live_bytes,
        in_backward=events >= backward_at,
        module=np.array(modules, dtype=np.int64)[happened],
        names=tuple(names),
    )
