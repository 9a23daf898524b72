"""The options of a framework's user, the base class of their callbacks, and advice in the framework's words."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Unpack

import torch.distributed as dist

from torchremat._compat.collectives import is_distributed
from torchremat.errors import BudgetError, PlanError, StepError, TorchrematError, UnsupportedError, check_flags
from torchremat.planning.budgets import check_budget, relative_of
from torchremat.planning.plan_options import TRAINING, PlanOptions, TrainingKeywords, takes
from torchremat.planning.results.plans import Plan
from torchremat.planning.stepping import NO_STORES


@dataclass(frozen=True, kw_only=True)
class Words:
    """The words of a framework's user for a training.

    Attributes:
        owner: The object with the budget, for example "`MemoryBudget`".
        step: The code that computes the loss of a batch.
        taker: The object that is given the model.
        smaller: A way to need less memory for the same training, as a sentence.
    """

    owner: str
    step: str
    taker: str
    smaller: str

    def advice(self, error: TorchrematError) -> str:
        """Return advice about an error, in a sentence or two."""
        match error:
            case BudgetError():
                return f"{self.smaller} Or give {self.owner} the budget that works."
            case StepError():
                return f"Here the step is {self.step}, on the next batch."
            case PlanError():
                return f"{self.owner} plans by itself: give {self.taker} what `torchremat.unwrap(model)` returns."
            case _:
                return (
                    f"{self.owner} runs {self.step} several times to plan, and recomputes parts of the model in each "
                    f"step. If the model has to stay as it is, train without {self.owner}."
                )


@dataclass(frozen=True, kw_only=True)
class BudgetRequest:
    """The user's options.

    Attributes:
        budget: As for `fit`.
        margin: As for `fit`.
        options: As for `fit`.
        shapes: Whether each shape has its own plan from the first on.

    Raises:
        BudgetError: Budget or margin is not a size.
        UnsupportedError: `shapes` is invalid, or cannot be together with another option.
    """

    budget: int | str
    margin: int | str = 0
    options: PlanOptions
    shapes: bool = False

    def __post_init__(self) -> None:
        check_budget(self.budget, "meta", margin=self.margin)
        check_flags(shapes=self.shapes)
        if self.shapes and relative_of(self.budget) is not None:
            raise BudgetError(
                f"budget={self.budget!r}: with shapes=True the plain peak differs from shape to shape; give the "
                'budget in bytes, like "20GiB".'
            )
        if self.shapes and (self.options.release_gradients == "auto" or self.options.step_stores != NO_STORES):
            raise UnsupportedError(
                'shapes=True with release_gradients="auto", optimizer_store= or parameter_store=: the optimizer steps '
                "in one way for all shapes, so no plan of a shape can choose it. Say release_gradients=True; for the "
                "state call `torchremat.offload_optimizer` before the training."
            )


class MemoryBudget:
    """The base class of the callbacks of this name: they are made from the user's options, as is `BudgetRequest`."""

    @takes(TRAINING)
    def __init__(
        self, budget: int | str, *, margin: int | str = 0, shapes: bool = False, **options: Unpack[TrainingKeywords]
    ) -> None:
        super().__init__()
        self._request = BudgetRequest(budget=budget, margin=margin, options=PlanOptions(**options), shapes=shapes)

    @property
    def plan(self) -> Plan | None:
        """The plan that the model trains under; None before the first batch, after the training, and with `shapes`."""
        return self._planned()

    def _planned(self) -> Plan | None:
        raise NotImplementedError


def say(text: str) -> None:
    """Print a line to stderr, in the first process alone."""
    if not is_distributed() or dist.get_rank() == 0:
        sys.stderr.write(f"torchremat: {text}\n")
