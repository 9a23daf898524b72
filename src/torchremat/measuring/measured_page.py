"""A measured step as a page and as a trace: the curve, the operators, and the totals of each module."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from torchremat.measuring.curves import Phase, phase_at
from torchremat.measuring.measurement_data import MeasurementData
from torchremat.measuring.timeline import MemoryTimeline
from torchremat.tensors.sizes import format_bytes
from torchremat.views.page import Fact, Page, Table, TableCell, TableRow, milliseconds_cell, size_cell
from torchremat.views.step_chart import step_chart
from torchremat.views.steps import CurvePoint, Slice, Step, phases_of, runs

OUTSIDE = "(outside of all)"

_HEADINGS = ("module", "highest", "left by forward", "forward", "recompute", "backward")


def step_of(measurement: MeasurementData) -> Step:
    """Return the viewable form of a measured step."""
    timeline = measurement.timeline
    start = CurvePoint(seconds=0.0, live_bytes=measurement.before_bytes, phase="forward", says=("before the step",))
    points = (start, *(_moment(timeline, event) for event in range(len(timeline))))
    return Step(
        name=f"measured on {measurement.device}",
        points=points,
        slices=(*phases_of(points), *_modules(timeline, row="block"), *_modules(timeline, row="module")),
        jumps=True,
        before_bytes=measurement.before_bytes,
    )


def block_of(name: str) -> str:
    """Return the block that a module is in: its name up to the first number, or its first word."""
    parts = name.split(".")
    number = next((place for place, part in enumerate(parts) if part.isdigit()), 0)
    return ".".join(parts[: number + 1])


def _moment(timeline: MemoryTimeline, event: int) -> CurvePoint:
    name, operator, phase = timeline.module_at(event), timeline.operator_at(event), phase_at(timeline, event)
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
    names = [block_of(name) if row == "block" else name for name in timeline.names]
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
        name, phase = timeline.module_at(event) or OUTSIDE, phase_at(timeline, event)
        one = found.setdefault(name, _ModuleTotals(0, 0, defaultdict(float)))
        one.highest_bytes = max(one.highest_bytes, int(timeline.live_bytes[event]))
        one.left_bytes += delta if phase == "forward" else 0
        one.seconds[phase] += seconds
    return found


def _table(measurement: MeasurementData) -> Table:
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


def page_of(measurement: MeasurementData) -> Page:
    """Return the page of a measurement."""
    step = step_of(measurement)
    return Page(
        title=f"A training step on {measurement.device}: peak {format_bytes(measurement.peak_bytes)}",
        facts=tuple(Fact(name=name.strip(), value=value, note=note) for name, value, note in measurement.rows),
        charts=(step_chart(step, title="Memory over the step", note=_note(measurement)),) if step.points[1:] else (),
        tables=(_table(measurement),) if step.points[1:] else (),
    )


def _note(measurement: MeasurementData) -> str:
    known = bool(measurement.timeline.operator.any())
    lines = "Operators and lines come from a second run, matched by module, order and size." if known else ""
    size = format_bytes(measurement.slack_bytes)
    slack = (
        f"The {size} that the allocator gave beyond the requests are not in the curve."
        if measurement.slack_bytes
        else ""
    )
    return " ".join(filter(None, [lines, slack]))
