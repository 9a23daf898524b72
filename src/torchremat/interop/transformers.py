"""A budget as a callback of transformers' `Trainer`, and of its subclasses, for example TRL's.

A callback does not get the trainer, whose loss is needed; but the trainer calls the callback, and so is found among the
callers. From `on_train_begin` to `on_train_end` three methods of that one trainer are wrapped:

    training_step    forward and backward of one batch: the block that runs within the budget
    compute_loss     the batch has been prepared, the model is in training mode, and precision, sharding, adapters and
                     resumed state are final: here the step is planned
    _get_grad_norm   the norm of all gradients, for the log: there is none where gradients are released
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias, cast

import torch
from torch import nn

from torchremat._compat.binding import overridden
from torchremat.errors import UnsupportedError
from torchremat.frames import running
from torchremat.interop.training import Training, Words, check_recomputes_nothing, raw_optimizer
from torchremat.interop.training_budget import Budgeted
from torchremat.interop.training_budget import MemoryBudget as BudgetCallback

try:
    import transformers
    from accelerate.optimizer import AcceleratedOptimizer
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "torchremat.interop.transformers needs transformers and accelerate, which are not both installed. Install "
        "them with: pip install 'torchremat[transformers]'",
        name=error.name,
    ) from error

Plain: TypeAlias = Callable[..., Any]  # a method of the trainer, as it was

_WORDS = Words(
    owner="`MemoryBudget`",
    step="`compute_loss` of the trainer",
    taker="the trainer",
    smaller=(
        "In TrainingArguments: a smaller `per_device_train_batch_size` with more `gradient_accumulation_steps` takes "
        "less memory for the same training."
    ),
)
_COMPILED = (
    "`TrainingArguments(torch_compile=True)` compiles the model as one piece. Leave it out, and compile the layers "
    "before the trainer is made, `for layer in model.model.layers: layer.compile()`: a plan can choose among these."
)


class MemoryBudget(BudgetCallback, transformers.TrainerCallback):
    """Trains within a budget: `Trainer(..., callbacks=[MemoryBudget("20GiB")])`.

    The first batch is planned for; once a larger one comes, each size has its own plan. Parameters are bit for bit the
    same as in a training without this. Planned and measured values are logged: `memory_budget_bytes`,
    `memory_predicted_bytes`, `memory_measured_bytes`, `memory_slowdown`. After the training the model has its original
    state. While gradients are released, `grad_norm` is not logged.

    Args:
        budget: Peak bytes of a training step on each device: an int, `"20GiB"`, or `"60%"` of a plain step's.
        margin: Bytes of the budget to leave free, for the overhead of an allocator.
        shapes: Whether each size of a batch has its own plan from the first on.
        options: `cost`, `operators`, `release_gradients`, `optimizer_store` and `parameter_store`; see `PlanOptions`.

    Raises:
        BudgetError: Budget or margin is not a size.
        UnsupportedError: Another argument is invalid.
    """

    _patch: ExitStack | None = None  # while it trains
    _open: ExitStack | None = None  # while the trainer is in a step

    def on_train_begin(
        self,
        args: transformers.TrainingArguments,
        state: transformers.TrainerState,
        control: transformers.TrainerControl,
        **kwargs: Any,
    ) -> None:
        """Begin to manage the trainer's steps.

        Raises:
            UnsupportedError: The trainer recomputes by itself, has an engine that runs backward, or is not found.
        """
        self._end()  # left by a failed training
        trainer = _trainer_of(self)
        _check(trainer, args)
        methods = {
            "training_step": self._training_step,
            "compute_loss": partial(self._compute_loss, trainer),
            "_get_grad_norm": self._get_grad_norm,
        }
        # Older trainers have no method for the norm, and log none without clipping.
        wrapped = {
            name: partial(own, getattr(trainer, name)) for name, own in methods.items() if hasattr(trainer, name)
        }
        self._patch = ExitStack()
        self._patch.enter_context(overridden([trainer], **wrapped))

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Raise if a step has passed without a plan.

        Raises:
            UnsupportedError: It has.
        """
        if self._patch is not None and self._budgeted is None:
            raise UnsupportedError(
                f"MemoryBudget: {type(_trainer_of(self)).__name__} has trained without calling `compute_loss`, which "
                "is where a step is planned. Leave MemoryBudget out and plan by hand before `trainer.train()`: "
                "torchremat.fit(model, step, budget=...), where `step` computes the same loss as the trainer."
            )

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """Restore model and trainer."""
        self._end()

    def _end(self) -> None:
        patch, self._patch = self._patch, None
        budgeted, self._budgeted = self._budgeted, None
        if patch is not None:
            patch.close()
        if budgeted is not None:
            budgeted.end()

    def _training_step(self, plain: Plain, /, *args: Any, **kwargs: Any) -> Any:
        with ExitStack() as stack:
            self._open = stack
            try:
                return plain(*args, **kwargs)
            finally:
                self._open = None

    def _compute_loss(
        self, trainer: transformers.Trainer, plain: Plain, /, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any
    ) -> Any:
        stack, self._open = self._open, None
        # Evaluation computes losses as well, and a trainer may compute several in one step.
        if stack is not None and torch.is_grad_enabled():
            if self._budgeted is None:
                self._budgeted = Budgeted(self._request, _training_of(trainer, model))
            loss, is_last = partial(_loss, plain, args, kwargs), trainer.accelerator.sync_gradients
            stack.enter_context(self._budgeted.step(loss, inputs, is_last=is_last))
        return plain(model, inputs, *args, **kwargs)

    def _get_grad_norm(self, plain: Plain, /, *args: Any, **kwargs: Any) -> Any:
        if self._budgeted is not None and self._budgeted.releases:
            return None
        return plain(*args, **kwargs)


