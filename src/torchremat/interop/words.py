"""Advice for the user of a framework about an error, in the framework's words."""

from __future__ import annotations

from dataclasses import dataclass

from torchremat.errors import BudgetError, PlanError, StepError, TorchrematError


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
