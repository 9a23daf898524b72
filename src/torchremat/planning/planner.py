"""`Planner`, and `plan` and `frontier`: from a model, its step and a budget to a plan, or to all of them."""

from __future__ import annotations

import math
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Unpack

from torch import nn

from torchremat.errors import BudgetError, BudgetWarning, DeviceError, warn
from torchremat.measuring.exhaustion import is_out_of_memory, let_go
from torchremat.measuring.heap import free_unused, heap_set_aside
from torchremat.measuring.tracebacks import without_our_frames
from torchremat.planning.bars import shown
from torchremat.planning.budgets import Relative, checked_bytes, margin_of, relative_of
from torchremat.planning.devices.calibration import device_here
from torchremat.planning.devices.machines import Here
from torchremat.planning.layout import bare
from torchremat.planning.placed_step import PlacedStep
from torchremat.planning.plan_options import PLANNING, PlanKeywords, PlanOptions, takes
from torchremat.planning.profiled_step import SOLVING_SHARE, ProfiledStep, Solution, check_request
from torchremat.planning.profiles.tracing import Step
from torchremat.planning.results.descriptions import nothing_fits, plan_of
from torchremat.planning.results.frontiers import POINTS, Frontier, check_points, frontier_of
from torchremat.planning.results.plan_data import PlainSource, with_given
from torchremat.planning.results.plans import Plan
from torchremat.planning.searches.storing import LEAST_GAIN
from torchremat.planning.stepping import Stepping
from torchremat.tensors.sizes import format_bytes


@dataclass(frozen=True, kw_only=True)
class BudgetGiven:
    """A budget as a process gives it.

    Attributes:
        budget: The budget.
        margin_bytes: Bytes of it to leave free.
        tighten_bytes: Bytes by which the measured peak of an earlier plan was above it.
    """

    budget: int | str
    margin_bytes: int
    tighten_bytes: int

    @property
    def relative(self) -> Relative | None:
        """The budget as a share, if it is one."""
        return relative_of(self.budget)

    @property
    def reserved_bytes(self) -> int:
        """Bytes of it that the plan must not use."""
        return self.margin_bytes + self.tighten_bytes

    def __str__(self) -> str:
        margin = f" with {format_bytes(self.margin_bytes)} left free" if self.margin_bytes else ""
        return f"{self.budget}{margin}"


