"""A step over time, as charts and traces show it: the bytes at each point in time, and slices of running code."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

Phase = Literal["forward", "gradient", "recompute", "backward"]
Kind = Phase | Literal["module", "other", "region", "store"]


@dataclass(frozen=True, kw_only=True)
class CurvePoint:
    """A point of the curve.

    Attributes:
        seconds: Since the start of the step.
        live_bytes: Live bytes, including those from before the step.
        phase: The phase from here on.
        says: The hover text of it, in lines.
        key: The row of the table that it belongs to.
    """

    seconds: float
    live_bytes: int
    phase: Phase
    says: tuple[str, ...] = ()
    key: str = ""


@dataclass(frozen=True, kw_only=True)
class Slice:
    """A time span in which something runs, or waits.

    Attributes:
        kind: Which colour it has.
        says: More of it, in lines.
        key: The row of the table that it belongs to.
    """

    row: str
    name: str
    starts_s: float
    ends_s: float
    kind: Kind
    says: tuple[str, ...] = ()
    key: str = ""


@dataclass(frozen=True, kw_only=True)
class Step:
    """A step, measured or predicted.

    Attributes:
        points: The points of the curve, in order of time.
        slices: The slices; slices of one row do not overlap.
        jumps: Whether the bytes are constant until the next point, which is so if every change was recorded.
        before_bytes: The bytes that were live before the step.
        budget_bytes: The budget, None without one.
    """

    name: str
    points: tuple[CurvePoint, ...]
    slices: tuple[Slice, ...] = ()
    jumps: bool = False
    before_bytes: int = 0
    budget_bytes: int | None = None

    @property
    def peak(self) -> CurvePoint | None:
        """The first of the highest points."""
        return max(self.points, key=lambda one: one.live_bytes, default=None)

    @property
    def ends_s(self) -> float:
        """The time of the last point."""
        return self.points[-1].seconds if self.points else 0.0


def phases_of(points: Sequence[CurvePoint]) -> tuple[Slice, ...]:
    """Return the slices of the phases."""
    return runs((one.seconds, one.phase, one.phase, "") for one in points) if points else ()


def runs(told: Iterable[tuple[float, str, Kind, str]], *, row: str = "phase") -> tuple[Slice, ...]:
    """Return a slice for each run of points with the same name and kind.

    Args:
        told: The seconds, name, kind and key of each point; points without a name make no slice.
        row: The row of the slices.
    """
    found: list[Slice] = []
    points = [*told]
    starts = [place for place, one in enumerate(points) if not place or one[1:] != points[place - 1][1:]]
    for first, after in pairwise([*starts, len(points) - 1]):
        seconds, name, kind, key = points[first]
        if name and points[after][0] > seconds:
            found.append(Slice(row=row, name=name, starts_s=seconds, ends_s=points[after][0], kind=kind, key=key))
    return tuple(found)
