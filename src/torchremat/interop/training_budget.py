"""A budget for a training that a framework runs.

A framework supplies the parts that only it knows, at the right time: model and optimizer after precision, sharding and
checkpoints have been handled, the loss of one batch, and a logger.

    a batch comes          action before its forward
    the first              plan, apply, confirm by one real step
    as large as one known  nothing
    larger, one process    `Adaptive` from now on: a plan for each shape. Not so where the budget is a share, and where
                           the plan chooses how the optimizer steps: one real step under the plan, and if that is above
                           the budget a plan anew for this batch
    larger, several        nothing, as the others do not know of it; the plan warns (ShapeWarning)
    with `shapes=True`     `Adaptive` from the first on

Missing on purpose: a search for the largest batch in the data. Reading a data set draws random numbers and advances it,
and the training would no longer be the same.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from typing import Unpack, cast

import torch
from torch import Tensor, nn

from torchremat._compat.binding import overridden
from torchremat._compat.data_parallel import is_data_parallel
from torchremat._compat.sharding import (
    adds_gradients_up,
    reducing,
    unreduced_gradients_again,
    unreduced_gradients_aside,
)
from torchremat.errors import BudgetError, BudgetWarning, UnsupportedError, bug, warn
from torchremat.interop.training import BudgetRequest, Training, add_advice, check_releases, check_steps_alone, say
from torchremat.measuring.observers import observe_allocations
from torchremat.measuring.runs import StepObserver, Subject, subject_of
from torchremat.measuring.untouched import have_gradients
from torchremat.optimizing.partial_steps import note_failed
from torchremat.optimizing.release import last_microbatch
from torchremat.planning.budgets import check_budget
from torchremat.planning.layout import expect_larger
from torchremat.planning.plan_options import TRAINING, PlanOptions, TrainingKeywords, takes
from torchremat.planning.planner import Planner
from torchremat.planning.profiled_step import check_request
from torchremat.planning.results.plans import Plan
from torchremat.planning.shapes.adaptive import Adaptive
from torchremat.planning.training.fitting import Fitted, fit_with
from torchremat.state.reach import reach
from torchremat.state.snapshot import Snapshot
from torchremat.state.world import Reaching
from torchremat.tensors.sizes import format_bytes
from torchremat.tensors.structure import tensors_in

Sizes = tuple[tuple[int, ...], ...]
Loss = Callable[[nn.Module, object], object]


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
        UnsupportedError: Gradients are to be released, and the framework needs them.
    """

    def __init__(self, request: BudgetRequest, training: Training) -> None:
        self._request = request
        self.training = training
        self._fitted: Fitted | None = None
        self._known: list[Sizes] = []
        releases = request.options.release_gradients is True
        self._accumulates = training.accumulates or (training.drops_late and not releases)
        self._adaptive: Adaptive[object] | None = None
        self._logged = 0
        self._loss: Loss = _no_loss
        check_steps_alone(training.optimizer)
        check_releases(request, training)
        # No smaller batch helps if the budget is more than the device has.
        place = next((one.device for one in training.model.parameters()), torch.device("cpu"))
        check_budget(request.budget, place, margin=request.margin)
        with add_advice(training):
            if request.shapes:
                self._adaptive = self._adapt(request)

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
            with add_advice(self.training), ExitStack() as stack:
                with suppress(NoLossError):
                    if self._adaptive is None:
                        self._prepare(batch)
                    if self._adaptive is not None:
                        stack.enter_context(self._under(self._adaptive, batch))
                if is_last and self._accumulates and self.training.optimizer is not None and self.releases:
                    last_microbatch(self.training.optimizer)
                yield
        except BaseException as error:
            note_failed(self.training.optimizer, error)
            raise
        finally:
            self._loss = _no_loss  # it holds the framework's form of the batch

    @property
    def releases(self) -> bool:
        """Whether gradients are released in the backward, or in the last one of a step."""
        if self._adaptive is not None:
            return self._request.options.release_gradients is True
        return self._fitted is not None and self._fitted.plan.stepping.releases

    @property
    def plan(self) -> Plan | None:
        """The plan of all batches so far; None before the first one, and where each shape has its own."""
        return None if self._fitted is None else self._fitted.plan

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
        sizes = tuple(tuple(tensor.shape) for tensor in _tensors_of(batch))
        model, fitted = self.training.model, self._fitted
        is_unseen = not self._accumulates and have_gradients(model.parameters())
        if is_unseen and fitted is not None and fitted.plan.processes == 1:
            # As where they are dropped between forward and backward.
            self._accumulates, self._known = True, []
            fitted.plan.remove(model)
            self._fitted = None
        if any(_covers(known, sizes) for known in self._known):
            return
        if self._fitted is not None and self._fitted.plan.processes > 1:
            return
        self._fit(batch, sizes)

    def _fit(self, batch: object, sizes: Sizes) -> None:
        step = self._step_of(batch)
        if self._fitted is not None:
            by_shape = self._by_shape()
            if by_shape is None and self._still_fits(self._fitted, step):
                self._known.append(sizes)
                return
            # A plan for a larger batch may be above the budget for a batch that is longer in another dimension, so the
            # known sizes do not hold for it.
            self._fitted.plan.remove(self.training.model)
            self._fitted = None
            if by_shape is not None:
                say("batches come in several sizes: from now on each size has its own plan")
                self._adaptive = self._adapt(by_shape)
                return
        self._fitted = plan_and_confirm(self._request, replace(self.training, accumulates=self._accumulates), step)
        if self._fitted.plan.processes == 1:
            expect_larger(self.training.model)
        self._known = [sizes]

    def _by_shape(self) -> BudgetRequest | None:
        """Return the request with a plan for each shape; None if it is for a share of a peak, or lets a plan choose."""
        with suppress(BudgetError, UnsupportedError):
            request = replace(self._request, shapes=True)
            check_releases(request, self.training)
            return request
        return None

    @contextmanager
    def _under(self, adaptive: Adaptive[object], batch: object) -> Generator[None]:
        """Let a step under the plan of its shape that is measured above the budget go on with a warning.

        With `shapes=True` it raises: who asks for that is told that sizes are hidden in the batches.
        """
        with ExitStack() as stack:
            stack.enter_context(adaptive.under(batch))
            yield
            if not self._request.shapes:
                try:
                    stack.close()
                except BudgetError as error:
                    warn(str(error), BudgetWarning)

    def _adapt(self, request: BudgetRequest) -> Adaptive[object]:
        return Adaptive(
            self.training.model,
            self._compute_loss,
            budget=request.budget,
            margin=request.margin,
            optimizer=self.training.optimizer,
            release_gradients=request.options.release_gradients is True,
            accumulates=self._accumulates,
            group=request.options.group,
            cost=request.options.cost,
            operators=request.options.operators,
        )

    def _still_fits(self, fitted: Fitted, step: Callable[[nn.Module], object]) -> bool:
        training = self.training
        subject = subject_of(step, training.model, training.optimizer, accumulates=self._accumulates or None)
        device = subject.device()
        with as_the_last(subject):
            traced = subject.train(observe_allocations(subject, device))
        before = traced.before
        # The state that the optimizer has after its first step may not exist yet.
        to_come = max(0, fitted.plan.before_bytes["optimizer"] - before.optimizer_bytes)
        return before.total_bytes + to_come + traced.peak_beyond(before) <= fitted.limit_bytes

    def _step_of(self, batch: object) -> Callable[[nn.Module], object]:
        held = _tensors_of(batch)

        def step(model: nn.Module, _held: object = held) -> object:
            return self._compute_loss(model, batch)

        return step

    def _compute_loss(self, model: nn.Module, batch: object) -> object:
        """Return the loss of a batch, without side effects on batch and framework."""
        with _restore_after(self.training.holders):
            return self._loss(model, _copy_batch(batch))

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


