"""From a profile and a budget to a plan."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Unpack

from torch import nn

from torchremat.errors import BudgetError, DeviceError
from torchremat.measuring.heap import heap_set_aside
from torchremat.measuring.tracebacks import without_our_frames
from torchremat.planning.bars import shown
from torchremat.planning.budgets import Relative, margin_of, relative_of
from torchremat.planning.descriptions import nothing_fits, plan_of
from torchremat.planning.devices.calibration import device_here
from torchremat.planning.devices.machines import Here
from torchremat.planning.frontiers import POINTS, Frontier, check_points, frontier_of
from torchremat.planning.layout import bare
from torchremat.planning.plan_options import PlanKeywords, PlanOptions, takes
from torchremat.planning.plans import Plan
from torchremat.planning.profiled_step import ROOM_BYTES, SOLVING_SHARE, ProfiledStep
from torchremat.planning.profiles.tracing import Step


class Planner(ProfiledStep):
    """Makes plans for one model and step, any number of them from one profile.

    Args:
        model: The model.
        step: Called as `step(model)`; returns the loss of a sample batch, the largest that will be trained on.
        options: The fields of `PlanOptions`. Progress is not shown by default.

    Attributes:
        profile: Bytes and seconds of each unit of the step, the basis of plans; its fields may change without notice.
        solver: The search for trees of the profile; its fields may change too.
        subject: The step with everything that it touches.

    Raises:
        StepError: See `plan`; with `on="meta"` also where the step reads a value of a tensor.
        DeviceError: With `on="meta"`: the device is not known, or its description lacks something.
        PlanError: The model has wrapped modules already.
        UnsupportedError: The stores are not here; with `on="meta"` modules are compiled; or an option is not valid.
    """

    @without_our_frames
    @takes(PlanKeywords)
    def __init__(self, model: nn.Module, step: Step, **options: Unpack[PlanKeywords]) -> None:
        super().__init__(model, step, PlanOptions(**options))

    def save_device(self, path: str | Path) -> None:
        """Write a description of the planner's device, with the kernels of its step, for plans on other machines.

        One more step is run for it, with each operator measured. Its measurements are exact for operators of the same
        shapes; others are estimated from the fastest ones.

        Args:
            path: The JSON file; give it as `device` to `plan(..., on="meta")`.

        Raises:
            DeviceError: The planner itself plans for an absent device.
        """
        if not isinstance(self._machine, Here):
            raise DeviceError(
                f"{self.device} is not on this machine, so it cannot be measured. Make a planner where it is."
            )
        with bare(self.model), heap_set_aside():
            device_here(self.subject, self._machine.device).save(path)

    @without_our_frames
    def plan(self, budget: int | str, *, margin: int | str = 0, tighten_bytes: int = 0) -> Plan:
        """Return the fastest plan found whose predicted peak is within the budget.

        Args:
            budget: Bytes as an int or like `"6GiB"`; a share of the plain step's peak like `"60%"`, or of its part
                beyond the live bytes before the step like `"40% of activations"`; or `"min"`, the smallest that works.
            margin: Bytes of the budget to leave free, for the allocator's overhead.
            tighten_bytes: Bytes by which the measured peak of an earlier plan was above this budget.

        Raises:
            BudgetError: The budget or the margin is no size, or no plan fits; the message says which budget works.
        """
        self.begin()
        relative, margin_bytes = relative_of(budget), margin_of(margin)
        if relative is not None:
            self.plain_peak()
        return self.for_all(lambda: self._planned(budget, relative, margin_bytes, tighten_bytes))

    def _planned(self, budget: int | str, relative: Relative | None, margin_bytes: int, tighten_bytes: int) -> Plan:
        size = (
            self.bytes_of(budget)
            if relative is None
            else self.bytes_of_relative(relative, margin_bytes + tighten_bytes)
        )
        target = size - margin_bytes - tighten_bytes
        optimizer_peak = self.optimizer_peak_bytes or 0
        if self.peak_of(self.solver.plain) > target:
            target -= ROOM_BYTES
        search_budget = self.solver.search_budget
        with heap_set_aside():
            with search_budget.running():
                with search_budget.part(0.0, SOLVING_SHARE):
                    found = self.solver.solve(target - self.fixed_bytes) if target >= optimizer_peak else None
                with search_budget.part(SOLVING_SHARE, 1.0):
                    _ = self.solver.floor  # which the plan and the error report
            if found is None:
                reserved_bytes = margin_bytes + tighten_bytes
                raise BudgetError(nothing_fits(self, size, str(budget), reserved_bytes))
            return plan_of(self, found, size, str(budget), margin_bytes=margin_bytes)

    @without_our_frames
    def frontier(self, *, points: int = POINTS) -> Frontier:
        """Return peak and time of a step under the best plan for each budget; see `torchremat.frontier`."""
        check_points(points)
        self.begin()
        return frontier_of(self, points)


@contextmanager
def planner_shown(model: nn.Module, step: Step, options: PlanOptions) -> Generator[Planner]:
    """Yield a planner whose progress is shown, by a bar if the options have no observer."""
    with shown(options.progress) as observer:
        yield Planner(model, step, **replace(options, progress=observer).keywords)