class Planner:
    """Makes plans for one model and step, any number of them from one profile.

    Args:
        model: The model.
        step: Called as `step(model)`; returns the loss of a sample batch, the largest that will be trained on.
        within: Bytes that profiles are kept within, where plans themselves can be, like `"6GiB"`; each plan for a
            budget in bytes is made within that budget in any case.
        options: The fields of `PlanOptions`. Progress is not shown by default.

    Attributes:
        profiled: The step, profiled in the first way of stepping; its fields may change without notice.
        profile: Bytes and seconds of each unit of the step, the basis of plans; its fields may change too.
        solver: The search for trees of the profile; its fields may change too.
        subject: The step with everything that it touches.
        model: The model.
        options: The options.

    Raises:
        StepError: See `plan`; with `on="meta"` also where the step reads a value of a tensor.
        DeviceError: With `on="meta"`: the device is not known, or its description lacks something.
        PlanError: The model has wrapped modules already.
        UnsupportedError: The stores are not here; with `on="meta"` modules are compiled; or an option is not valid.
    """

    @without_our_frames
    @takes(PLANNING)
    def __init__(
        self, model: nn.Module, step: Step, *, within: int | str | None = None, **options: Unpack[PlanKeywords]
    ) -> None:
        limit_bytes = None if within is None or relative_of(within) else checked_bytes(within)
        placed = PlacedStep(model, step, PlanOptions(**options), limit_bytes)
        self._ways = list(placed.options.ways_of_stepping)
        while True:
            try:
                self.profiled = ProfiledStep(placed, self._ways[0])
                break
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error) or len(self._ways) == 1:
                    raise
                let_go(error)
            # A profile takes less memory than any plan that keeps something, so no plan in this way would fit.
            del self._ways[0]
            free_unused()
        self._profiles = {self._ways[0]: self.profiled}
        self._placed, self._peers = placed, placed.peers
        self.model, self.subject, self.options = model, placed.subject, placed.options
        self.profile, self.solver = self.profiled.profile, self.profiled.solver

    def save_device(self, path: str | Path) -> None:
        """Write a description of the planner's device, with the kernels of its step, for plans on other machines.

        One more step is run for it, with each operator measured. Its measurements are exact for operators of the same
        shapes; others are estimated from the fastest ones.

        Args:
            path: The JSON file; give it as `device` to `plan(..., on="meta")`.

        Raises:
            DeviceError: The planner itself plans for an absent device.
        """
        machine = self._placed.machine
        if not isinstance(machine, Here):
            raise DeviceError(
                f"{machine.name} is not on this machine, so it cannot be measured. Make a planner where it is."
            )
        with bare(self.model), heap_set_aside():
            device_here(self.subject, machine.device).save(path)

    @without_our_frames
    def plan(self, budget: int | str, *, margin: int | str = 0, tighten_bytes: int = 0) -> Plan:
        """Return the fastest plan found whose predicted peak is within the budget.

        Args:
            budget: As for `torchremat.plan`.
            margin: As for `torchremat.plan`.
            tighten_bytes: Bytes by which the measured peak of an earlier plan was above this budget.

        Raises:
            BudgetError: The budget or the margin is no size, or no plan fits; the message says which budget works.
        """
        self._placed.begin()
        own = BudgetGiven(budget=budget, margin_bytes=margin_of(margin), tighten_bytes=tighten_bytes)
        solutions: dict[Stepping, Solution] = {}
        with self._peers.together():
            given = list(dict.fromkeys(self._peers.all(lambda: own)))
            sizes = {one: self._bytes_of(one) for one in given}
            tightest = min(sizes, key=lambda one: sizes[one] - one.reserved_bytes)
            with self._placed.within(None if tightest.relative else sizes[tightest]):
                chosen = self._cheapest(sizes[tightest] - tightest.reserved_bytes, solutions)
                found = solutions.get(chosen.stepping)
                made = chosen.for_all(lambda: self._planned(chosen, found, sizes[tightest], tightest))
        if len(given) > 1:
            warn(
                f"the processes that plan together have different budgets ({', '.join(map(str, given))}); the plan is "
                f"for the tightest of them, {format_bytes(made.budget_bytes)}.",
                BudgetWarning,
            )
        return with_given(made, self.options)

    def _planned(self, chosen: ProfiledStep, found: Solution | None, size: int, given: BudgetGiven) -> Plan:
        known, budget = tuple(self._profiles.values()), str(given.budget)
        with heap_set_aside():
            if found is None:
                lowest = min(known, key=lambda one: one.lowest_bytes)
                raise BudgetError(nothing_fits(lowest, size, budget, given.reserved_bytes))
            return plan_of(chosen, found.candidate, size, budget, margin_bytes=given.margin_bytes, beside=known)

    def _cheapest(self, limit_bytes: int, solutions: dict[Stepping, Solution]) -> ProfiledStep:
        """Return the step in the way of stepping with the cheapest tree that fits; the first way if none does.

        A way is profiled once it may be the cheapest. The trees come into `solutions`, in the process that seeks them.
        """

        def sought() -> float:
            if (found := own.best(limit_bytes)) is None:
                return math.inf
            solutions[way] = found
            return found.cost

        chosen, least = self.profiled, math.inf
        for way in self._ways:
            if not self._may_be_cheaper(way, least):
                break
            own = self._in(way)
            _ = own.added_s  # which all processes measure
            cost = self.profiled.by_one(sought)
            if cost + self._least_gain < least:
                chosen, least = own, cost
        return chosen

    def _may_be_cheaper(self, way: Stepping, cost: float) -> bool:
        if math.isinf(cost) or self.solver.cost_unit != "seconds":
            return cost > 0
        if cost <= self._least_gain:
            return False  # the seconds of ways need not be known
        backward_s = self.profile.seconds - self.profile.forward_seconds
        return self._placed.added_s(way, backward_s) + self._least_gain < cost

    @property
    def _least_gain(self) -> float:
        return LEAST_GAIN * self.profile.seconds if self.solver.cost_unit == "seconds" else 0.0

    def _in(self, way: Stepping) -> ProfiledStep:
        """Return the profile in a way of stepping, in all processes."""
        if way not in self._profiles:
            self._profiles[way] = ProfiledStep(self._placed, way, self.profiled)
        return self._profiles[way]

    @property
    def floor_bytes(self) -> int:
        """The smallest budget for which a plan exists, with a little room for errors of the prediction."""
        ways = [self._in(way) for way in self._ways]
        return self.profiled.by_one(lambda: min(one.lowest_bytes for one in ways))

    @property
    def fixed_bytes(self) -> int:
        """Live bytes before every step except the first: they include the optimizer's state.

        Of parameters that wait in a store they include the most that are in memory at once.
        """
        return self.profiled.fixed_bytes

    @property
    def optimizer_peak_bytes(self) -> int | None:
        """The peak of `optimizer.step()`, or None without an optimizer."""
        return self.profiled.optimizer_peak_bytes

    def plain_peak(self) -> tuple[int, PlainSource]:
        """Return the peak of a plain training step, measured if it fits, else predicted."""
        return self.profiled.plain_peak()

    def _bytes_of(self, given: BudgetGiven) -> int:
        """Return a budget in bytes; reserved bytes come on top of the smallest."""
        if given.relative is None:
            return max(self._peers.all(lambda: self.profiled.bytes_of(given.budget)))

        def smallest() -> int:
            found = [self.profiled.by_one(partial(_smallest_bytes, self._in(way))) for way in self._ways]
            return min(found) + given.reserved_bytes

        plain_bytes, _ = self.plain_peak()
        before_bytes = self.profiled.plain_fixed_bytes
        return given.relative.bytes(plain_bytes=plain_bytes, before_bytes=before_bytes, smallest=smallest)

    @without_our_frames
    def frontier(self, *, points: int = POINTS) -> Frontier:
        """Return peak and time of a step under the best plan for each budget; see `torchremat.frontier`."""
        check_points(points)
        self._placed.begin()
        with self._peers.together():
            return frontier_of([self._in(way) for way in self._ways], points)


