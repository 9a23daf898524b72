"""What the user of a framework can do about an error, in the framework's words."""

from __future__ import annotations

from dataclasses import dataclass

from torchremat.errors import BudgetError, PlanError, StepError, TorchrematError


@dataclass(frozen=True, kw_only=True)
class Words:
    """How the user of a framework speaks of a training.

    Attributes:
        owner: What has the budget, such as "`MemoryBudget`".
        step: What computes the loss of a batch.
        taker: What is given the model.
        smaller: What takes less for the same training, as a sentence.
    """

    owner: str
    step: str
    taker: str
    smaller: str

    def advice(self, error: TorchrematError) -> str:
        """Return what can be done about an error, in a sentence or two."""
        match error:
            case BudgetError():
                return f"{self.smaller} Or give {self.owner} the budget that works."
            case StepError():
                return f"Here the step is {self.step}, on the batch that comes."
            case PlanError():
                return f"{self.owner} plans by itself: give {self.taker} what `torchremat.unwrap(model)` returns."
            case _:
                return (
                    f"{self.owner} runs {self.step} several times to plan, and recomputes parts of the model in each "
                    f"step. If the model has to stay as it is, train without {self.owner}."
                )
