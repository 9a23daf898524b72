"""Peak against time over all budgets, so that a budget can be chosen by looking."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from torchremat.errors import BudgetError, UnsupportedError
from torchremat.measuring.heap import heap_set_aside
from torchremat.planning.budgets import Relative, relative_of
from torchremat.planning.descriptions import plan_of, with_optimizer
from torchremat.planning.frontier_data import FrontierData, FrontierPoint
from torchremat.planning.frontier_page import page_of
from torchremat.planning.plans import Plan
from torchremat.planning.profiled_step import ProfiledStep, Solution
from torchremat.planning.simulator.prediction import Candidate
from torchremat.planning.staircases import draw
from torchremat.planning.stepping import PLAIN_STEPPING
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

    _ways: tuple[ProfiledStep, ...] = field(repr=False)  # the first knows the plain step
    _solutions: tuple[Solution, ...] = field(repr=False)  # by point, in the process that plans for all

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
            size = self._ways[0].bytes_of(budget) if relative is None else self._bytes_of(relative)
            name, place = str(budget), self._cheapest(size)
            if place is None:
                lowest = self.points[-1]
                raise BudgetError(
                    f"no point of the frontier fits the budget of {format_bytes(size)} ({budget}). The lowest needs "
                    f"{lowest.budget_bytes} bytes ({format_bytes(lowest.budget_bytes)}), at {lowest.slowdown:.2f} x "
                    "the plain time."
                )
        first = self._ways[0]
        return with_optimizer(first.for_all(lambda: self._planned(place, size, name)), first.options)

    def _planned(self, place: int, size: int, name: str) -> Plan:
        found = self._solutions[place]
        return plan_of(found.profiled, found.candidate, size, name, beside=self._ways)

    def _bytes_of(self, budget: Relative) -> int:
        first = self._ways[0]
        return budget.bytes(
            plain_bytes=self.points[0].peak_bytes if first.stepping == PLAIN_STEPPING else first.known_plain()[0],
            before_bytes=first.plain_fixed_bytes,
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


def frontier_of(ways: Sequence[ProfiledStep], points: int) -> Frontier:
    """Return the frontier of a step that was profiled in some ways of stepping; see `frontier`."""
    first, solutions = ways[0], list[Solution]()

    def sought() -> tuple[tuple[FrontierPoint, ...], bool]:
        every = [Solution(profiled=way, candidate=one) for way in ways for one in _sought(way, points)]
        solutions.extend(_undominated(every))
        ran_out = any(way.solver.search_budget.ran_out for way in ways)
        return tuple(_point(one) for one in solutions), ran_out

    found, ran_out = first.for_all(sought)
    return Frontier(
        points=found,
        cost=first.solver.cost_unit,
        device=first.device,
        ran_out=ran_out,
        _ways=tuple(ways),
        _solutions=tuple(solutions),
    )


def _sought(profiled: ProfiledStep, points: int) -> list[Candidate]:
    search = profiled.solver
    with heap_set_aside(), search.search_budget.running():
        with search.search_budget.part(0.0, _FLOOR_SHARE):
            lowest, plain = search.floor.prediction.peak_bytes, search.plain.prediction.peak_bytes
        limits = [lowest + (plain - lowest) * place // (points - 1) for place in range(points)]
        with search.search_budget.part(_FLOOR_SHARE, 1.0):
            solved = [
                found for limit in search.search_budget.parts(limits) if (found := search.solve(limit)) is not None
            ]
    return [search.plain, *solved, search.floor]


def _undominated(solutions: Sequence[Solution]) -> list[Solution]:
    # First the plain step, even where a store lowers the peak at no cost.
    chosen = [solutions[0]]
    for found in sorted(solutions, key=lambda one: (one.cost, one.slowdown, one.peak_bytes)):
        if found.peak_bytes < chosen[-1].peak_bytes:
            chosen.append(found)
    return chosen


def _point(solution: Solution) -> FrontierPoint:
    profiled, found = solution.profiled, solution.candidate
    peak_bytes, prediction = solution.peak_bytes, found.prediction
    is_plain = found is profiled.solver.plain
    return FrontierPoint(
        budget_bytes=peak_bytes if is_plain else profiled.budget_for(peak_bytes),
        peak_bytes=peak_bytes,
        step_bytes=prediction.peak_bytes,
        recompute_seconds=prediction.seconds,
        recomputed_flops=prediction.flops,
        stored_bytes=sum(load.planned.stored_bytes for load in found.offloads.values()),
        slowdown=solution.slowdown,
        stepping=profiled.stepping,
    )