class MemoryBudget:
    """The base class of the callbacks of this name: they are made from the user's options, as is `BudgetRequest`."""

    _budgeted: Budgeted | None = None  # while it trains

    @takes(TRAINING)
    def __init__(
        self, budget: int | str, *, margin: int | str = 0, shapes: bool = False, **options: Unpack[TrainingKeywords]
    ) -> None:
        super().__init__()
        self._request = BudgetRequest(budget=budget, margin=margin, options=PlanOptions(**options), shapes=shapes)

    @property
    def plan(self) -> Plan | None:
        """The plan that the model trains under; None before the first batch, after the training, and with `shapes`."""
        return None if self._budgeted is None else self._budgeted.plan


def plan_and_confirm(request: BudgetRequest, training: Training, step: Callable[[nn.Module], object]) -> Fitted:
    """Plan for a step, put the plan on the model, confirm it by a real step, and log the result.

    Raises:
        BudgetError: No plan fits; the model is unchanged.
        StepError: The step returns no loss.
    """
    model, optimizer = training.model, training.optimizer
    check_steps_alone(optimizer)
    check_releases(request, training)
    with add_advice(training), ExitStack() as stack:
        options = replace(request.options, optimizer=optimizer, accumulates=training.accumulates)
        if options.release_gradients:
            options = replace(options, clip_value=training.clip_value or None)
        check_request(model, step, options, request.budget, margin=request.margin)
        say(f"planning for a budget of {request.budget}, for batches up to this one: a few dozen of its steps")
        stack.enter_context(as_the_last(subject_of(step, model, optimizer)))
        planner = Planner(model, step, within=request.budget, **options.keywords)
        fitted = fit_with(planner, model, budget=request.budget, margin=request.margin)
    plan = fitted.plan
    say(
        f"planned in {plan.planning_seconds:.1f} s and {plan.planning_steps} steps: {format_bytes(fitted.peak_bytes)} "
        f"measured, {format_bytes(plan.budget_bytes)} allowed; {plan.recomputed_calls} calls are recomputed, "
        f"{plan.slowdown:.2f} x the time of a plain step predicted"
    )
    _log(training, plan.budget_bytes, plan.peak_bytes, fitted.peak_bytes, plan.slowdown)
    return fitted


