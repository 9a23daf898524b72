"""`measure`: one training step, its bytes, seconds, flops and timeline, without side effects.

The step runs four times, each time from the same gradients, buffers and generators:

    run         under                                 gives
    1. warm     nothing                               nothing: compiles, fills caches and workspaces
    2. counted  StorageTracker and FlopCounter        flops, and the tracker's bytes
    3. traced   record_allocations                    bytes and timeline (not if a profiler of the user's is active)
    4. plain    nothing                               seconds; on CUDA also the peak, from torch's own counters

So a step that draws its batch from a loader draws four. Compiled code runs eagerly in run 2 only: its flops and the
tracker's bytes describe the eager code, all other numbers the compiled code.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import nn

from torchremat._compat.accelerators import accelerator_of
from torchremat.errors import check_flags
from torchremat.measuring.arguments import Step, model_and_step, model_first
from torchremat.measuring.curves import draw, headed
from torchremat.measuring.heap import heap_set_aside
from torchremat.measuring.lines import matched
from torchremat.measuring.observers import observe_allocations, observe_clock, observe_storages
from torchremat.measuring.profiled import profiler_is_active
from torchremat.measuring.runs import subject_of, unobserved
from torchremat.measuring.timeline import MemoryTimeline
from torchremat.measuring.tracebacks import without_our_frames
from torchremat.tensors.sizes import format_bytes
from torchremat.views.page import Fact, Page, Table, TableCell, TableRow, milliseconds_cell, size_cell
from torchremat.views.step_chart import step_chart
from torchremat.views.steps import CurvePoint, Phase, Slice, phases_of, runs
from torchremat.views.steps import Step as ShownStep
from torchremat.views.viewed import ViewedOverTime

Source = Literal["allocator", "tracker", "cuda"]

OUTSIDE = "(outside of all)"

_HEADINGS = ("module", "highest", "left by forward", "forward", "recompute", "backward")


@dataclass(frozen=True, kw_only=True, eq=False)
class Measurement(ViewedOverTime):
    """The bytes, seconds and flops of one training step (forward and backward) on `device`.

    Attributes:
        source: Where `peak_bytes` and `kept_bytes` come from: the allocator's events; CUDA's own counters; or, if a
            profiler was active on the CPU, the tracker, which misses temporaries inside kernels and compiled code.
        peak_bytes: The most bytes live at once, `before_bytes` included.
        kept_bytes: Bytes live at the end of forward, without `before_bytes`; the loss is part of them.
        tracker_peak_bytes: As `peak_bytes`, by tensor storages alone.
        tracker_kept_bytes: As `kept_bytes`, by tensor storages alone.
        parameter_bytes: Parameters; this and the next five are from before the step, each storage once.
        gradient_bytes: Gradients that the step begins with. The others are made in the step, and count from then on.
        buffer_bytes: Buffers of the model.
        optimizer_bytes: State of the optimizer, if it has any before its first step.
        input_bytes: Tensors that the step holds: see `measuring.step`.
        communication_bytes: Buffers that `DistributedDataParallel` communicates from.
        seconds: Of forward and backward, in a run without instrumentation.
        flops: Of matrix products, convolutions, attention and recurrent layers, in forward and backward, recomputes
            included.
        recomputed_flops: The part of `flops` that ran a piece of forward again during backward.
        timeline: Live bytes after each event.
        resident_bytes: Other bytes that stay on the device: workspaces of libraries, foreign tensors.
        slack_bytes: The part of `peak_bytes` that the allocator gave beyond the requested bytes; 0 on the CPU.
        reserved_bytes: CUDA only: the most device memory that the caching allocator held.
        context_bytes: CUDA only: device memory in use at the end that no allocator of this process holds: the CUDA
            context, NCCL, and other processes.
    """

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
    communication_bytes: int = 0
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
            "communication": self.communication_bytes,
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

    def plot(self, path: str | Path) -> None:
        """Draw the live bytes over the step into an image file; its suffix sets the format.

        Raises:
            UnsupportedError: matplotlib is not installed.
        """
        draw([headed(f"measured on {self.device}", step_of(self))], path)

    def _page(self) -> Page:
        return _page_of(self)

    def _steps(self) -> list[ShownStep]:
        return [step_of(self)]

    def __repr__(self) -> str:
        return (
            f"<Measurement: peak {format_bytes(self.peak_bytes)} ({self.source}, {self.device}), "
            f"{self.seconds * 1e3:.1f} ms>"
        )

    def __str__(self) -> str:
        return "\n".join(f"{name:<18}{value:>12}  {note}".rstrip() for name, value, note in self.rows)


@without_our_frames
@model_first
def measure(
    model: nn.Module | Step,
    step: Step | None = None,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    device: torch.device | str | None = None,
    accumulates: bool = False,
) -> Measurement:
    """Run a training step four times and return its bytes, seconds and flops.

    The step computes the loss; backward is run here, and no optimizer is stepped. Gradients, buffers, generators,
    training flags and hooks are restored, also if the step raises; `measuring.untouched` lists the exceptions. On CUDA
    the peak counters of torch are reset.

    Args:
        model: The model. Modules that the step itself holds count as well. If it holds all of them, pass the step
            alone.
        step: Called as `step(model)`, or as `step()` if no model is given. Returns the loss: a scalar tensor, an
            object with a `.loss`, or a dict with a `"loss"`.
        optimizer: Its state and its parameters count.
        device: The device to measure; by default the device of the first parameter or tensor found.
        accumulates: Whether the step begins with gradients of every parameter, those of other steps before it. A
            parameter that has a gradient now begins with it in any case.

    Raises:
        StepError: The step returns no loss, runs backward itself, or the model has parameters without values.
        UnsupportedError: The device is neither a CPU nor a CUDA device.
    """
    check_flags(accumulates=accumulates)
    subject = subject_of(*model_and_step(model, step), optimizer, accumulates=accumulates or None)
    place = subject.device(device)
    accelerator = accelerator_of(place)
    if accelerator.records is None:
        raise accelerator.lacks("bytes can be measured")
    foreign_profiler = profiler_is_active()
    with heap_set_aside():
        # Before any hook is set: code that dynamo compiles with our hooks in place would keep their graph breaks.
        # Backward runs as well: a forward alone leaves its graph, and if a cache or a context variable that a region
        # holds has one of its outputs, as in `transformers`, the graph stays forever.
        subject.train(unobserved(), looks=True)
        counted = subject.train(observe_storages(subject, place, lines=True))
        before = counted.timeline.before
        traced = None
        if not foreign_profiler:
            traced = replace(subject.train(observe_allocations(subject, place)), before=before)
        plain = subject.train(observe_clock(place))
    source: Source = "tracker" if traced is None else "allocator"
    seen = counted.timeline
    timeline = seen if traced is None else matched(traced, seen)
    slack_bytes = 0
    peak_bytes, kept_bytes = timeline.peak_bytes, timeline.kept_bytes
    if plain.peak_bytes is not None and plain.kept_bytes is not None:
        source, peak_bytes, kept_bytes = "cuda", plain.peak_bytes, plain.kept_bytes
        slack_bytes = 0 if traced is None else max(0, plain.peak_bytes - traced.peak_bytes)
    return Measurement(
        device=place,
        source=source,
        peak_bytes=before.total_bytes + peak_bytes,
        kept_bytes=kept_bytes,
        tracker_peak_bytes=before.total_bytes + seen.peak_bytes,
        tracker_kept_bytes=seen.kept_bytes,
        parameter_bytes=before.parameter_bytes,
        gradient_bytes=before.gradient_bytes,
        buffer_bytes=before.buffer_bytes,
        optimizer_bytes=before.optimizer_bytes,
        input_bytes=before.input_bytes,
        communication_bytes=before.communication_bytes,
        seconds=plain.seconds,
        flops=counted.flops,
        recomputed_flops=counted.recomputed_flops,
        timeline=timeline,
        resident_bytes=before.resident_bytes,
        slack_bytes=slack_bytes,
        reserved_bytes=plain.reserved_bytes,
        context_bytes=plain.context_bytes,
    )


def step_of(measurement: Measurement) -> ShownStep:
    """Return the viewable form of a measured step."""
    timeline = measurement.timeline
    start = CurvePoint(seconds=0.0, live_bytes=measurement.before_bytes, phase="forward", says=("before the step",))
    points = (start, *(_moment(timeline, event) for event in range(len(timeline))))
    return ShownStep(
        name=f"measured on {measurement.device}",
        points=points,
        slices=(*phases_of(points), *_modules(timeline, row="block"), *_modules(timeline, row="module")),
        jumps=True,
        before_bytes=measurement.before_bytes,
    )


def _block_of(name: str) -> str:
    """Return the block that a module is in: its name up to the first number, or its first word."""
    parts = name.split(".")
    number = next((place for place, part in enumerate(parts) if part.isdigit()), 0)
    return ".".join(parts[: number + 1])


def _phase_at(timeline: MemoryTimeline, event: int) -> Phase:
    """Return the phase at an event; a recompute is distinct from the backward that it serves."""
    if not timeline.in_backward[event]:
        return "forward"
    return "recompute" if timeline.operator_at(event).recomputes else "backward"


def _moment(timeline: MemoryTimeline, event: int) -> CurvePoint:
    name, operator, phase = timeline.module_at(event), timeline.operator_at(event), _phase_at(timeline, event)
    return CurvePoint(
        seconds=float(timeline.seconds[event]),
        live_bytes=int(timeline.live_bytes[event]),
        phase=phase,
        says=(
            f"{phase} of {name}" if name else phase,
            *([operator.operator] if operator.operator else []),
            *([operator.line] if operator.line else []),
        ),
        key=name or OUTSIDE,
    )


def _modules(timeline: MemoryTimeline, *, row: str) -> tuple[Slice, ...]:
    names = [_block_of(name) if row == "block" else name for name in timeline.names]
    return runs(
        (
            (float(timeline.seconds[event]), names[module], "module", "" if row == "block" else timeline.names[module])
            for event, module in enumerate(timeline.module.tolist())
        ),
        row=row,
    )


@dataclass
class _ModuleTotals:
    """The totals of a module."""

    highest_bytes: int
    left_bytes: int
    seconds: dict[Phase, float]


def _took(timeline: MemoryTimeline, before_bytes: int) -> dict[str, _ModuleTotals]:
    found: dict[str, _ModuleTotals] = {}
    deltas = np.diff(timeline.live_bytes, prepend=before_bytes).tolist()
    lasts = np.diff(timeline.seconds, append=timeline.seconds[-1:]).tolist()
    for event, (delta, seconds) in enumerate(zip(deltas, lasts, strict=True)):
        name, phase = timeline.module_at(event) or OUTSIDE, _phase_at(timeline, event)
        one = found.setdefault(name, _ModuleTotals(0, 0, defaultdict(float)))
        one.highest_bytes = max(one.highest_bytes, int(timeline.live_bytes[event]))
        one.left_bytes += delta if phase == "forward" else 0
        one.seconds[phase] += seconds
    return found


def _table(measurement: Measurement) -> Table:
    took = _took(measurement.timeline, measurement.before_bytes)
    most = max((one.left_bytes for one in took.values()), default=0)
    rows = tuple(
        TableRow(
            cells=(
                TableCell(name),
                size_cell(one.highest_bytes),
                size_cell(one.left_bytes),
                *(milliseconds_cell(one.seconds[phase]) for phase in ("forward", "recompute", "backward")),
            ),
            key=name,
            share=max(0.0, one.left_bytes / most) if most > 0 else None,
        )
        for name, one in sorted(took.items(), key=lambda item: -item[1].left_bytes)
    )
    return Table(
        title="Modules",
        columns=_HEADINGS,
        rows=rows,
        note="Highest: the most memory live while the module ran. Left by forward: what its forward allocated and did "
        "not free. Times are of the traced run, which is slower.",
    )


def _page_of(measurement: Measurement) -> Page:
    """Return the page of a measurement."""
    step = step_of(measurement)
    return Page(
        title=f"A training step on {measurement.device}: peak {format_bytes(measurement.peak_bytes)}",
        facts=tuple(Fact(name=name.strip(), value=value, note=note) for name, value, note in measurement.rows),
        charts=(step_chart(step, title="Memory over the step", note=_note(measurement)),) if step.points[1:] else (),
        tables=(_table(measurement),) if step.points[1:] else (),
    )


def _note(measurement: Measurement) -> str:
    known = bool(measurement.timeline.operator.any())
    lines = "Operators and lines come from a second run, matched by module, order and size." if known else ""
    size = format_bytes(measurement.slack_bytes)
    slack = (
        f"The {size} that the allocator gave beyond the requests are not in the curve."
        if measurement.slack_bytes
        else ""
    )
    return " ".join(filter(None, [lines, slack]))
