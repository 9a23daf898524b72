"""The points of a frontier as data, and as text: peak against time."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from torchremat.planning.searches.chains import Cost
from torchremat.planning.searches.search_budget import TIME_IS_OVER
from torchremat.planning.staircases import Staircase, knee_of
from torchremat.planning.stepping import PLAIN_STEPPING, Stepping
from torchremat.tensors.sizes import format_bytes, format_flops


@dataclass(frozen=True, kw_only=True)
class FrontierPoint:
    """Peak and time of a step under one plan.

    Attributes:
        budget_bytes: The smallest budget for which the plan is made: pass this to `plan` or `fit`.
        peak_bytes: Predicted peak of a training step, including the live bytes before it.
        step_bytes: Predicted peak of forward and backward alone, without the live bytes before.
        recompute_seconds: Predicted seconds of recomputing.
        recomputed_flops: Flops that are recomputed.
        stored_bytes: Bytes that go to stores in a step, and come back.
        slowdown: Predicted seconds of a step over a plain step's.
        stepping: How the optimizer steps.
    """

    budget_bytes: int
    peak_bytes: int
    step_bytes: int
    recompute_seconds: float
    recomputed_flops: int
    stored_bytes: int
    slowdown: float
    stepping: Stepping = PLAIN_STEPPING


@dataclass(frozen=True, kw_only=True, eq=False)
class FrontierData:
    """The points of a frontier. See `Frontier` for the attributes."""

    points: tuple[FrontierPoint, ...]
    cost: Cost
    device: str
    ran_out: bool

    @cached_property
    def shown(self) -> tuple[FrontierPoint, ...]:
        """The points not beaten by another in both peak and time; points chosen for fewest flops may be beaten."""
        plain, *others = self.points
        shown: list[FrontierPoint] = []
        for point in reversed(others):
            if not shown or point.slowdown < shown[-1].slowdown:
                shown.append(point)
        return plain, *reversed(shown)

    @property
    def is_choice(self) -> bool:
        """Whether the frontier offers a choice."""
        return len(self.points) > 1

    @property
    def floor(self) -> FrontierPoint:
        """The lowest peak that was found."""
        return self.points[-1]

    @property
    def knee(self) -> FrontierPoint | None:
        """The point beyond which each byte costs more time than before it; None if no point stands out."""
        place = knee_of([point.peak_bytes for point in self.shown], [point.slowdown for point in self.shown])
        return None if place is None else self.shown[place]

    @property
    def remarks(self) -> tuple[str, ...]:
        """Remarks on the points: that only one exists, or that the search ran out of time."""
        found = [] if self.is_choice else [self.no_choice]
        if hidden := len(self.points) - len(self.shown):
            found.append(
                f"not shown: {hidden} of `points`, which need fewer flops than the row below them, but a higher "
                "peak and more time"
            )
        return (*found, TIME_IS_OVER) if self.ran_out else tuple(found)

    @property
    def no_choice(self) -> str:
        """The remark if only one point exists."""
        return "nothing to choose: no plan lowers the peak of this step, because nothing can be recomputed there."

    def staircase(self, name: str) -> Staircase:
        """Return the shown points, ready to draw, under a name."""
        return Staircase(
            name=name,
            peak_bytes=tuple(point.peak_bytes for point in self.shown),
            slowdowns=tuple(point.slowdown for point in self.shown),
            knee=None if self.knee is None else self.shown.index(self.knee),
        )

    def __str__(self) -> str:
        stores = any(point.stored_bytes for point in self.points)
        heading = f"{'budget':>11} {'peak':>11} {'of plain':>9} {'time':>7} {'recomputed':>14}"
        rows, knee = [f"{heading} {'stored':>11}" if stores else heading], self.knee
        for point in self.shown:
            share = f"{100 * point.peak_bytes / max(1, self.points[0].peak_bytes):.0f}%"
            stored = f" {format_bytes(point.stored_bytes):>11}" if stores else ""
            mark = "  floor" if point is self.floor else "  knee" if point is knee else ""  # as in the picture
            mark += f"  {point.stepping}" if point.stepping != PLAIN_STEPPING else ""
            rows.append(
                f"{format_bytes(point.budget_bytes):>11} {format_bytes(point.peak_bytes):>11} {share:>9} "
                f"{point.slowdown:>5.2f} x {format_flops(point.recomputed_flops):>14}{stored}{mark}"
            )
        return "\n".join([*rows, *self.remarks])
