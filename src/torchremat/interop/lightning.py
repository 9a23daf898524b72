"""A budget as a callback of Lightning's Trainer.

on_train_batch_start     the batch is on its device, and the strategy and the precision are set up: here the
                         step is planned, by the strategy's own `training_step`
on_after_backward        the block that runs within the budget ends
"""

from __future__ import annotations

from contextlib import ExitStack, suppress
from functools import partial
from typing import Any, cast

from torch import nn

from torchremat._compat.binding import overridden
from torchremat.errors import UnsupportedError
from torchremat.interop.training import Training, Words, check_recomputes_nothing
from torchremat.interop.training_budget import Budgeted, NoLossError
from torchremat.interop.training_budget import MemoryBudget as BudgetCallback
from torchremat.measuring.optimizers import parameters_of

try:
    import lightning.pytorch as pl
    from lightning.pytorch.callbacks import GradientAccumulationScheduler
    from lightning.pytorch.utilities.model_helpers import is_overridden
    from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "torchremat.interop.lightning needs lightning, which is not installed. Install it with: "
        "pip install 'torchremat[lightning]'",
        name="lightning",
    ) from error

_WORDS = Words(
    owner="`MemoryBudget`",
    step="`training_step` of the module",
    taker="the module",
    smaller=(
        "In your data module: a smaller `batch_size`, with more `accumulate_grad_batches` in the Trainer, takes less "
        "memory for the same training."
    ),
)


class MemoryBudget(BudgetCallback, pl.Callback):
    """Trains within a budget: `Trainer(..., callbacks=[MemoryBudget("20GiB")])`.

    The first batch is planned for; once a larger one comes, each size has its own plan. Parameters are bit for bit the
    same as in a training without this. Planned and measured values are logged to the trainer's loggers:
    `memory_budget_bytes`, `memory_predicted_bytes`, `memory_measured_bytes`, `memory_slowdown`. After the training the
    model has its original state.

    Args:
        budget: Peak bytes of a training step on each device: an int, `"20GiB"`, or `"60%"` of a plain step's.
        margin: Bytes of the budget to leave free, for the overhead of an allocator.
        shapes: Whether each size of a batch has its own plan from the first on.
        options: `cost`, `operators`, `release_gradients`, `optimizer_store` and `parameter_store`; see `PlanOptions`.

    Raises:
        BudgetError: Budget or margin is not a size.
        UnsupportedError: Another argument is invalid.
    """

    _open: ExitStack | None = None

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Record the training.

        Raises:
            UnsupportedError: The module runs backward by itself, or the strategy does.
        """
        self._end(trainer)  # left by a failed training
        _check(trainer, pl_module)
        training = Training(
            model=cast("nn.Module", trainer.strategy.model),
            optimizer=next(iter(trainer.optimizers)),
            log=partial(_log, trainer),
            words=_WORDS,
            needs_gradients=_needs_gradients(trainer, pl_module),
            accumulates=_accumulates(trainer),
            drops_late=_needs_late_gradients(trainer, pl_module),
            clip_value=trainer.gradient_clip_val,
        )
        self._budgeted = Budgeted(self._request, training)

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Plan if that is needed for this batch."""
        self._close()
        if self._budgeted is not None:
            self._open = ExitStack()
            training = self._budgeted.training
            if not (training.accumulates or training.drops_late):
                # Lightning drops them between forward and backward, and until then they would be in memory.
                next(iter(trainer.optimizers)).zero_grad()
            loss, is_last = partial(_loss, trainer, batch_idx), not trainer.fit_loop._should_accumulate()
            self._open.enter_context(self._budgeted.step(loss, batch, is_last=is_last))
            # What is released is clipped before.
            trainer.gradient_clip_val = None if self._budgeted.releases else self._budgeted.training.clip_value

    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """End the step."""
        self._close()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """End the step of a batch that had no loss."""
        self._close()

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Restore the model."""
        self._end(trainer)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Tell the user what can be done, and restore the model."""
        step, self._open = self._open, None
        if step is not None:
            with suppress(type(exception)):
                step.__exit__(type(exception), exception, exception.__traceback__)
        try:
            self._end(trainer)
        except UnsupportedError as unfinished:  # parameters have stepped, and their step did not end
            exception.add_note(str(unfinished))

    def _close(self) -> None:
        step, self._open = self._open, None
        if step is not None:
            step.close()

    def _end(self, trainer: pl.Trainer) -> None:
        self._close()
        budgeted, self._budgeted = self._budgeted, None
        if budgeted is not None:
            trainer.gradient_clip_val = budgeted.training.clip_value
            budgeted.end()


