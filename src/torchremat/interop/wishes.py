"""The options of a framework's user, and the base class of callbacks that are made from them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Unpack

from torchremat.errors import BudgetError, UnsupportedError, check_flags
from torchremat.planning.budgets import check_budget, relative_of
from torchremat.planning.plan_options import PlanOptions, TrainingKeywords, takes


@dataclass(frozen=True, kw_only=True)
class Wishes:
    """The user's options.

    Attributes:
        budget: As for `fit`.
        margin: As for `fit`.
        options: As for `fit`.
        shapes: Whether lengths vary so much that each shape has a plan of its own.

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
        if self.shapes and (self.options.release_gradients == "auto" or self.options.optimizer_store is not None):
            raise UnsupportedError(
                'shapes=True with release_gradients="auto" or optimizer_store=: the optimizer steps in one way for all '
                "shapes, so no plan of a shape can choose it. Say release_gradients=True; for the state call "
                "`torchremat.offload_optimizer` before the training."
            )


class MemoryBudget:
    """The base class of the callbacks of this name: they are made from the user's options.

    Args:
        budget: See `Wishes`.
        margin: See `Wishes`.
        shapes: See `Wishes`.
        options: `cost`, `operators`, `release_gradients` and `optimizer_store`; see `PlanOptions`.

    Raises:
        BudgetError: See `Wishes`.
        UnsupportedError: `shapes` or an option is invalid.
    """

    @takes(TrainingKeywords)
    def __init__(
        self, budget: int | str, *, margin: int | str = 0, shapes: bool = False, **options: Unpack[TrainingKeywords]
    ) -> None:
        super().__init__()
        self._wishes = Wishes(budget=budget, margin=margin, options=PlanOptions(**options), shapes=shapes)
