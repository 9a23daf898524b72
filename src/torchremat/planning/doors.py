"""`plan` and `frontier`: one call from a model and its step to a plan, or to all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import torch
from torch import nn

from torchremat.measuring.tracebacks import without_our_frames
from torchremat.planning.bars import shown
from torchremat.planning.devices.device import Device
from torchremat.planning.frontiers import POINTS, Frontier, check_points
from torchremat.planning.planner import Planner
from torchremat.planning.plans import Plan
from torchremat.planning.profiles.tracing import Step
from torchremat.planning.requests import check_request
from torchremat.planning.searches.chains import Cost
from torchremat.planning.searches.progress import Progress
from torchremat.tensors.handles import Store


@without_our_frames
def plan(
    model: nn.Module,
    step: Step,
    *,
    budget: int | str,
    optimizer: torch.optim.Optimizer | None = None,
    device: torch.device | str | Path | Device | None = None,
    cost: Cost = "seconds",
    margin: int | str = 0,
    operators: bool = True,
    stores: Sequence[Store] = (),
    allow_lossy: bool = False,
    on: Literal["meta"] | None = None,
    progress: Callable[[Progress], None] | Literal[False] | None = None,
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
        optimizer: If given, its state and the peak of its step count.
        device: The device whose bytes count; that of the first parameter if not given. With `on="meta"` see `Planner`.
        cost: What to minimise, `"seconds"` or `"flops"`.
        margin: Bytes of the budget to leave free, for the allocator's overhead.
        operators: Whether parts of a module may be kept: the outputs of some of its operators.
        stores: Stores where saved tensors may wait instead of being recomputed, if that is faster; the speed of each is
            measured. Without any, nothing is stored.
        allow_lossy: Whether stores may lose digits, so that gradients are not those of the plain run.
        on: `"meta"` to plan without running anything, possibly for an absent device; see `Planner`.
        progress: Called with the progress of planning; an exception that it raises ends planning. If not given, a bar
            is shown in a terminal beyond two seconds, if rich is installed. False for neither.

    Raises:
        BudgetError: The budget or the margin is no size, or no plan fits it.
        DeviceError: With `on="meta"`: the device is not known, or its description lacks something.
        PlanError: The model has wrapped modules already.
        StepError: The step returns no loss, or calls other modules each time.
        UnsupportedError: See `Planner`; or a profiler is active, the device has no allocation events, or stores are
            given for a step that calls several modules.
    """
    check_request(model, step, budget, margin=margin, optimizer=optimizer, device=device, on=on)
    with shown(progress) as observer:
        planner = Planner(
            model,
            step,
            optimizer=optimizer,
            device=device,
            cost=cost,
            operators=operators,
            stores=stores,
            allow_lossy=allow_lossy,
            on=on,
            progress=observer,
        )
        return planner.plan(budget, margin=margin)


@without_our_frames
def frontier(
    model: nn.Module,
    step: Step,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    device: torch.device | str | Path | Device | None = None,
    cost: Cost = "seconds",
    points: int = POINTS,
    operators: bool = True,
    stores: Sequence[Store] = (),
    allow_lossy: bool = False,
    on: Literal["meta"] | None = None,
    progress: Callable[[Progress], None] | Literal[False] | None = None,
) -> Frontier:
    """Return peak and time of a step under the best plan for each budget, from the plain step to the lowest peak.

    Profiles once, as `plan` does; model, gradients, buffers, generators and hooks are as they were.

    Args:
        model: The model.
        step: As for `plan`.
        optimizer: As for `plan`.
        device: As for `plan`.
        cost: What to minimise, `"seconds"` or `"flops"`.
        points: The number of budgets, at least 2, to search plans for. Plans with no lower peak than a cheaper one are
            left out.
        operators: As for `plan`.
        stores: As for `plan`.
        allow_lossy: As for `plan`.
        on: As for `plan`.
        progress: As for `plan`.

    Raises:
        DeviceError: See `plan`.
        PlanError: See `plan`.
        StepError: See `plan`.
        UnsupportedError: See `plan`; or `points` is below 2.
    """
    check_points(points)
    with shown(progress) as observer:
        planner = Planner(
            model,
            step,
            optimizer=optimizer,
            device=device,
            cost=cost,
            operators=operators,
            stores=stores,
            allow_lossy=allow_lossy,
            on=on,
            progress=observer,
        )
        return planner.frontier(points=points)