def _accumulates(trainer: pl.Trainer) -> bool:
    callbacks = cast("list[pl.Callback]", trainer.callbacks)  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]: set by a connector
    schedulers = [one for one in callbacks if isinstance(one, GradientAccumulationScheduler)]
    return trainer.accumulate_grad_batches > 1 or any(one.going_to_accumulate_grad_batches() for one in schedulers)


def _needs_late_gradients(trainer: pl.Trainer, module: pl.LightningModule) -> bool:
    """Return whether user code may see the gradients of a step after the forward of the next one."""
    callbacks = cast("list[pl.Callback]", trainer.callbacks)  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]: set by a connector
    return any(is_overridden(name, module) for name in ("on_before_zero_grad", "optimizer_zero_grad")) or any(
        is_overridden("on_before_zero_grad", one, pl.Callback) for one in callbacks
    )


def _needs_gradients(trainer: pl.Trainer, module: pl.LightningModule) -> str:
    clips = trainer.gradient_clip_val
    if clips and trainer.gradient_clip_algorithm != "value":
        return (
            f"`Trainer(gradient_clip_val={clips})` clips by the norm of all of them. Clip by value, "
            '`gradient_clip_algorithm="value"`, or leave it out.'
        )
    if is_overridden("configure_gradient_clipping", module):
        return (
            f"`configure_gradient_clipping` of {type(module).__name__} reads them. Leave it out; "
            '`Trainer(gradient_clip_val=..., gradient_clip_algorithm="value")` works.'
        )
    if getattr(trainer.precision_plugin, "scaler", None) is not None:
        return '`Trainer(precision="16-mixed")` looks for infinities in all of them. Train with `"bf16-mixed"`.'
    return ""


def _loss(trainer: pl.Trainer, batch_idx: int, model: nn.Module, batch: object) -> object:
    """Return the result of the training step, without any logging."""
    module = trainer.lightning_module
    takes_place = is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2)
    with overridden([module], log=lambda *_, **__: None):  # `log_dict` calls it as well
        output = trainer.strategy.training_step(batch, *([batch_idx] if takes_place else []))
    if output is None:
        raise NoLossError
    return output


def _log(trainer: pl.Trainer, numbers: dict[str, float]) -> None:
    for logger in trainer.loggers:
        logger.log_metrics(numbers, step=trainer.global_step)


def _check(trainer: pl.Trainer, module: pl.LightningModule) -> None:
    if sum(isinstance(one, MemoryBudget) for one in cast("list[pl.Callback]", trainer.callbacks)) > 1:  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]: set by a connector
        raise UnsupportedError("MemoryBudget: the trainer has two of these callbacks. Give it one.")
    if is_param_in_hook_signature(module.training_step, "dataloader_iter", explicit=True):
        raise UnsupportedError(
            f"MemoryBudget: `training_step(dataloader_iter)` of {type(module).__name__} takes batches from the "
            "loader itself, and a step that is planned runs several times. Write it as `training_step(batch, "
            "batch_idx)`."
        )
    if not module.automatic_optimization:
        raise UnsupportedError(
            f"MemoryBudget: {type(module).__name__} has `automatic_optimization = False`: its `training_step` runs "
            "backward and optimizers itself, so there is no loss to plan from. Plan in the module, in "
            "`on_train_start`: torchremat.fit(self.generator, step, budget=...), for each part that has a loss."
        )
    if not parameters_of(trainer.optimizers):
        raise UnsupportedError("MemoryBudget: `configure_optimizers` returns no optimizer, so nothing is trained.")
    check_recomputes_nothing(module, "MemoryBudget")
    name = type(trainer.strategy).__name__
    if "DeepSpeed" in name or name == "FSDPStrategy":
        raise UnsupportedError(
            f"MemoryBudget: {name} runs forward and backward in its own engine, where no step can be planned. "
            "Shard with FSDP2 instead: `Trainer(strategy=ModelParallelStrategy())`."
        )
