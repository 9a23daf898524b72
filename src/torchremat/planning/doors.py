"""`plan` and `frontier`: one call from a model and its step to a plan, or to all of them."""

from __future__ import annotations

from typing import Unpack

from torch import nn

from torchremat.measuring.tracebacks import without_our_frames
from torchremat.planning.frontiers import POINTS, Frontier, check_points
from torchremat.planning.plan_options import PlanKeywords, PlanOptions, takes
from torchremat.planning.planner import planner_shown
from torchremat.planning.plans import Plan
from torchremat.planning.profiled_step import check_request
from torchremat.planning.profiles.tracing import Step


@without_our_frames
@takes(PlanKeywords)
def plan(
    model: nn.Module, step: Step, *, budget: int | str, margin: int | str = 0, **options: Unpack[PlanKeywords]
) -> Plan:
    """Return the fastest plan found under which a training step stays within a budget; nothing is applied.

    A few runs of the step profile it; model, gradients, buffers, generators and hooks are as before afterwards. For
    several budgets of one model make one `Planner`.

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
    with planner_shown(model, step, checked) as planner:
        return planner.plan(budget, margin=margin)


@without_our_frames
@takes(PlanKeywords)
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
