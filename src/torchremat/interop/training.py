"""A training that a framework runs: what its user asks of a budget, and the parts that the framework supplies.

Some of these parts no plan can be made for. Advice about errors is in the words of the framework's user.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from torchremat._compat.collectives import is_distributed
from torchremat.errors import BudgetError, PlanError, StepError, TorchrematError, UnsupportedError, check_flags
from torchremat.measuring.optimizers import not_an_optimizer, optimizers_in, steps_alone, with_wrapped
from torchremat.planning.budgets import check_budget, relative_of
from torchremat.planning.plan_options import PlanOptions
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


def say(text: str) -> None:
    """Print a line to stderr, in the first process alone."""
    if not is_distributed() or dist.get_rank() == 0:
        sys.stderr.write(f"torchremat: {text}\n")


@dataclass(frozen=True, kw_only=True, eq=False)
class Training:
    """The parts that a framework supplies.

    Attributes:
        model: The model as the framework calls it, wrapped for data parallelism if it is.
        optimizer: torch's, without the framework's wrapper.
        log: Writes numbers, by name, to the log of the training.
        words: The words of the framework's user for it.
        holders: Objects of the framework that a step may change.
        needs_gradients: Why the framework needs all gradients after the backward, and what to do; "" if it does not.
        accumulates: Whether several backwards come before a step.
        drops_late: Whether gradients that are not released are dropped only after the next forward.
        clip_value: What the framework clips the elements of gradients to, if it does.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer | None
    log: Callable[[dict[str, float]], None]
    words: Words
    holders: Sequence[object] = ()
    needs_gradients: str = ""
    accumulates: bool = False
    drops_late: bool = False
    clip_value: float | None = None


def check_recomputes_nothing(model: nn.Module, owner: str) -> None:
    """Raise if a model of transformers, or one like it, recomputes its layers by itself.

    Raises:
        UnsupportedError: It does.
    """
    if any(getattr(module, "gradient_checkpointing", False) is True for module in model.modules()):
        raise UnsupportedError(
            f"{owner}: the model recomputes its layers already, since `model.gradient_checkpointing_enable()` was "
            "called, and a budget would recompute on top of that. Call `model.gradient_checkpointing_disable()`: "
            "with a budget, only as much is recomputed as has to be."
        )


def raw_optimizer(optimizer: object, *frameworks: type) -> torch.optim.Optimizer | None:
    """Return the outermost optimizer that is not the framework's own; None without one.

    Args:
        optimizer: The optimizer, or the framework's wrapper of it.
        frameworks: The wrapper classes of the framework, such as one that steps only in the last step.

    Raises:
        UnsupportedError: It is not an optimizer, and none can be reached from it.
    """
    if optimizer is None:
        return None
    found = with_wrapped(optimizer) if isinstance(optimizer, torch.optim.Optimizer) else optimizers_in(optimizer)
    for one in found:
        if not isinstance(one, frameworks):
            return one
    raise UnsupportedError(not_an_optimizer(optimizer))


def check_steps_alone(optimizer: torch.optim.Optimizer | None) -> None:
    """Raise if an optimizer runs the training step by itself.

    Raises:
        UnsupportedError: It does.
    """
    if optimizer is not None and not steps_alone(optimizer):
        raise UnsupportedError(
            f"{type(optimizer).__name__} runs the training step itself, and several times, so its bytes cannot be "
            "known beforehand. Train with another optimizer, or plan by hand and leave room for its bytes: "
            "torchremat.fit(model, step, budget=..., margin=...), without `optimizer=`."
        )


def check_releases(request: BudgetRequest, training: Training) -> None:
    """Raise if gradients are to be released, and the training needs them.

    Raises:
        UnsupportedError: They are.
    """
    releases, reason = request.options.release_gradients, training.needs_gradients
    if request.shapes and (training.accumulates or training.clip_value):
        reason = reason or "with shapes=True each backward is a step, and nothing is clipped. Leave `shapes` out."
    if releases and reason:
        raise UnsupportedError(
            f"release_gradients={releases!r}: gradients cannot be released in the backward of this training: {reason}"
        )


@contextmanager
def add_advice(training: Training) -> Generator[None]:
    """Add advice in the framework's words to an error of ours that leaves the block."""
    try:
        yield
    except TorchrematError as error:
        advice = training.words.advice(error)
        if advice not in getattr(error, "__notes__", ()):
            error.add_note(advice)
        raise
