"""A budget in the place of `accelerator.prepare`.

With accelerate the loop is the user's, so nothing is called at the right moment but `prepare`, after which precision
and sharding are what they will be.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial
from typing import TypeVar, cast

import torch
from torch import nn

from torchremat.errors import StepError, UnsupportedError
from torchremat.interop.budgets import Training, Wishes, check_recomputes_nothing, fitted, raw_optimizer
from torchremat.planning.searches.chains import Cost

try:
    import accelerate
    from accelerate.optimizer import AcceleratedOptimizer
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "torchremat.interop.accelerate needs accelerate, which is not installed. Install it with: "
        "pip install 'torchremat[accelerate]'",
        name="accelerate",
    ) from error

M = TypeVar("M", bound=nn.Module)

_ADVICE = (
    "In your loop: a smaller batch, with more `Accelerator(gradient_accumulation_steps=...)`, takes less for the same "
    "training. Or give `prepare` the budget that works."
)


def prepare(
    accelerator: accelerate.Accelerator,
    model: M,
    optimizer: torch.optim.Optimizer,
    step: Callable[[M], object],
    *,
    budget: int | str,
    margin: int | str = 0,
    cost: Cost = "seconds",
    operators: bool = True,
) -> tuple[M, AcceleratedOptimizer]:
    """Return what `accelerator.prepare(model, optimizer)` does, with a plan on the model that a real step confirmed.

    The plan is made under the accelerator's precision and sharding, in the mode of training. What was planned and
    measured is logged to the trackers that there are (`accelerator.init_trackers` before): `memory_budget_bytes`,
    `memory_predicted_bytes`, `memory_measured_bytes`, `memory_slowdown`. `torchremat.unwrap(model)` takes the plan off.

    Args:
        accelerator: The accelerator.
        model: The model, not prepared.
        optimizer: Its optimizer, not prepared.
        step: Called as `step(model)` with the prepared model; runs the forward on a sample batch, the largest that will
            be trained on, and returns the loss.
        budget: Peak bytes of a training step on each device: an int, `"20GiB"`, or `"60%"` of a plain step's.
        margin: Bytes of the budget to leave free, for what an allocator needs beside the tensors.
        cost: What to minimise, `"seconds"` or `"flops"`.
        operators: Whether parts of a module may be kept: the outputs of some of its operators.

    Raises:
        BudgetError: Budget or margin is no size, or no plan fits.
        StepError: The step returns no loss, or one of the arguments is something else than it can be.
        UnsupportedError: The model recomputes by itself, or an engine of its own runs backward.
    """
    wishes = Wishes(budget=budget, margin=margin, cost=cost, operators=operators)
    _check(accelerator, model)
    prepared, wrapped = cast("tuple[M, AcceleratedOptimizer]", accelerator.prepare(model, optimizer))
    training = Training(
        model=prepared,
        optimizer=raw_optimizer(wrapped, AcceleratedOptimizer),
        log=partial(accelerator.log, step=0),
        advice=_ADVICE,
    )
    with _training_mode(prepared):
        fitted(wishes, training, cast("Callable[[nn.Module], object]", step))
    return prepared, wrapped


@contextmanager
def _training_mode(model: nn.Module) -> Generator[None]:
    """Let a model of which nothing is in the mode of training be so; one that is in part is as it is meant to be."""
    if any(module.training for module in model.modules()):
        yield
        return
    model.train()
    try:
        yield
    finally:
        model.eval()


def _check(accelerator: accelerate.Accelerator, model: nn.Module) -> None:
    if not isinstance(accelerator, accelerate.Accelerator):  # pyright: ignore[reportUnnecessaryIsInstance]: users are not type-checked
        raise StepError(f"accelerator: an accelerate.Accelerator is needed, got {type(accelerator).__name__}.")
    if not isinstance(model, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]: users are not type-checked
        raise StepError(f"model: a torch.nn.Module is needed, got {type(model).__name__}.")
    check_recomputes_nothing(model, "prepare")
    engine = accelerator.distributed_type.value
    if engine in ("DEEPSPEED", "MEGATRON_LM"):
        raise UnsupportedError(
            f"prepare: {engine} runs backward and optimizer in an engine of its own, where no step can be planned. "
            "Shard with FSDP2 instead: `Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))`."
        )
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    if plugin is not None and plugin.activation_checkpointing:
        raise UnsupportedError(
            "prepare: `FullyShardedDataParallelPlugin(activation_checkpointing=True)` recomputes every layer already, "
            "and a budget would recompute on top of that. Take it out."
        )
