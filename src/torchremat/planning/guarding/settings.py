"""The settings of `guard`, checked before a step runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import nn
from torch.distributed import ProcessGroup

from torchremat.errors import PlanError, UnsupportedError
from torchremat.planning.budgets import check_budget, margin_of
from torchremat.planning.plan_options import PlanOptions
from torchremat.planning.results.plans import Plan
from torchremat.state.guarded import check_named


@dataclass(frozen=True, kw_only=True)
class GuardSettings:
    """The user's settings; see `guard`."""

    attempts: int
    budget: int | str | None
    margin: int | str
    options: PlanOptions
    guard: Sequence[object]
    group: ProcessGroup | None

    def check(self, model: nn.Module, plan: object, backward: object) -> None:
        """Raise if a setting is invalid, or if two settings are incompatible.

        Raises:
            BudgetError: The budget or the margin is not a size, or the margin leaves nothing of it.
            PlanError: `plan` is not a plan, or came together with `budget`.
            UnsupportedError: Another setting is invalid, or `margin` came without `budget`, or the plan changes the
                optimizer's step.
        """
        if type(self.attempts) is not int or self.attempts < 1:
            raise UnsupportedError(f"attempts={self.attempts!r}: expected an int of at least 1.")
        if backward is not None and not callable(backward):
            raise UnsupportedError(
                f"backward={backward!r}: expected a function that takes what the step returned, or None for "
                "`loss.backward()`."
            )
        if self.budget is not None and plan is not None:
            raise PlanError("guard: `budget` and `plan` are given; a plan has its budget. Give one of them.")
        if plan is not None and not isinstance(plan, Plan):
            raise PlanError(f"plan={plan!r}: expected a Plan, as `torchremat.plan` and `Plan.load` return it.")
        if plan is not None and plan.stepping.releases:
            raise UnsupportedError(
                "guard: the plan releases gradients, so that the optimizer steps in the backward, and a step that has "
                "trained cannot be run again. Plan with release_gradients=False."
            )
        if plan is not None and plan.stepping.stores:
            raise UnsupportedError(
                "guard: the plan stores the optimizer's state, and the smaller plans that take its place when memory "
                "runs out would bring that back. Call `torchremat.offload_optimizer` yourself, and plan then."
            )
        if plan is not None and plan.stepping.stores_parameters:
            raise UnsupportedError(
                "guard: the plan stores parameters, and the smaller plans that take its place when memory runs out "
                "would bring those back. Plan without parameter_store=."
            )
        self._check_budget(model)
        for one in _named(self.guard):
            check_named(one)

    def _check_budget(self, model: nn.Module) -> None:
        if self.budget is not None:
            device = next((one.device for one in model.parameters()), torch.device("cpu"))
            check_budget(self.budget, device, margin=self.margin)
        elif margin_of(self.margin):
            raise UnsupportedError(
                f"margin={self.margin!r} needs a budget: without one, the guard finds out by failing what fits. Give "
                "`budget` as well, or make the plan with the margin, `torchremat.plan(..., margin=...)`."
            )


def _named(guard: object) -> Sequence[object]:
    if not isinstance(guard, Sequence) or isinstance(guard, str | bytes):
        raise UnsupportedError(f"guard={guard!r}: expected a list of the objects, such as [cache].")
    return cast("Sequence[object]", guard)
