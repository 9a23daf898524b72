"""The figures of a measured step, and the rows that `print` shows of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from torchremat.measuring.timeline import MemoryTimeline
from torchremat.tensors.sizes import format_bytes

Source = Literal["allocator", "tracker", "cuda"]


@dataclass(frozen=True, kw_only=True, eq=False)
class MeasurementData:
    """The figures of a `Measurement`, which describes them."""

    device: torch.device
    source: Source
    peak_bytes: int
    kept_bytes: int
    tracker_peak_bytes: int
    tracker_kept_bytes: int
    parameter_bytes: int
    gradient_bytes: int
    buffer_bytes: int
    optimizer_bytes: int
    input_bytes: int
    seconds: float
    flops: int
    recomputed_flops: int
    timeline: MemoryTimeline
    resident_bytes: int = 0
    slack_bytes: int = 0
    reserved_bytes: int | None = None
    context_bytes: int | None = None

    @property
    def before_bytes(self) -> int:
        """Live bytes before the step."""
        return sum(self._parts().values())

    def _parts(self) -> dict[str, int]:
        return {
            "parameters": self.parameter_bytes,
            "gradients": self.gradient_bytes,
            "buffers": self.buffer_bytes,
            "optimizer": self.optimizer_bytes,
            "inputs": self.input_bytes,
            "resident": self.resident_bytes,
        }

    @property
    def rows(self) -> tuple[tuple[str, str, str], ...]:
        """The rows that `print` shows: names, numbers and notes."""
        rows = [
            ("peak", format_bytes(self.peak_bytes), self._peak_note()),
            ("  before the step", format_bytes(self.before_bytes), self._before_note()),
            ("  the step itself", format_bytes(self.peak_bytes - self.before_bytes - self.slack_bytes), ""),
            ("kept by forward", format_bytes(self.kept_bytes), ""),
            ("time", f"{self.seconds * 1e3:.1f} ms", ""),
            ("flops", f"{self.flops / 1e9:.2f} G", f"recomputed: {self.recomputed_flops / 1e9:.2f} G"),
        ]
        if self.reserved_bytes is not None:
            rows[3:3] = [("  slack", format_bytes(self.slack_bytes), "given beyond the requests")]
            rows.insert(5, ("reserved", format_bytes(self.reserved_bytes), ""))
        return tuple(rows)

    def _peak_note(self) -> str:
        if not len(self.timeline):
            return f"{self.source}, {self.device}"
        where = self.timeline.module_at(self.timeline.peak_at)
        phase = self.timeline.phase_at(self.timeline.peak_at)
        return f"in {phase}{f' of {where}' if where else ''} ({self.source}, {self.device})"

    def _before_note(self) -> str:
        return ", ".join(f"{name} {format_bytes(size)}" for name, size in self._parts().items() if size)
