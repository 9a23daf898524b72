"""Plan, apply and verify in one: the model comes back with a plan that one real step has confirmed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar, Unpack

from torch import nn

from torchremat.errors import BudgetError
from torchremat.measuring.observers import observe_allocations
from torchremat.measuring.timeline import MemoryTimeline
from torchremat.measuring.tracebacks import without_our_frames
from torchremat.planning.budgets import margin_of
from torchremat.planning.plan_options import FITTING, PlanKeywords, PlanOptions, takes
from torchremat.planning.planner import Planner, planner_shown
from torchremat.planning.profiled_step import check_request
from torchremat.planning.profiles.optimizers import state_made
from torchremat.planning.profiles.tracing import Step
from torchremat.planning.results.plans import Plan
from torchremat.tensors.sizes import format_bytes

M = TypeVar("M", bound=nn.Module)

_MOST_ATTEMPTS = 4


@dataclass(frozen=True, kw_only=True)
class Fitted:
    """A plan that is on a model, and the measured peak of a real step under it.

    Attributes:
        plan: The plan.
        peak_bytes: The measured peak of a training step.
        limit_bytes: The budget without its margin.
    """

    plan: Plan
    peak_bytes: int
    limit_bytes: int


@without_our_frames
@takes(FITTING)
def fit(model: M, step: Step, *, budget: int | str, margin: int | str = 0, **options: Unpack[PlanKeywords]) -> M:
    """Return the model with a plan applied under which one real step was within the budget.

    If that step is above the budget by any byte, the plan is tightened by as much and tried again, three times.

    Args:
        model: The model.
        step: As for `plan`.
        budget: As for `plan`.
        margin: As for `plan`.
        options: The fields of `PlanOptions`, without `on`.

    Raises:
        BudgetError: The budget or the margin is no size, or no plan fits, by prediction or by measurement; the model is
            as it was.
        PlanError: See `plan`.
        StepError: See `plan`.
        UnsupportedError: See `plan`.
    """
    checked = PlanOptions(**options)
    check_request(model, step, checked, budget, margin=margin)
    with planner_shown(model, step, checked, budget) as planner:
        fit_with(planner, model, budget=budget, margin=margin)
    return model


def fit_with(planner: Planner, model: nn.Module, *, budget: int | str, margin: int | str = 0) -> Fitted:
    """Apply a plan of an existing planner, see `fit`, and return the result."""
    subject = planner.subject  # its writes are known
    device = planner.profile.device
    margin_bytes, peers = margin_of(margin), planner.profiled.placed.peers
    over = attempt = 0
    while True:
        attempt += 1
        plan = planner.plan(budget, margin=margin, tighten_bytes=over)
        plan.apply(model)
        try:
            with state_made(subject):
                risen = max(
                    peers.all(lambda own=plan: _risen(subject.train(observe_allocations(subject, device)), own))
                )
        except BaseException:
            plan.remove(model)
            raise
        measured = max(sum(plan.before_bytes.values()) + risen, plan.optimizer_peak_bytes or 0)
        limit = plan.budget_bytes - margin_bytes
        if measured <= limit:
            return Fitted(plan=plan, peak_bytes=measured, limit_bytes=limit)
        plan.remove(model)
        over += measured - limit
        if attempt == _MOST_ATTEMPTS:
            raise BudgetError(
                f"after {attempt} plans for {format_bytes(plan.budget_bytes)} the measured peak is still "
                f"{format_bytes(measured)}; the last plan predicted {format_bytes(plan.peak_bytes)}. Give a larger "
                "budget, or make the step do the same each time."
            )


def _risen(traced: MemoryTimeline, plan: Plan) -> int:
    """Return the peak of a step with the part of the allocator's slack that the plan does not count."""
    return traced.peak_bytes + max(0, traced.trace.slack_bytes - plan.before_bytes.get("slack", 0))
