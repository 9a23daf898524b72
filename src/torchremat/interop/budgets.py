"""A budget for a training that a framework runs.

A framework supplies the parts that only it knows, at the right time: model and optimizer after precision, sharding and
checkpoints have been handled, the loss of one batch, and a logger.

    a batch comes          action before its forward
    the first              plan, apply, confirm by one real step
    as large as one known  nothing
    larger, one process    one real step under the plan; if that is above the budget, plan anew for this batch
    larger, several        nothing, as the others do not know of it; the plan warns (ShapeWarning)
    with `shapes=True`     `Adaptive`: a plan for each shape

Missing on purpose: a search for the largest batch in the data. Reading a data set draws random numbers and advances it,
and the training would no longer be the same.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchremat.errors import TorchrematError, UnsupportedError, bug
from torchremat.interop.accumulating import as_the_last
from torchremat.interop.request import BudgetRequest, Words
from torchremat.measuring.optimizers import not_an_optimizer, optimizers_in, steps_alone, with_wrapped
from torchremat.measuring.runs import run_traced, subject_of
from torchremat.optimizing.release import last_microbatch
from torchremat.planning.budgets import check_budget
from torchremat.planning.layout import expect_larger
from torchremat.planning.planner import Planner
from torchremat.planning.profiled_step import check_request
from torchremat.planning.shapes.adaptive import Adaptive
from torchremat.planning.training.fitting import Fitted, fit_with
from torchremat.state.reach import reach
from torchremat.state.snapshot import Snapshot
from torchremat.state.world import World
from torchremat.tensors.structure import tensors_in

Sizes = tuple[tuple[int, ...], ...]
Loss = Callable[[nn.Module, object], object]


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
        clip_value: What the framework clips the elements of gradients to, if it does.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer | None
    log: Callable[[dict[str, float]], None]
    words: Words
    holders: Sequence[object] = ()
    needs_gradients: str = ""
    accumulates: bool = False
    clip_value: float | None = None


class NoLossError(Exception):
    """Raised by a loss for a batch without one, which the framework leaves out: nothing is planned for it."""


class Budgeted:
    """A training within a budget: `with budgeted.step(loss, batch): ...` around forward and backward of each batch.

    Args:
        request: The user's options.
        training: The parts from the framework.

    Attributes:
        training: These parts.

    Raises:
        BudgetError: The budget is more than the device has; or it is a percentage, and each shape has a plan of its
            own.
        StepError: The optimizer has none of the model's parameters.
        UnsupportedError: `shapes=True`, and several processes train together; or gradients are to be released, and the
            framework needs them.
    """

    def __init__(self, request: BudgetRequest, training: Training) -> None:
        self._request = request
        self.training = training
        self._fitted: Fitted | None = None
        self._known: list[Sizes] = []
        self._adaptive: Adaptive[object] | None = None
        self._logged = 0
        self._loss: Loss = _no_loss
        _check_steps_alone(training.optimizer)
        _check_releases(request, training)
        if request.shapes and _are_several():
            raise UnsupportedError(
                f"shapes=True is for one process, and {dist.get_world_size()} train together here: while one of them "
                "learned a shape, the others would wait for its gradients. Leave `shapes` out, and let the longest "
                "batch come first: pad to one length, or group by length."
            )
        # No smaller batch helps if the budget is more than the device has.
        place = next((one.device for one in training.model.parameters()), torch.device("cpu"))
        check_budget(request.budget, place, margin=request.margin)
        with _advised(training):
            if request.shapes:
                self._adaptive = Adaptive(
                    training.model,
                    self._bound,
                    budget=request.budget,
                    margin=request.margin,
                    optimizer=training.optimizer,
                    release_gradients=request.options.release_gradients is True,
                    **request.options.search_keywords,
                )

    @contextmanager
    def step(self, loss: Loss, batch: object, *, is_last: bool = True) -> Generator[None]:
        """Let forward and backward of a batch in the block run within the budget.

        Args:
            loss: Called as `loss(model, batch)`; returns the loss that the framework runs backward from.
            batch: The batch.
            is_last: Whether the optimizer steps after this backward.

        Raises:
            BudgetError: No plan fits; nothing of the step has run.
            StepError: The step returns no loss.
        """
        self._loss = loss
        try:
            with _advised(self.training), ExitStack() as stack:
                with suppress(NoLossError):
                    if self._adaptive is None:
                        self._prepare(batch)
                    else:
                        stack.enter_context(self._adaptive.under(batch))
                if is_last and self.training.accumulates and self.training.optimizer is not None and self.releases:
                    last_microbatch(self.training.optimizer)
                yield
        finally:
            self._loss = _no_loss  # it holds the framework's form of the batch

    @property
    def releases(self) -> bool:
        """Whether gradients are released in the backward, or in the last one of a step."""
        if self._adaptive is not None:
            return self._request.options.release_gradients is True
        return self._fitted is not None and self._fitted.plan.stepping.releases

    def end(self) -> None:
        """Remove the plan from the model. May be called twice."""
        self.log_shapes()
        adaptive, self._adaptive = self._adaptive, None
        if adaptive is not None:
            adaptive.close()
        fitted, self._fitted = self._fitted, None
        if fitted is not None and fitted.plan.is_on(self.training.model):
            fitted.plan.remove(self.training.model)

    # ---------------------------------------------------------------------------------------------------- one plan

    def _prepare(self, batch: object) -> None:
        sizes = _sizes_of(batch)
        if any(_covers(known, sizes) for known in self._known):
            return
        if self._fitted is not None and _are_several():
            return
        self._fit(batch, sizes)

    def _fit(self, batch: object, sizes: Sizes) -> None:
        step = self._step_of(batch)
        if self._fitted is not None:
            if self._still_fits(self._fitted, step):
                self._known.append(sizes)
                return
            # A plan for a larger batch may be above the budget for a batch that is longer in another dimension, so the
            # known sizes do not hold for it.
            self._fitted.plan.remove(self.training.model)
            self._fitted = None
        self._fitted = fitted(self._request, self.training, step)
        if not _are_several():
            expect_larger(self.training.model)
        self._known = [sizes]

    def _still_fits(self, fitted: Fitted, step: Callable[[nn.Module], object]) -> bool:
        subject = subject_of(step, self.training.model, self.training.optimizer)
        device = subject.device()
        with as_the_last(subject):
            with subject.untouched():
                before = subject.before(device)
            risen = run_traced(subject, device, before_bytes=0).peak_beyond(before)
        # The state that the optimizer has after its first step may not exist yet.
        to_come = max(0, fitted.plan.before_bytes["optimizer"] - before.optimizer_bytes)
        return before.total_bytes + to_come + risen <= fitted.limit_bytes

    def _step_of(self, batch: object) -> Callable[[nn.Module], object]:
        held = _tensors_of(batch)

        def step(model: nn.Module, _held: object = held) -> object:
            return self._bound(model, batch)

        return step

    def _bound(self, model: nn.Module, batch: object) -> object:
        """Return the loss of a batch, without side effects on batch and framework."""
        with _kept(self.training.holders):
            return self._loss(model, _again(batch))

    def log_shapes(self) -> None:
        """Log the results of the shapes so far, if any plan has not been logged."""
        plans = () if self._adaptive is None else self._adaptive.plans
        if self._adaptive is None or len(plans) <= self._logged:
            return
        self._logged = len(plans)
        largest = max(plans, key=lambda one: one.measured_bytes or one.peak_bytes)
        measured = largest.measured_bytes or largest.peak_bytes
        slowest = max(one.slowdown for one in plans)
        _log(self.training, self._adaptive.budget_bytes, largest.peak_bytes, measured, slowest)


def fitted(request: BudgetRequest, training: Training, step: Callable[[nn.Module], object]) -> Fitted:
    """Plan for a step, put the plan on the model, confirm it by a real step, and log the result.

    Raises:
        BudgetError: No plan fits; the model is unchanged.
        StepError: The step returns no loss.
    """
    model, optimizer = training.model, training.optimizer
    _check_steps_alone(optimizer)
    _check_releases(request, training)
    with _advised(training), ExitStack() as stack:
        options = replace(request.options, optimizer=optimizer)
        if options.release_gradients:
            options = replace(options, accumulates=training.accumulates, clip_value=training.clip_value or None)
        check_request(model, step, options, request.budget, margin=request.margin)
        stack.enter_context(as_the_last(subject_of(step, model, optimizer)))
        planner = Planner(model, step, **options.keywords)
        found = fit_with(planner, model, budget=request.budget, margin=request.margin)
    plan = found.plan
    _log(training, plan.budget_bytes, plan.peak_bytes, found.peak_bytes, plan.slowdown)
    return found


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


def _check_steps_alone(optimizer: torch.optim.Optimizer | None) -> None:
    if optimizer is not None and not steps_alone(optimizer):
        raise UnsupportedError(
            f"{type(optimizer).__name__} runs the training step itself, and several times, so its bytes cannot be "
            "known beforehand. Train with another optimizer, or plan by hand and leave room for its bytes: "
            "torchremat.fit(model, step, budget=..., margin=...), without `optimizer=`."
        )


def _check_releases(request: BudgetRequest, training: Training) -> None:
    releases, reason = request.options.release_gradients, training.needs_gradients
    if request.shapes and (training.accumulates or training.clip_value):
        reason = reason or "with shapes=True each backward is a step, and nothing is clipped. Leave `shapes` out."
    if releases and reason:
        raise UnsupportedError(
            f"release_gradients={releases!r}: gradients cannot be released in the backward of this training: {reason}"
        )


def _log(training: Training, budget: int, predicted: int, measured: int, slowdown: float) -> None:
    training.log(
        {
            "memory_budget_bytes": float(budget),
            "memory_predicted_bytes": float(predicted),
            "memory_measured_bytes": float(measured),
            "memory_slowdown": round(slowdown, 4),
        }
    )


@contextmanager
def _advised(training: Training) -> Generator[None]:
    try:
        yield
    except TorchrematError as error:
        advice = training.words.advice(error)
        if advice not in getattr(error, "__notes__", ()):
            error.add_note(advice)
        raise


def _no_loss(model: nn.Module, batch: object) -> object:
    raise bug("a step runs that has not begun")


def _sizes_of(batch: object) -> Sizes:
    return tuple(tuple(tensor.shape) for tensor in _tensors_of(batch))


def _tensors_of(batch: object) -> list[Tensor]:
    opened = dict(cast("Mapping[object, object]", batch)) if isinstance(batch, Mapping) else batch
    return tensors_in(opened)


def _covers(known: Sizes, sizes: Sizes) -> bool:
    """Return whether no tensor is larger in any dimension than the known one in the same place."""
    return len(known) == len(sizes) and all(
        len(mine) == len(theirs) and all(a >= b for a, b in zip(mine, theirs, strict=True))
        for mine, theirs in zip(known, sizes, strict=True)
    )


def _again(batch: object) -> object:
    """Return a copy of a batch that a step may take entries from; the tensors are the same."""
    if type(batch) in (dict, list):
        return cast("dict[object, object] | list[object]", batch).copy()
    if isinstance(batch, Mapping) and hasattr(batch, "copy"):
        return cast("dict[object, object]", batch).copy()
    return batch


def _are_several() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


@contextmanager
def _kept(holders: Sequence[object]) -> Generator[None]:
    """Restore the contents of the framework's objects after the block; other code restores models and tensors."""
    owned = [vars(holder) for holder in holders]
    world = World()
    for own in owned:
        for value in own.values():
            if isinstance(value, nn.Module | Tensor | torch.optim.Optimizer):
                world.skip(value)
    reach(world, owned)
    before = Snapshot(world, backs_up=False)
    states = [(one, one.get_state()) for one in world.generators]
    try:
        yield
    finally:
        before.put_back()
        for generator, state in states:
            generator.set_state(state)