def _log(training: Training, budget: int, predicted: int, measured: int, slowdown: float) -> None:
    training.log(
        {
            "memory_budget_bytes": float(budget),
            "memory_predicted_bytes": float(predicted),
            "memory_measured_bytes": float(measured),
            "memory_slowdown": round(slowdown, 4),
        }
    )


def _no_loss(model: nn.Module, batch: object) -> object:
    raise bug("a step runs that has not begun")


def _tensors_of(batch: object) -> list[Tensor]:
    opened = dict(cast("Mapping[object, object]", batch)) if isinstance(batch, Mapping) else batch
    return tensors_in(opened)


def _covers(known: Sizes, sizes: Sizes) -> bool:
    """Return whether no tensor is larger in any dimension than the known one in the same place."""
    return len(known) == len(sizes) and all(
        len(mine) == len(theirs) and all(a >= b for a, b in zip(mine, theirs, strict=True))
        for mine, theirs in zip(known, sizes, strict=True)
    )


def _copy_batch(batch: object) -> object:
    """Return a copy of a batch that a step may take entries from; the tensors are the same."""
    if type(batch) in (dict, list):
        return cast("dict[object, object] | list[object]", batch).copy()
    if isinstance(batch, Mapping) and hasattr(batch, "copy"):
        return cast("dict[object, object]", batch).copy()
    return batch


@contextmanager
def _restore_after(holders: Sequence[object]) -> Generator[None]:
    """Restore the contents of the framework's objects after the block; other code restores models and tensors."""
    owned = [vars(holder) for holder in holders]
    world = Reaching()
    for own in owned:
        for value in own.values():
            if isinstance(value, nn.Module | Tensor | torch.optim.Optimizer):
                world.skip(value)
    reach(world, owned)
    with ExitStack() as stack:
        for generator in world.generators:
            stack.callback(generator.set_state, generator.get_state())
        stack.callback(Snapshot(world, backs_up=False).put_back)
        yield


@contextmanager
def as_the_last(subject: Subject) -> Generator[None]:
    """Make each run of a step in the block like the last of the steps whose gradients the framework accumulates.

    Only in that one the framework reduces gradients over processes. It is the largest, so the plan is for it, whichever
    step comes first: the accumulated gradients of the earlier steps are in memory, and so is the memory that reduces
    them.

        DistributedDataParallel    `.grad`, as in one process; the last step fills buckets, which count in any case
        FSDP2                      whole gradients, not only this process's shard: they exist once a step has run

    Raises:
        StepError: The step returns no loss.
    """
    modules = [module for model in subject.models for module in model.modules()]
    with overridden(filter(is_data_parallel, modules), require_backward_grad_sync=True):
        if not adds_gradients_up(modules):
            yield
            return
        put_there = subject.train(_keep_unreduced(modules))
        with unreduced_gradients_aside(modules), reducing(modules):
            put_there()
            yield


def _keep_unreduced(modules: Sequence[nn.Module]) -> StepObserver[Callable[[], None]]:
    yield
    yield
    return unreduced_gradients_again(modules)
