"""A budget as a replacement of `accelerator.prepare`.

With accelerate the loop belongs to the user, so `prepare` is the only call at the right program point: after it,
precision and sharding are final.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TypeVar, Unpack, cast
from weakref import WeakKeyDictionary, WeakMethod

import torch
from torch import nn

from torchremat.errors import StepError, UnsupportedError
from torchremat.interop.training import BudgetRequest, Training, Words, check_recomputes_nothing, raw_optimizer
from torchremat.interop.training_budget import Budgeted, plan_and_confirm
from torchremat.measuring.step import check_takes
from torchremat.planning.plan_options import TRAINING, PlanOptions, TrainingKeywords, takes

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

_WORDS = Words(
    owner="`prepare`",
    step="the `step` that `prepare` was given",
    taker="it",
    smaller=(
        "In your loop: a smaller batch, with more `Accelerator(gradient_accumulation_steps=...)`, takes less memory "
        "for the same training."
    ),
)


@dataclass(kw_only=True, eq=False)
class _Shaped:
    """A training in which each shape has a plan."""

    budgeted: Budgeted
    step: Callable[..., object]
    has_begun: bool = False


# By the result of `prepare`, which neither the training nor its model holds: `accelerator.free_memory()` drops it.
_shaped: WeakKeyDictionary[torch.optim.Optimizer, _Shaped] = WeakKeyDictionary()


@takes(TRAINING)
def prepare(
    accelerator: accelerate.Accelerator,
    model: M,
    optimizer: torch.optim.Optimizer,
    step: Callable[..., object],
    *,
    budget: int | str,
    margin: int | str = 0,
    shapes: bool = False,
    **options: Unpack[TrainingKeywords],
) -> tuple[M, AcceleratedOptimizer]:
    """Return the result of `accelerator.prepare(model, optimizer)`, with a plan that a real step has confirmed.

    The plan is made under the accelerator's precision and sharding, in training mode. Planned and measured values are
    logged to the existing trackers (`accelerator.init_trackers` before): `memory_budget_bytes`,
    `memory_predicted_bytes`, `memory_measured_bytes`, `memory_slowdown`. `torchremat.unwrap(model)` takes the plan off.

    With `shapes=True` nothing is planned yet, and nothing stays on the model: each batch is planned when it comes, in
    `within_budget(optimizer, batch)`.

    Args:
        accelerator: The accelerator.
        model: The model, not prepared.
        optimizer: Its optimizer, not prepared.
        step: Called as `step(model)` with the prepared model; runs the forward on a sample batch, the largest that will
            be trained on, and returns the loss. With `shapes=True` called as `step(model, batch)`.
        budget: Peak bytes of a training step on each device: an int, `"20GiB"`, or `"60%"` of a plain step's.
        margin: Bytes of the budget to leave free, for the overhead of an allocator.
        shapes: Whether each shape of a batch has its own plan, where lengths vary much.
        options: `cost`, `operators`, `release_gradients`, `optimizer_store` and `parameter_store`; see `PlanOptions`.

    Raises:
        BudgetError: Budget or margin is not a size, or no plan fits.
        StepError: The step returns no loss, or an argument is invalid.
        UnsupportedError: The model recomputes by itself, or a separate engine runs backward.
    """
    request = BudgetRequest(budget=budget, margin=margin, options=PlanOptions(**options), shapes=shapes)
    _check(accelerator, model)
    if shapes and callable(step):
        check_takes(step, "step(model, batch)", model, None)
    prepared, wrapped = cast("tuple[M, AcceleratedOptimizer]", accelerator.prepare(model, optimizer))
    training = Training(
        model=prepared,
        optimizer=raw_optimizer(wrapped, AcceleratedOptimizer),
        log=partial(_log, WeakMethod(accelerator.log)),
        words=_WORDS,
        needs_gradients=_needs_gradients(accelerator),
        accumulates=accelerator.gradient_accumulation_steps > 1,
    )
    if shapes:
        _shaped[wrapped] = shaped = _Shaped(budgeted=Budgeted(request, training), step=step)
        _expect_batches(cast("torch.optim.Optimizer", training.optimizer), shaped)
        return prepared, wrapped
    with ExitStack() as stack:
        if not any(module.training for module in prepared.modules()):  # one that is so in part is as it was intended
            prepared.train()
            stack.callback(prepared.eval)
        plan_and_confirm(request, training, cast("Callable[[nn.Module], object]", step))
    return prepared, wrapped


@contextmanager
def within_budget(optimizer: torch.optim.Optimizer, batch: object) -> Generator[None]:
    """Let the block run forward and `accelerator.backward` of a batch within the budget, under a plan for its shape.

    The block runs both once, and not the optimizer's step.

    Args:
        optimizer: The optimizer that `prepare(..., shapes=True)` has returned.
        batch: The batch, as the `step` given to `prepare` takes it.

    Raises:
        BudgetError: No plan fits, and nothing of the step has run; or the step was measured above the budget.
        StepError: `prepare(..., shapes=True)` has not returned this optimizer, or the step returns no loss.
    """
    shaped = _shaped.get(optimizer) if isinstance(optimizer, AcceleratedOptimizer) else None
    if shaped is None:
        raise StepError(
            "optimizer: expected the one that `prepare(..., shapes=True)` returned, not another "
            f"{type(optimizer).__name__}. Without `shapes=True` the plan is on the model already, and you can leave "
            "this block out."
        )
    shaped.has_begun = True
    with shaped.budgeted.step(shaped.step, batch):
        yield
    shaped.budgeted.log_shapes()


def _needs_gradients(accelerator: accelerate.Accelerator) -> str:
    if accelerator.gradient_accumulation_steps > 1:
        return "`Accelerator(gradient_accumulation_steps=...)` adds up those of several backwards. Leave it out."
    if accelerator.scaler is not None:
        return 'a loss scaler looks for infinities in all gradients before the step. Use `mixed_precision="bf16"`.'
    return ""


def _expect_batches(optimizer: torch.optim.Optimizer, shaped: _Shaped) -> None:
    """Raise in the first step of the optimizer if no batch has come within the budget by then."""

    def check(*_: object) -> None:
        handle.remove()
        if not shaped.has_begun:
            raise UnsupportedError(
                "prepare: the optimizer steps, but no batch has run in a `within_budget` block, so nothing was "
                "planned. Put forward and backward of each batch into `with "
                "torchremat.interop.accelerate.within_budget(optimizer, batch):`."
            )

    handle = optimizer.register_step_pre_hook(check)


def _log(log: WeakMethod[Callable[..., None]], numbers: dict[str, float]) -> None:
    told = log()  # the accelerator holds the optimizer, which is the key of a training
    if told is not None:
        told(numbers, step=0)


def _check(accelerator: accelerate.Accelerator, model: nn.Module) -> None:
    if not isinstance(accelerator, accelerate.Accelerator):  # pyright: ignore[reportUnnecessaryIsInstance]: users are not type-checked
        raise StepError(f"accelerator: expected an accelerate.Accelerator, got {type(accelerator).__name__}.")
    if not isinstance(model, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]: users are not type-checked
        raise StepError(f"model: expected a torch.nn.Module, got {type(model).__name__}.")
    check_recomputes_nothing(model, "prepare")
    engine = accelerator.distributed_type.value
    if engine in ("DEEPSPEED", "MEGATRON_LM"):
        raise UnsupportedError(
            f"prepare: {engine} runs backward and optimizer in its own engine, where no step can be planned. "
            "Shard with FSDP2 instead: `Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))`."
        )
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    if plugin is not None and plugin.activation_checkpointing:
        raise UnsupportedError(
            "prepare: `FullyShardedDataParallelPlugin(activation_checkpointing=True)` recomputes every layer already, "
            "and a budget would recompute on top of that. Take it out."
        )
