"""Peak against time over all budgets, so that a budget can be chosen by looking."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from torchremat.errors import BudgetError, UnsupportedError
from torchremat.json_data import text_of
from torchremat.measuring.heap import heap_set_aside
from torchremat.planning.budgets import Relative, relative_of
from torchremat.planning.profiled_step import ProfiledStep, Solution
from torchremat.planning.results.descriptions import plan_of
from torchremat.planning.results.plan_data import with_given
from torchremat.planning.results.plans import Plan
from torchremat.planning.results.staircases import Staircase, draw, knee_of
from torchremat.planning.searches.chains import Cost
from torchremat.planning.searches.search import TreeSearch
from torchremat.planning.searches.search_budget import TIME_IS_OVER
from torchremat.planning.simulator.prediction import Candidate
from torchremat.planning.stepping import PLAIN_STEPPING, Stepping
from torchremat.tensors.sizes import format_bytes, format_flops
from torchremat.views.charts import staircase_chart
from torchremat.views.page import Fact, Page, Table, TableCell, TableRow, size_cell
from torchremat.views.viewed import Viewed

POINTS = 24  # default number of budgets to search plans for

# The reported share of the search after the lowest peak; tables are made there for all limits.
_FLOOR_SHARE = 0.25


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
class Frontier(Viewed):
    """The plans of which none beats another in both peak and time. Made by `frontier`.

    It keeps the profiled step, so a plan for any budget is made in milliseconds. All processes that train a model
    together have the same points, and call `plan` together.

    Attributes:
        points: From the plain step, which recomputes nothing, to the lowest peak that was found.
        cost: The quantity that was minimised in addition to the peak.
        device: The device that the bytes are on; when planning without running, the name of the described one.
        ran_out: Whether the search ran out of time, so that better points may be missing.
    """

    points: tuple[FrontierPoint, ...]
    cost: Cost
    device: str
    ran_out: bool
    _ways: tuple[ProfiledStep, ...] = field(repr=False)  # the first knows the plain step
    _solutions: tuple[Solution, ...] = field(repr=False)  # by point, in the process that plans for all

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

    def plan(self, budget: int | str | FrontierPoint) -> Plan:
        """Return the plan of a point, or of the fastest point that a budget allows; nothing is profiled again.

        With `certify=True` the first plan of the frontier runs one plain step if that fits, for its certificate; for a
        budget in bytes only if it fits that budget.

        Args:
            budget: As for `torchremat.plan`, or one of the points.

        Raises:
            BudgetError: It is no size, below the lowest point, or a point of another frontier.
        """
        if isinstance(budget, FrontierPoint):
            if budget not in self.points:
                raise BudgetError("the point belongs to another frontier; give one of `points`.")
            size, name, place = budget.budget_bytes, str(budget.budget_bytes), self.points.index(budget)
            limit_bytes = None
        else:
            relative = relative_of(budget)
            size = self._ways[0].bytes_of(budget) if relative is None else self._bytes_of(relative)
            name, place = str(budget), self._cheapest(size)
            limit_bytes = size if relative is None else None
            if place is None:
                lowest = self.points[-1]
                raise BudgetError(
                    f"no point of the frontier fits the budget of {format_bytes(size)} ({budget}). The lowest needs "
                    f"{lowest.budget_bytes} bytes ({format_bytes(lowest.budget_bytes)}), at {lowest.slowdown:.2f} x "
                    "the plain time."
                )
        profiled = next(one for one in self._ways if one.stepping == self.points[place].stepping)

        def planned() -> Plan:
            return plan_of(profiled, self._solutions[place].candidate, size, name, beside=self._ways)

        with profiled.placed.within(limit_bytes):
            return with_given(profiled.for_all(planned), profiled.options)

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
        Path(path).write_text(text_of({"device": self.device, "cost": self.cost, "points": self.points}))

    def plot(self, path: str | Path) -> None:
        """Draw peak against time into an image file, with floor and knee; the extension selects the format.

        Raises:
            UnsupportedError: matplotlib is not installed, or does not support the extension.
        """
        draw([self.staircase("")], path, title=f"Peak against time on {self.device}, planned by {self.cost}")

    def _page(self) -> Page:
        return _page_of(self)

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
        every = [Solution(profiled=way, candidate=one) for way in ways for one in _sought(way.solver, points)]
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


def _sought(search: TreeSearch, points: int) -> list[Candidate]:
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


def _page_of(frontier: Frontier) -> Page:
    """Return the page of a frontier."""
    points, plain, floor, knee = frontier.shown, frontier.points[0], frontier.floor, frontier.knee
    facts = [
        Fact(name="plain", value=format_bytes(plain.peak_bytes), note="the peak of a step that recomputes nothing"),
        Fact(
            name="floor",
            value=format_bytes(floor.peak_bytes),
            note=f"the lowest found, at {floor.slowdown:.2f} x plain",
        ),
    ]
    marks = {len(points) - 1: f"floor: {format_bytes(floor.peak_bytes)}, {floor.slowdown:.2f} x"}
    if knee is not None:
        note = f"at {knee.slowdown:.2f} x plain; below it each byte costs more time than above"
        facts.insert(1, Fact(name="knee", value=format_bytes(knee.peak_bytes), note=note))
        marks[points.index(knee)] = f"knee: {format_bytes(knee.peak_bytes)}, {knee.slowdown:.2f} x"
    facts += [Fact(name="remark", value="", note=remark) for remark in frontier.remarks]
    chart = staircase_chart(
        [point.peak_bytes for point in points],
        [point.slowdown for point in points],
        says=[f"{format_bytes(point.peak_bytes)} at {point.slowdown:.2f} x plain" for point in points],
        marks=marks,
        title="Peak against time",
        note="A plan serves every budget up to the next point.",
    )
    return Page(
        title=f"Peak against time on {frontier.device}, planned by {frontier.cost}",
        facts=tuple(facts),
        charts=(chart,),
        tables=(_table(frontier),),
    )


def _table(frontier: Frontier) -> Table:
    points, whole = frontier.shown, max(1, frontier.shown[0].peak_bytes)
    columns: dict[str, Callable[[FrontierPoint], TableCell]] = {
        "budget": lambda point: size_cell(point.budget_bytes),
        "to pass": lambda point: TableCell(str(point.budget_bytes), point.budget_bytes),
        "peak": lambda point: size_cell(point.peak_bytes),
        "of plain": lambda point: TableCell(f"{100 * point.peak_bytes / whole:.0f}%", point.peak_bytes),
        "time": lambda point: TableCell(f"{point.slowdown:.2f} x", point.slowdown),
        "GFLOP recomputed": lambda point: TableCell(f"{point.recomputed_flops / 1e9:.2f}", point.recomputed_flops),
    }
    if any(point.stored_bytes for point in points):
        columns["stored"] = lambda point: size_cell(point.stored_bytes)
    if any(point.stepping != points[0].stepping for point in points):
        columns["optimizer"] = lambda point: TableCell(str(point.stepping))
    rows = (
        TableRow(cells=tuple(cell(point) for cell in columns.values()), key=str(place))
        for place, point in enumerate(points)
    )
    return Table(title="Points", columns=tuple(columns), rows=tuple(rows))
