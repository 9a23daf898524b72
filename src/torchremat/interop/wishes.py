"""The options of a framework's user, and the base class of callbacks that are made from them."""

from __future__ import annotations

from dataclasses import dataclass

from torchremat.errors import BudgetError, check_flags
from torchremat.planning.budgets import check_budget, relative_of
from torchremat.planning.searches.chains import Cost, check_cost


@dataclass(frozen=True, kw_only=True)
class Wishes:
    """The user's options.

    Attributes:
        budget: As for `fit`.
        margin: As for `fit`.
        cost: As for `fit`.
        operators: As for `fit`.
        shapes: Whether lengths vary so much that each shape has a plan of its own.

    Raises:
        BudgetError: Budget or margin is not a size.
        UnsupportedError: Another option is invalid.
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
                f"budget={self.budget!r}: with shapes=True the plain peak differs from shape to shape; give the "
                'budget in bytes, like "20GiB".'
            )


class MemoryBudget:
    """The base class of the callbacks of this name: they are made from the user's options.

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
