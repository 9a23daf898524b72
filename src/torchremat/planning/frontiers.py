"""Peak against time over all budgets, so that a budget can be chosen by looking."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from torchremat.errors import BudgetError, UnsupportedError
from torchremat.measuring.heap import heap_set_aside
from torchremat.planning.budgets import Relative, relative_of
from torchremat.planning.descriptions import plan_of
from torchremat.planning.frontier_data import FrontierData, FrontierPoint
from torchremat.planning.frontier_page import page_of
from torchremat.planning.plans import Plan
from torchremat.planning.profiled_step import ProfiledStep
from torchremat.planning.simulator.prediction import Candidate
from torchremat.planning.staircases import draw
from torchremat.tensors.sizes import format_bytes
from torchremat.views.page import Page
from torchremat.views.viewed import Viewed

POINTS = 24  # default number of budgets to search plans for

# The reported share of the search after the lowest peak; tables are made there for all limits.
_FLOOR_SHARE = 0.25


@dataclass(frozen=True, kw_only=True, eq=False)
class Frontier(FrontierData, Viewed):
    """The plans of which none beats another in both peak and time. Made by `frontier`.

    It keeps the profiled step, so a plan for any budget is made in milliseconds, the first one after one more run of
    the step, for its certificate. All processes that train a model together have the same points, and call `plan`
    together.

    Attributes:
        points: From the plain step, which recomputes nothing, to the lowest peak that was found.
        cost: The quantity that was minimised in addition to the peak.
        device: The device that the bytes are on; when planning without running, the name of the described one.
        ran_out: Whether the search ran out of time, so that better points may be missing.
    """

    _profiled: ProfiledStep = field(repr=False)
    _candidates: tuple[Candidate, ...] = field(repr=False)  # by point, in the process that plans for all

    def plan(self, budget: int | str | FrontierPoint) -> Plan:
        """Return the plan of a point, or of the fastest point that a budget allows; nothing is profiled again.

        The first plan of the frontier runs one plain step if that fits, for its certificate.

        Args:
            budget: As for `torchremat.plan`, or one of the points.

        Raises:
            BudgetError: It is no size, below the lowest point, or a point of another frontier.
        """
        if isinstance(budget, FrontierPoint):
            if budget not in self.points:
                raise BudgetError("the point belongs to another frontier; give one of `points`.")
            size, name, place = budget.budget_bytes, str(budget.budget_bytes), self.points.index(budget)
        else:
            relative = relative_of(budget)
            size = self._profiled.bytes_of(budget) if relative is None else self._bytes_of(relative)
            name, place = str(budget), self._cheapest(size)
            if place is None:
                lowest = self.points[-1]
                raise BudgetError(
                    f"no point of the frontier fits the budget of {format_bytes(size)} ({budget}). The lowest needs "
                    f"{lowest.budget_bytes} bytes ({format_bytes(lowest.budget_bytes)}), at {lowest.slowdown:.2f} x "
                    "the plain time."
                )
        return self._profiled.for_all(lambda: plan_of(self._profiled, self._candidates[place], size, name))

    def _bytes_of(self, budget: Relative) -> int:
        return budget.bytes(
            plain_bytes=self.points[0].peak_bytes,
            before_bytes=self._profiled.fixed_bytes,
            smallest=lambda: self.points[-1].budget_bytes,
        )

    def _cheapest(self, size: int) -> int | None:
        return next((place for place, point in enumerate(self.points) if point.budget_bytes <= size), None)

    def save(self, path: str | Path) -> None:
        """Write the points to a JSON file.

        Raises:
            OSError: The file cannot be written.
        """
        content = {"device": self.device, "cost": self.cost, "points": [asdict(point) for point in self.points]}
        Path(path).write_text(json.dumps(content, indent=1) + "\n")

    def plot(self, path: str | Path) -> None:
        """Draw peak against time into an image file, with floor and knee; the extension selects the format.

        Raises:
            UnsupportedError: matplotlib is not installed, or does not support the extension.
        """
        draw([self.staircase("")], path, title=f"Peak against time on {self.device}, planned by {self.cost}")

    def _page(self) -> Page:
        return page_of(self)

    def __repr__(self) -> str:
        lowest = f"{format_bytes(self.floor.peak_bytes)} at {self.floor.slowdown:.2f} x plain"
        return f"<Frontier: {len(self.points)} points, {format_bytes(self.points[0].peak_bytes)} plain to {lowest}>"


def check_points(points: int) -> None:
    """Raise an UnsupportedError if a number of points is not valid."""
    if type(points) is not int or points < 2:
        raise UnsupportedError(
            f"points={points!r}: expected an int of at least 2, for the plain step and the lowest peak."
        )


def frontier_of(profiled: ProfiledStep, points: int) -> Frontier:
    """Return the frontier of a profiled step; see `frontier`."""
    candidates: list[Candidate] = []

    def sought() -> tuple[tuple[FrontierPoint, ...], bool]:
        candidates.extend(_sought(profiled, points))
        return tuple(_point(profiled, found) for found in candidates), profiled.solver.search_budget.ran_out

    found, ran_out = profiled.for_all(sought)
    return Frontier(
        points=found,
        cost=profiled.solver.cost_unit,
        device=profiled.device,
        ran_out=ran_out,
        _profiled=profiled,
        _candidates=tuple(candidates),
    )


def _sought(profiled: ProfiledStep, points: int) -> tuple[Candidate, ...]:
    search = profiled.solver
    with heap_set_aside(), search.search_budget.running():
        with search.search_budget.part(0.0, _FLOOR_SHARE):
            lowest, plain = search.floor.prediction.peak_bytes, search.plain.prediction.peak_bytes
        limits = [lowest + (plain - lowest) * place // (points - 1) for place in range(points)]
        with search.search_budget.part(_FLOOR_SHARE, 1.0):
            solved = [
                found for limit in search.search_budget.parts(limits) if (found := search.solve(limit)) is not None
            ]
    return _undominated(profiled, [*solved, search.floor])


def _undominated(profiled: ProfiledStep, candidates: Iterable[Candidate]) -> tuple[Candidate, ...]:
    # First the plain step, even where a store lowers the peak at no cost.
    chosen = [profiled.solver.plain]
    for found in sorted(candidates, key=lambda one: (one.cost, one.slowdown, profiled.peak_of(one))):
        if profiled.peak_of(found) < profiled.peak_of(chosen[-1]):
            chosen.append(found)
    return tuple(chosen)


def _point(profiled: ProfiledStep, found: Candidate) -> FrontierPoint:
    peak_bytes, prediction = profiled.peak_of(found), found.prediction
    recomputes = found is not profiled.solver.plain
    return FrontierPoint(
        budget_bytes=profiled.budget_for(peak_bytes) if recomputes else peak_bytes,
        peak_bytes=peak_bytes,
        step_bytes=prediction.peak_bytes,
        recompute_seconds=prediction.seconds,
        recomputed_flops=prediction.flops,
        stored_bytes=sum(load.planned.stored_bytes for load in found.offloads.values()),
        slowdown=found.slowdown,
    )
