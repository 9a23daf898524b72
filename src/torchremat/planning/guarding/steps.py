"""`guard`: a step that runs out of memory is run again under a smaller plan."""

# A call of the guarded step, in the order of events:
#
#     snapshot ── attempt ── done ──────────────────────────────────────────── result
#                   │  ▲                                            no
#          out of   │  └── plan smaller ◄── put back, free ◄── can it be repeated? ──► GuardError
#          memory   └── note where ── empty the frames ──────────────┘
#
# The first attempt under a `budget` begins with planning for it, which runs the step and may run out of memory as well:
# then the next attempt begins with planning too.
#
# Between two attempts nothing of the failed one may stay alive: not through the error's traceback, whose frames have
# the variables of all the code that ran, not through variables here, and not through caches.

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Concatenate, Generic, ParamSpec, TypeVar, cast
from weakref import ReferenceType

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from torchremat._compat.accelerators import accelerator_of
from torchremat._compat.modules import WeakIdentityDict
from torchremat.errors import GuardError, UnsupportedError, first_of
from torchremat.measuring.communication import known_groups
from torchremat.measuring.exhaustion import is_out_of_memory, let_go
from torchremat.measuring.heap import free_unused
from torchremat.measuring.step import check_kinds, check_materialised, holdings_of, loss_of, run_backward
from torchremat.measuring.tracebacks import without_our_frames
from torchremat.measuring.untouched import gradient_leaves
from torchremat.planning.budgets import margin_of
from torchremat.planning.guarding.attempts import (
    Attempt,
    AttemptOutcome,
    Doing,
    agreed,
    attempt_of,
    check_alone,
    check_no_sync,
)
from torchremat.planning.guarding.gradients import hooked_after, lent
from torchremat.planning.guarding.settings import GuardSettings
from torchremat.planning.guarding.snapshots import StepState, check_no_iterators, optimizers_of
from torchremat.planning.guarding.tightening import Applied, BoundStep, Tightening
from torchremat.planning.layout import bare
from torchremat.planning.plan_options import PlanOptions
from torchremat.planning.planner import Planner
from torchremat.planning.results.plans import Plan
from torchremat.planning.searches.chains import Cost
from torchremat.tensors.structure import split

M = TypeVar("M", bound=nn.Module)
P = ParamSpec("P")
R = TypeVar("R")

# A buffer of more bytes that the first step does not write is not copied before later steps.
_LARGE_BYTES = 65536

# Two guards that put plans on one model would remove each other's.
_guarded: WeakIdentityDict[nn.Module, None] = WeakIdentityDict()


