"""A budget for batches of changing shapes: each step runs under a plan for the shape of its batch.

    seen before        the plan of its class is put on the model: a fraction of a millisecond
    new, in reach      figures are fitted, a tree is chosen by them: milliseconds; the step is measured
    new, out of reach  the batch is profiled first: a few runs of the step, without side effects

Nothing stays on the model between two steps.

Source: Q. Liao, M. Li, H. Yang et al., "Mimose: an input-aware checkpointing planner for efficient training on GPU",
arXiv 2209.02478. We differ: bytes of storages at every program point are fitted, not one number for each layer, so that
the exact interpreter predicts the peak; and the real peak of a step is checked.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from threading import Lock
from types import TracebackType
from typing import Generic, Self, TypeVar, Unpack, cast

import torch
from torch import Tensor, nn

from torchremat._compat.accelerators import accelerator_of
from torchremat.errors import BudgetError, BudgetWarning, StepError, UnsupportedError, check_flags, warn
from torchremat.measuring.communication import known_groups
from torchremat.measuring.exhaustion import IfItFits
from torchremat.measuring.runs import subject_of
from torchremat.measuring.step import check_takes, loss_of, run_backward
from torchremat.measuring.tracebacks import without_our_frames
from torchremat.measuring.untouched import have_gradients
from torchremat.optimizing.module_runs import keeps_in_store
from torchremat.planning.budgets import bytes_of, check_budget, margin_of, relative_of
from torchremat.planning.devices.fakes import torch_device
from torchremat.planning.devices.machines import Here
from torchremat.planning.exactness.replayability import Repeats
from torchremat.planning.layout import check_bare, installed
from torchremat.planning.parameter_bytes import parameter_bytes
from torchremat.planning.peers.agreement import profiled_together
from torchremat.planning.peers.peers import peers_of
from torchremat.planning.plan_options import ADAPTING, PlanKeywords, PlanOptions, takes
from torchremat.planning.searches.trials import with_ladder
from torchremat.planning.shapes.batches import Look, look_of, step_of
from torchremat.planning.shapes.classes import Classes, PlannedShape
from torchremat.planning.shapes.decisions import Decisions, Measured, Over, ShapeDecision
from torchremat.planning.shapes.fits import Shape
from torchremat.planning.shapes.gauges import calls_noted, gauge
from torchremat.planning.stepping import Stepping, SteppingHandles, check_ways
from torchremat.regions.settings import Settings
from torchremat.tensors.sizes import format_bytes

B = TypeVar("B")
T = TypeVar("T", ShapeDecision, str)


class Adaptive(Generic[B]):
    """Runs training steps within a budget, whatever the shapes of their batches: `loss = adaptive(batch)`.

    A call is `loss = step(model, batch)` and `loss.backward()` under a plan for the shape of the batch; gradients
    accumulate as usual, and count from the first call that begins with some. The dependence of bytes on shapes is
    learned from a few batches, small ones suffice: pass them to `learn`, or let `Adaptive` learn from the first
    batches. Do not call it from two threads at once.

    Args:
        model: The model.
        step: Called as `step(model, batch)`; runs the forward and returns the loss.
        budget: Peak bytes of a whole training step, as an int or like `"6GiB"`.
        margin: Bytes of the budget to leave free, for the allocator's overhead.
        over: What happens to a batch that no plan fits, before it runs, and after a step that was measured above the
            budget: a BudgetError (`"raise"`), or a BudgetWarning (`"warn"`), and a batch that no plan fits runs under
            the plan with the lowest peak.
        shape: Returns the sizes of a batch. Without it these are the sizes of all tensors in it.
        classes: Number of plans to keep, each for a class of shapes.
        options: `optimizer`, `device`, `cost`, `operators`, `release_gradients`, `accumulates` and `group`; see
            `PlanOptions`. With `release_gradients=True` gradients are released in each backward until this is closed,
            and a call is one step of `optimizer`. With `accumulates=True` calls begin with the gradients of calls
            before them, so that all plans count these. Processes of a group call this together, each with its own
            batch: the plan is the one for the largest sizes of any.

    Attributes:
        budget_bytes: The budget.
        learned: Number of profiles made.
        learning_seconds: Seconds spent in profiles.
        planning_seconds: Seconds spent on choosing plans and putting them on the model.
        step_seconds: Seconds spent in steps.

    Raises:
        BudgetError: The budget is no size, more than the device has, or a percentage, though each shape has a plain
            peak of its own.
        PlanError: The model has wrapped modules already.
        StepError: The step is no function of a model and a batch.
        UnsupportedError: `cost`, `over`, `operators`, `shape`, `group` or `classes` is not valid; or see
            `release_gradients`.
    """

    @takes(ADAPTING)
    def __init__(
        self,
        model: nn.Module,
        step: Callable[[nn.Module, B], object],
        *,
        budget: int | str,
        margin: int | str = 0,
        over: Over = "raise",
        shape: Callable[[B], tuple[int, ...]] | None = None,
        classes: int = 256,
        **options: Unpack[PlanKeywords],
    ) -> None:
        if not callable(step):
            raise StepError(
                f"step: expected a function that is called as `step(model, batch)`, got {type(step).__name__}."
            )
        check_takes(step, "step(model, batch)", model, None)
        self._options = checked = PlanOptions(**options)
        optimizer, releases = checked.optimizer, checked.release_gradients
        subject = subject_of(step_of(step), model, optimizer, needs_model=True)
        self._device = subject.device(torch_device(checked.device))
        if relative_of(budget) is not None:
            raise BudgetError(f"budget={budget!r} differs from shape to shape; give the budget in bytes.")
        check_flags(release_gradients=releases)
        if over not in ("raise", "warn"):
            raise UnsupportedError(f"over={over!r}: allowed are 'raise' and 'warn'.")
        if type(classes) is not int or classes < 1:
            raise UnsupportedError(f"classes={classes!r}: expected an int of at least 1.")
        if shape is not None and not callable(shape):  # pyright: ignore[reportUnnecessaryComparison]: users are not type-checked
            raise UnsupportedError(
                f"shape={shape!r}: expected a function that returns the sizes of a batch, or None for the sizes of "
                "all tensors in it."
            )
        check_bare(model)
        check_budget(budget, self._device, margin=margin)
        self.budget_bytes = bytes_of(budget, self._device)
        limit_bytes = self.budget_bytes - margin_of(margin)
        self._peers = peers_of(known_groups([model], ()), checked.group, "adapting")
        self._model = model
        self._step = step
        self._optimizer = optimizer
        self._accumulates = checked.accumulates
        self._shape_of = cast("Callable[[object], tuple[int, ...]] | None", shape)
        self._words = f"{checked.in_words}, over={over!r}, classes={classes}"
        self._decisions = Decisions(
            budget=str(budget),
            budget_bytes=self.budget_bytes,
            limit_bytes=limit_bytes,
            over=over,
            classes=Classes(limit_bytes, classes, self._options),
            optimizer=optimizer,
        )
        self._repeats = Repeats()
        self._lock = Lock()
        self._closed = False
        self.learning_seconds = 0.0
        self.planning_seconds = 0.0
        self.step_seconds = 0.0
        self.learned = 0
        self._handles: SteppingHandles | None = None
        if releases:
            way = Stepping(releases=True)
            check_ways([way], model, optimizer)
            self._handles = SteppingHandles(model, cast("torch.optim.Optimizer", optimizer), way)

    @without_our_frames
    def __call__(self, batch: B) -> Tensor:
        """Run forward and backward of a batch within the budget, and return the loss, detached.

        Args:
            batch: Anything that `step` takes.

        Raises:
            BudgetError: With `over="raise"`: no plan fits, and nothing was run; or the step was measured above the
                budget, with its gradients already computed.
            StepError: The batch has no shape, or the step returns no loss.
            UnsupportedError: Another step is running, or this is closed.
        """
        with self.under(batch):
            loss = loss_of(self._step(self._model, batch))
            result = loss.detach()
            run_backward(loss)
        return result

    @contextmanager
    def under(self, batch: B) -> Generator[None]:
        """Let the block run forward and backward of a batch within the budget, instead of a call.

        For a loop outside your control, like a trainer's. The block does the same with the batch as `step`, and runs
        backward once.

        Args:
            batch: The batch that the block trains on.

        Raises:
            BudgetError: As for a call.
            StepError: As for a call.
            UnsupportedError: As for a call.
        """
        with self._alone():
            look = self._look(batch)
            chosen = self._chosen(look, batch)
            if chosen.refusal and self._decisions.over == "raise":
                raise BudgetError(chosen.refusal)
            yield from self._run(chosen, look, batch)

    @without_our_frames
    def learn(self, *batches: B) -> None:
        """Profile batches, so that others of the same kind can be planned; the model is unchanged.

        Three different lengths determine everything about one varying size, six different shapes about two. Small ones
        are enough: figures are trusted up to four times the sizes seen, and steps beyond the sizes seen are measured.
        """
        with self._alone():
            for batch in batches:
                self._learn(self._look(batch), batch)

    def close(self) -> None:
        """Drop everything learned. A step in progress ends as it would have.

        Raises:
            UnsupportedError: Gradients are released, and `optimizer.step()` has not followed the last backward.
        """
        if self._handles is not None:
            self._handles.remove()
        self._closed = True
        self._decisions.forget()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self.close()
        except UnsupportedError as unfinished:
            if error is None:
                raise
            error.add_note(str(unfinished))

    @property
    def plans(self) -> tuple[PlannedShape, ...]:
        """The plans that are kept, and fit the budget or have run nevertheless; smallest shape first.

        Of several processes the one of the lowest rank has them.
        """
        return self._decisions.plans

    def __str__(self) -> str:
        rows = [
            f"budget     {format_bytes(self.budget_bytes)} on {self._device}",
            f"time       {self.step_seconds:.2f} s in steps, {self.planning_seconds:.2f} s in planning, "
            f"{self.learning_seconds:.2f} s in {self.learned} profiles",
            f"{'shape':<24}  {'steps':>5}  {'predicted':>10}  {'measured':>10}  slowdown",
        ]
        for one in self.plans:
            measured = "-" if one.measured_bytes is None else format_bytes(one.measured_bytes)
            shape = " x ".join(map(str, one.shape))
            rows.append(
                f"{shape:<24}  {one.steps:>5}  {format_bytes(one.peak_bytes):>10}  {measured:>10}  {one.slowdown:.2f}"
            )
        return "\n".join(rows)

    # ---------------------------------------------------------------------------------------------------- choosing

    @contextmanager
    def _alone(self) -> Generator[None]:
        if not self._lock.acquire(blocking=False):
            raise UnsupportedError(
                "another step of this Adaptive is running: a plan is on the model meanwhile, and it holds for one "
                "batch. Call it from one thread, and not from inside its own step."
            )
        try:
            if self._closed:
                raise UnsupportedError("this Adaptive is closed; make a new one.")
            yield
        finally:
            self._lock.release()

    def _look(self, batch: B) -> Look:
        """Return the look of a batch, and let the decisions be about the largest one of all processes."""
        return self._shared(lambda: self._own_look(batch))

    def _own_look(self, batch: B) -> Look:
        if not torch.is_grad_enabled():
            raise StepError("grad mode is off, so there is no backward to plan for; call step(model, batch) itself.")
        check_bare(self._model)
        look = look_of(self._model, batch, self._shape_of, self._device)
        return replace(look, has_gradients=have_gradients(self._model.parameters()))

    def _shared(self, look: Callable[[], Look]) -> Look:
        looks: list[Look] = []

        def sizes() -> tuple[Shape, bool, bool]:
            looks.append(look())
            return looks[0].shape, looks[0].hides, looks[0].has_gradients

        told = self._peers.all(sizes)
        (own,) = looks
        numbers = {len(shape) for shape, *_ in told}
        if len(numbers) > 1:
            raise StepError(
                f"the batches of the processes that train together have {sorted(numbers)} sizes. Give all of them "
                "batches of one kind."
            )
        if not self._accumulates and any(has_gradients for *_, has_gradients in told):
            self._accumulates = True
            self._decisions.forget()
        shape = tuple(max(size) for size in zip(*(shape for shape, *_ in told), strict=True))
        words = own.words if shape == own.shape else f"the largest of all processes: {' x '.join(map(str, shape))}"
        self._decisions.look = replace(own, shape=shape, words=words, hides=any(hides for _, hides, _ in told))
        return own

    def _decided(self, deciding: Generator[bool | T], look: Look, batch: B) -> T:
        """Return what one process decides, in each; where it needs a profile, all make it."""
        while isinstance(found := self._peers.at(0, lambda: next(deciding)), bool):
            self._learn_if_it_can_be(look, batch, is_needed=found)
        return found

    def _chosen(self, look: Look, batch: B) -> ShapeDecision:
        start_s, learning_s = time.perf_counter(), self.learning_seconds
        found = self._decided(self._decisions.choosing(), look, batch)
        self.planning_seconds += time.perf_counter() - start_s - (self.learning_seconds - learning_s)
        return found

    def _learn(self, look: Look, batch: B) -> None:
        step = step_of(self._step, batch, look.tensors)
        # A batch may be learned after its step, whose own gradients are there then.
        begins = True if self._accumulates else False if have_gradients(self._model.parameters()) else None
        subject = subject_of(step, self._model, self._optimizer, accumulates=begins)
        start_s = time.perf_counter()
        leaves = self._peers.at(0, self._decisions.takes_apart)
        machine = Here(self._device)
        with self._peers.together():
            agreed = profiled_together(
                self._peers, self._model, subject, machine, self._repeats, self._words, leaves=leaves
            )
            found = with_ladder(agreed.pair, self._options, self._peers.at(0, self._decisions.ladders))
        # The largest step is of another process each time, and one process decides by all of them.
        pair = self._peers.at(agreed.largest, lambda: found)
        if keeps_in_store(self._model):
            away = parameter_bytes(self._model, pair.blocks.units.trace, self._device)
            pair = pair.each(lambda own: replace(own, before=away.added_to(own.before)))
        self._shared(lambda: look)  # others may have joined
        self._decisions.tighten(min(self._peers.all(lambda: self._decisions.limit_bytes)))
        self._decisions.learn(pair)
        self.learned += 1
        self.learning_seconds += time.perf_counter() - start_s

    def _learn_if_it_can_be(self, look: Look, batch: B, *, is_needed: bool) -> None:
        """Profile a batch; if that is not needed, a batch too large to profile keeps its fitted figures."""
        with nullcontext() if is_needed else IfItFits():
            self._learn(look, batch)

    # ----------------------------------------------------------------------------------------------------- running

    def _run(self, chosen: ShapeDecision, look: Look, batch: B) -> Generator[None]:
        if chosen.refusal and chosen.is_first:
            warn(chosen.refusal, BudgetWarning)
        start_s = time.perf_counter()
        # What a device counts anyway is looked at where nobody waits for that.
        is_looked_at = chosen.is_measured or not self._peers.are_several
        counts = accelerator_of(self._device).counts
        before_bytes = self._before_bytes(look) if chosen.is_measured or (is_looked_at and counts) else 0
        planned = installed(self._model, chosen.calls, chosen.tree, Settings(), chosen.held)
        plan = planned if chosen.has_regions else nullcontext()
        noted = calls_noted(self._model) if chosen.is_unlike else nullcontext()
        with plan, gauge(self._device, wanted=chosen.is_measured) as measured, noted as names:
            yield
        self._decisions.ended()
        self.step_seconds += time.perf_counter() - start_s
        if not is_looked_at:
            return
        rise_bytes = measured.rise_bytes
        own = Measured(peak_bytes=None if rise_bytes is None else before_bytes + rise_bytes, calls=names)
        told = self._peers.all(lambda: own)
        said = self._decided(self._decisions.reviewing(told), look, batch)
        if said and self._decisions.over == "raise":
            raise BudgetError(said)
        if said:
            warn(said, BudgetWarning)

    def _before_bytes(self, look: Look) -> int:
        subject = subject_of(step_of(self._step, tensors=look.tensors), self._model, self._optimizer)
        return subject.before(self._device).total_bytes
