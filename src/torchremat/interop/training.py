"""A training that a framework runs: the parts that it supplies, and which of them no plan can be made for."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from torchremat.errors import TorchrematError, UnsupportedError
from torchremat.interop.request import BudgetRequest, Words
from torchremat.measuring.optimizers import not_an_optimizer, optimizers_in, steps_alone, with_wrapped


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
def advised(training: Training) -> Generator[None]:
    """Add advice in the framework's words to an error of ours that leaves the block."""
    try:
        yield
    except TorchrematError as error:
        advice = training.words.advice(error)
        if advice not in getattr(error, "__notes__", ()):
            error.add_note(advice)
        raise
