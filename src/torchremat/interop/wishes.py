"""What the user of a framework asks for, and what callbacks that are made from it have in common."""

from __future__ import annotations

from dataclasses import dataclass

from torchremat.errors import BudgetError, check_flags
from torchremat.planning.budgets import check_budget, relative_of
from torchremat.planning.searches.chains import Cost, check_cost


@dataclass(frozen=True, kw_only=True)
class Wishes:
    """What the user has asked for.

    Attributes:
        budget: As for `fit`.
        margin: As for `fit`.
        cost: As for `fit`.
        operators: As for `fit`.
        shapes: Whether lengths vary so that each shape is to have a plan of its own.

    Raises:
        BudgetError: Budget or margin is no size.
        UnsupportedError: Another option is something else than it can be.
    """

    budget: int | str
    margin: int | str = 0
    cost: Cost = "seconds"
    operators: bool = True
    shapes: bool = False

    def __post_init__(self) -> None:
        check_budget(self.budget, "meta", margin=self.margin)
        check_cost(self.cost)
        check_flags(operators=self.operators, shapes=self.shapes)
        if self.shapes and relative_of(self.budget) is not None:
            raise BudgetError(
                f"budget={self.budget!r}: with shapes=True the plain peak is another for each shape; give the budget "
                'in bytes, like "20GiB".'
            )


class MemoryBudget:
    """What the callbacks of this name have in common: they are made from what the user asks for.

    Args:
        budget: See `Wishes`.
        margin: See `Wishes`.
        cost: See `Wishes`.
        operators: See `Wishes`.
        shapes: See `Wishes`.

    Raises:
        BudgetError: See `Wishes`.
        UnsupportedError: See `Wishes`.
    """

    def __init__(
        self,
        budget: int | str,
        *,
        margin: int | str = 0,
        cost: Cost = "seconds",
        operators: bool = True,
        shapes: bool = False,
    ) -> None:
        super().__init__()
        self._wishes = Wishes(budget=budget, margin=margin, cost=cost, operators=operators, shapes=shapes)