def _smallest_bytes(profiled: ProfiledStep) -> int:
    with heap_set_aside(), profiled.solver.search_budget.running(1 - SOLVING_SHARE):
        return profiled.smallest_bytes


@contextmanager
def planner_shown(
    model: nn.Module, step: Step, options: PlanOptions, within: int | str | None = None
) -> Generator[Planner]:
    """Yield a planner whose progress is shown, by a bar if the options have no observer."""
    with shown(options.progress) as observer:
        yield Planner(model, step, within=within, **replace(options, progress=observer).keywords)


@without_our_frames
@takes(PLANNING)
def plan(
    model: nn.Module, step: Step, *, budget: int | str, margin: int | str = 0, **options: Unpack[PlanKeywords]
) -> Plan:
    """Return the fastest plan found under which a training step stays within a budget; nothing is applied.

    A few runs of the step profile it; model, gradients, buffers, generators and hooks are as before afterwards. For
    several budgets of one model make one `Planner`. A step that takes gradients itself, with `torch.autograd.grad`, is
    run under each candidate instead, which takes some dozen runs.

    Args:
        model: The model.
        step: Called as `step(model)`; runs the forward on a sample batch and returns the loss.
        budget: Peak bytes of a whole training step: an int, `"6GiB"`, `"800MB"`; `"60%"` of the plain step's peak;
            `"40% of activations"`, a share of the part of that peak beyond the live bytes before the step; or `"min"`,
            the smallest that works.
        margin: Bytes of the budget to leave free, for the allocator's overhead.
        options: The fields of `PlanOptions`.

    Raises:
        BudgetError: The budget or the margin is no size, or no plan fits it.
        DeviceError: With `on="meta"`: the device is not known, or its description lacks something.
        PlanError: The model has wrapped modules already.
        StepError: The step returns no loss, or calls other modules each time.
        UnsupportedError: See `Planner`; or a profiler is active, the device has no allocation events, or stores are
            given for a step that calls several modules.
    """
    checked = PlanOptions(**options)
    check_request(model, step, checked, budget, margin=margin)
    with planner_shown(model, step, checked, budget) as planner:
        return planner.plan(budget, margin=margin)


@without_our_frames
@takes(PLANNING)
def frontier(model: nn.Module, step: Step, *, points: int = POINTS, **options: Unpack[PlanKeywords]) -> Frontier:
    """Return peak and time of a step under the best plan for each budget, from the plain step to the lowest peak.

    Profiles once, as `plan` does; model, gradients, buffers, generators and hooks are as they were.

    Args:
        model: The model.
        step: As for `plan`.
        points: The number of budgets, at least 2, to search plans for. Plans with no lower peak than a cheaper one are
            left out.
        options: The fields of `PlanOptions`.

    Raises:
        DeviceError: See `plan`.
        PlanError: See `plan`.
        StepError: See `plan`.
        UnsupportedError: See `plan`; or `points` is below 2.
    """
    check_points(points)
    with planner_shown(model, step, PlanOptions(**options)) as planner:
        return planner.frontier(points=points)