def _loss(compute: Plain, args: tuple[Any, ...], kwargs: dict[str, Any], model: nn.Module, inputs: object) -> object:
    loss = compute(model, inputs, *args, **kwargs)
    return loss[0] if isinstance(loss, tuple) else loss


def _training_of(trainer: transformers.Trainer, model: nn.Module) -> Training:
    return Training(
        model=model,
        optimizer=raw_optimizer(trainer.optimizer, AcceleratedOptimizer),
        log=partial(transformers.Trainer.log, trainer),  # a subclass's own may also log values gathered so far
        holders=(trainer, trainer.state, trainer.control),
        words=replace(_WORDS, smaller=_COMPILED) if trainer.args.torch_compile else _WORDS,
        needs_gradients=_needs_gradients(trainer),
        accumulates=trainer.args.gradient_accumulation_steps > 1,
    )


def _needs_gradients(trainer: transformers.Trainer) -> str:
    args = trainer.args
    own = type(args).__name__
    if args.max_grad_norm:
        return f"`{own}(max_grad_norm={args.max_grad_norm})` clips by the norm of all of them. Set `max_grad_norm=0`."
    if trainer.accelerator.scaler is not None:
        return f"`{own}(fp16=True)` scales the loss, and looks for infinities in all of them. Set `bf16=True`."
    return ""


def _trainer_of(callback: MemoryBudget) -> transformers.Trainer:
    for frame in running():
        owner = frame.f_locals.get("self")
        if isinstance(owner, transformers.Trainer) and callback in owner.callback_handler.callbacks:
            return owner
    raise UnsupportedError(
        "MemoryBudget: no trainer has called this callback. Give it to a trainer, "
        "`Trainer(..., callbacks=[MemoryBudget(...)])`, and let `trainer.train()` call it."
    )


def _check(trainer: transformers.Trainer, args: transformers.TrainingArguments) -> None:
    own = type(args).__name__
    if sum(isinstance(one, MemoryBudget) for one in trainer.callback_handler.callbacks) > 1:
        raise UnsupportedError("MemoryBudget: the trainer has two of these callbacks. Give it one.")
    flags = [flag for flag in ("gradient_checkpointing", "activation_checkpointing") if getattr(args, flag, False)]
    if flags:  # one is the older name of the other
        raise UnsupportedError(
            f"MemoryBudget: {' or '.join(f'`{own}({flag}=True)`' for flag in flags)} recomputes every layer already, "
            f"and a budget would recompute on top of that. Set `{own}(gradient_checkpointing=False)` (TRL's configs "
            "have it on by default): with a budget, only as much is recomputed as has to be."
        )
    check_recomputes_nothing(cast("nn.Module", trainer.model), "MemoryBudget")
    if trainer.is_deepspeed_enabled:
        raise UnsupportedError(
            "MemoryBudget: DeepSpeed runs backward and optimizer in its own engine, where no step can be "
            "planned. Shard with FSDP2 instead: `TrainingArguments(fsdp=True, fsdp_config={'version': 2})`."
        )
    if args.n_gpu > 1:
        raise UnsupportedError(
            f"MemoryBudget: this one process trains on {args.n_gpu} GPUs with nn.DataParallel, which copies the "
            "model in each step. Start one process for each GPU, `torchrun --nproc-per-node=gpu train.py`, or show "
            "this process only one GPU: `CUDA_VISIBLE_DEVICES=0`."
        )