class GuardedStep(Generic[P, R]):
    """A training step that survives running out of memory. Made by `guard`; called with the batch.

    Attributes:
        attempts: All attempts that have failed so far, of all calls.
        held_bytes: Bytes copied on the model's device before the last step and kept until its end: buffers, named
            tensors, and on the CPU the states of generators. They count in `budget`.
    """

    def __init__(
        self, model: nn.Module, step: Callable[..., R], backward: Callable[[R], object], settings: GuardSettings
    ) -> None:
        self.attempts: tuple[Attempt, ...] = ()
        self.held_bytes = 0
        self._model = model
        self._step = step
        self._backward = backward
        self._optimizer = settings.options.optimizer
        self._settings = settings
        self._applied = Applied(model)
        self._to_plan_for = settings.budget  # None once planned
        self._state = "ready"
        self._doing: Doing = "planning"
        self._watched: dict[int, ReferenceType[Tensor]] = {}

    @property
    def plan(self) -> Plan | None:
        """The plan that the guard has put on the model; None if none."""
        return self._applied.plan

    @without_our_frames
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run the step and its backward on a batch, again if memory runs out, and return the step's result.

        Raises:
            BudgetError: With `budget`, in the first call: no plan fits.
            GuardError: The step could not be finished; model, buffers, generators and parameters are as before the
                call.
            UnsupportedError: The step is running already, a hook runs an optimizer in the backward, or the step takes
                from an iterator, which would give the next attempt the next batch.
        """
        if self._state != "ready":
            raise UnsupportedError(f"guard: the guarded step {self._state}, so it cannot be called.")
        if self._settings.group is not None:
            check_no_sync(self._model)
        held = holdings_of(self._step)
        tensors: list[Tensor] = []
        objects: list[object] = []
        split((args, kwargs), tensors, objects)
        check_no_iterators(self._step, objects)
        tensors += held.tensors
        # A single traversal of the modules: torch's own takes longer than the rest of the work before a step.
        modules = list(dict.fromkeys(one for root in (self._model, *held.modules) for one in root.modules()))
        parameters = [one for module in modules for one in module._parameters.values() if one is not None]
        leaves = gradient_leaves((), self._optimizer, [*parameters, *tensors])
        self._check_hooks(leaves)
        before = StepState(
            modules=modules,
            leaves=leaves,
            tensors=tensors,
            objects=[*objects, args, kwargs],
            guard=self._settings.guard,
            optimizers=optimizers_of(self._optimizer, self._step, self._backward),
            watched=self._watched,
        )
        device = leaves[0].device if leaves else torch.device("cpu")
        self.held_bytes = before.held_bytes(device)
        bound = BoundStep(
            step=self._step,
            args=args,
            kwargs=kwargs,
            held=(*held.modules, *held.tensors),
            prepare=before.put_back_objects,
        )
        self._state = "is running"
        try:
            return self._run(bound, before, leaves)
        finally:
            self._state = "ready"

    def _plan_first(self, bound: BoundStep, before: StepState, leaves: list[Tensor]) -> None:
        budget, own = self._to_plan_for, self._settings
        if budget is None:
            return
        margin_bytes = margin_of(own.margin) + self.held_bytes  # the copies are there as well
        with lent(leaves), bare(self._model):
            plan = Planner(self._model, bound, within=budget, **own.options.keywords).plan(budget, margin=margin_bytes)
        before.put_back()
        self._applied.replace(plan)
        self._to_plan_for = None

    def _run(self, bound: BoundStep, before: StepState, leaves: list[Tensor]) -> R:
        most, group = self._settings.attempts, self._settings.group
        tightening = Tightening(self._model, bound, self._applied, self._settings.options)
        failed: list[Attempt] = []
        while True:
            ended = self._attempt(bound, before, leaves, len(failed) + 1)
            worst = agreed(ended.outcome, group)
            if worst is AttemptOutcome.DONE:
                self._watched = before.buffers.left_alone(_LARGE_BYTES)
                return cast("R", ended.result)
            attempt, error, room_bytes = ended.attempt, ended.error, ended.room_bytes
            del ended  # a result of this process alone, and its graph
            if attempt is None:
                attempt = self._failed_elsewhere(len(failed) + 1)
            failed.append(attempt)
            if worst is AttemptOutcome.RAISED:  # that process no longer waits for others
                why_not = "another process raised an error of its own"
            else:
                why_not = self._why_not(before, is_last=len(failed) == most)
                if (
                    agreed(AttemptOutcome.GIVEN_UP if why_not else AttemptOutcome.FAILED, group)
                    is AttemptOutcome.GIVEN_UP
                ):
                    why_not = why_not or "another process cannot run it again"
            free_unused()
            before.put_back()
            if why_not:
                self.attempts += (attempt,)
                raise GuardError(self._report(failed, why_not, before), tuple(failed)) from error
            with lent(leaves):
                free_unused()
                if self._to_plan_for is None:
                    then = tightening.tighten(attempts_left=most - len(failed), room_bytes=room_bytes)
                else:
                    then = "planned from the beginning"
            before.put_back()  # planning has run the step
            free_unused()
            failed[-1] = replace(attempt, then=then)
            self.attempts += (failed[-1],)
            del error

    def _attempt(self, bound: BoundStep, before: StepState, leaves: list[Tensor], number: int) -> _Ended:
        before_bytes = _allocated(leaves)
        self._doing = "planning"
        try:
            self._plan_first(bound, before, leaves)
            self._doing = "forward"
            with before.gradients.watched():
                result = self._step(self._model, *bound.args, **bound.kwargs)
                self._doing = "backward"
                self._backward(result)
            return _Ended(outcome=AttemptOutcome.DONE, result=result)
        except Exception as error:
            if not is_out_of_memory(error):
                agreed(AttemptOutcome.RAISED, self._settings.group)
                raise
            attempt = attempt_of(error, number=number, doing=self._doing, model=self._model, plan=self._applied.plan)
            result = None
            let_go(error)
            room_bytes = None
            if attempt.held_bytes is not None and before_bytes is not None:
                room_bytes = attempt.held_bytes - before_bytes
            return _Ended(outcome=AttemptOutcome.FAILED, attempt=attempt, error=error, room_bytes=room_bytes)

    def _failed_elsewhere(self, number: int) -> Attempt:
        return Attempt(
            number=number,
            phase="elsewhere",
            where="in another process",
            asked_bytes=None,
            held_bytes=None,
            plan=self._applied.plan,
            error="",
        )

    def _check_hooks(self, leaves: list[Tensor]) -> None:
        hooked = hooked_after(leaves)
        if hooked:
            raise UnsupportedError(
                f"guard: hooks run after the gradients of {self._names(hooked)} are written "
                "(`register_post_accumulate_grad_hook`). One that runs an optimizer, or writes to the gradient, cannot "
                "be run again for the same step. Remove them, and do their work after the guarded step."
            )

    def _why_not(self, before: StepState, *, is_last: bool) -> str:
        """Return why the step is not run again, "" if it is."""
        written = before.written()
        if before.has_stepped():
            return (
                "it cannot be run again, since it had written to the state of an optimizer (call `optimizer.step()` "
                "after the guarded step, not in it)"
            )
        if written:
            shown = first_of([words.format(self._names([tensor])) for words, tensor in written])
            return (
                f"it cannot be run again, since it had written in place to {shown} (backward alone may write to "
                "gradients, and nothing to the batch and the parameters)"
            )
        return f"attempts={self._settings.attempts} are used up" if is_last else ""

    def _names(self, tensors: Sequence[Tensor]) -> str:
        known = {id(one): name for name, one in (*self._model.named_parameters(), *self._model.named_buffers())}
        names = [f"`{known[id(one)]}`" if id(one) in known else f"a tensor {tuple(one.shape)}" for one in tensors]
        return first_of(names)

    def _report(self, failed: list[Attempt], why_not: str, before: StepState) -> str:
        begun = before.gradients.begun()
        if begun:
            state = f"The gradients of {self._names(begun)} hold a part of it: zero them before going on. "
        elif before.written() or before.has_stepped():
            state = ""
        else:
            state = "All is as before it, gradients included: the batch can be left out, or be cut in two. "
        rows = "\n".join(f"  {attempt}" for attempt in failed)
        return f"the step ran out of memory, and {why_not}:\n{rows}\n{state}The error was: {failed[-1].error}"

    def _end(self) -> None:
        self._state = "has left its `with` block"
        self._applied.remove()


@dataclass(frozen=True, kw_only=True, eq=False)
class _Ended:
    """How an attempt ended."""

    outcome: AttemptOutcome
    result: object = None
    attempt: Attempt | None = None
    error: Exception | None = None
    room_bytes: int | None = None


@contextmanager
def guard(
    model: M,
    step: Callable[Concatenate[M, P], R],
    *,
    budget: int | str | None = None,
    plan: Plan | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    backward: Callable[[R], object] | None = None,
    attempts: int = 4,
    margin: int | str = 0,
    cost: Cost = "seconds",
    guard: Sequence[object] = (),
    group: ProcessGroup | None = None,
) -> Generator[GuardedStep[P, R]]:
    """Run a training step on each batch, and run it again under a smaller plan where memory runs out.

    An attempt that runs out of memory, of the device or of the host, is undone: its tensors are freed, and generators,
    buffers, flags and objects are restored. Then the step is planned for fewer bytes than the failed attempt, and run
    again. Its result and gradients equal a never-failed step's bit for bit; gradients accumulate as usual. The smaller
    plan stays for the following batches, until the block ends.

    Any other error propagates, and nothing is repeated for it. Side effects of the step, prints or sends, happen again.

    Args:
        model: The model. Your own plan or regions on it are put aside while a plan of the guard is on it, and restored
            after the block.
        step: Called as `step(model, *batch)`; runs the forward and returns the loss, as for `plan`.
        budget: Plan for it before the first step; if not given, the step is first tried without a plan.
        plan: Apply it before the first step.
        optimizer: Its parameters are treated as the model's; its bytes count in `budget`.
        backward: Called with the result of `step`, in place of `loss.backward()`; it may call backward several times,
            or once, as a gradient scaler does.
        attempts: The most runs of a step before the guard gives up. The last attempt uses the smallest plan that
            exists.
        margin: As for `plan`; a part of `budget`, which must be given with it.
        cost: As for `plan`.
        guard: Objects that the step changes and that are reachable neither from its arguments nor from attributes of
            modules, as for `checkpoint`.
        group: The process group whose processes all run the step again if one must. Not for steps with collectives.

    Yields:
        The guarded step, called as `run(*batch)`.

    Raises:
        UnsupportedError: One of several processes and no `group`; the model is guarded already; `margin` came without
            `budget`; or `attempts`, `backward`, `cost` or `guard` is invalid.
        StepError: `model`, `step` or `optimizer` is of the wrong kind.
        PlanError: `plan` is not a plan, was made for another model, or came together with `budget`.
        BudgetError: `budget` or `margin` is not a size. If no plan fits, the first step raises it.
    """
    check_kinds(step, model, optimizer, needs_model=True)
    check_materialised(model)
    together = "step" if known_groups([model], ()) else None  # without collectives, as for a model in `no_sync()`
    options = PlanOptions(optimizer=optimizer, cost=cost, group=together)
    settings = GuardSettings(attempts=attempts, budget=budget, margin=margin, options=options, guard=guard, group=group)
    settings.check(model, plan, backward)
    if any(one in _guarded for one in model.modules()):
        raise UnsupportedError("guard: the model, or a part of it, is in a guard already. Guard it once.")
    check_alone(model, group)
    run: GuardedStep[P, R] = GuardedStep(model, step, backward or _backward, settings)
    modules = list(model.modules())
    try:
        _guarded.update(dict.fromkeys(modules))
        if plan is not None:
            run._applied.replace(plan)
        yield run
    finally:
        run._end()
        for one in modules:
            _guarded.pop(one, None)


def _backward(result: object) -> None:
    run_backward(loss_of(result))


def _allocated(leaves: Sequence[Tensor]) -> int | None:
    """Return torch's allocated bytes on the leaves' device, plus future gradients; None if torch does not count."""
    device = next((leaf.device for leaf in leaves), torch.device("cpu"))
    accelerator = accelerator_of(device)
    if not accelerator.counts:
        return None
    to_come = sum(leaf.nbytes for leaf in leaves if leaf.grad is None and leaf.device == device)
    return accelerator.counters(device).allocated_bytes + to_come
