"""The step of an optimizer, made in parts.

    a gradient is complete     `step` on its parameter; the gradient is freed           release.py
    the user calls `step()`    before: parts of what is left, if state is in a store    entries.py
                               the optimizer's own code, for what is left then
                               after: the step is over

Between the first part and the end of `step()` a *step is open*, see `open_steps`. The hooks of the optimizer run once,
at the user's `step()`.

The optimizer owns this object, through its hooks; nothing here owns the optimizer.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import NamedTuple, Protocol, cast
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor

from torchremat._compat.autograd import at_end_of_backward, current_graph_task, enter_backward
from torchremat._compat.dynamo import outside_graphs
from torchremat.errors import UnsupportedError
from torchremat.measuring.optimizers import Optimizer, check_may_step, not_an_optimizer, parameters_of
from torchremat.optimizing.entries import StateMover
from torchremat.optimizing.groups import Group, GroupOptions, groups_by_parameter, slices, step_on, without_autocast
from torchremat.optimizing.open_steps import OpenStep, RunClosure
from torchremat.optimizing.rehearsal import (
    drop_state,
    gradient_of_zeros,
    marked_rehearsal,
    put_back_after,
    without_state,
)
from torchremat.optimizing.separability import check_separable
from torchremat.optimizing.tombstones import ReleasedGradient
from torchremat.stores.stored_parameters import Keeper


class Releasing(Protocol):
    """What steps in the backward, as the step of an optimizer knows it."""

    def last_microbatch(self) -> None:
        """The next backward is the last one before `step()`."""
        ...

    def check_step(self) -> None:
        """Raise an UnsupportedError if the user's `step()` cannot run now."""
        ...

    def end_step(self, optimizer: Optimizer) -> None:
        """The user's `step()` has ended."""
        ...


_all: WeakKeyDictionary[Optimizer, PartialSteps] = WeakKeyDictionary()


def partial_steps(optimizer: Optimizer) -> PartialSteps:
    """Return the object that makes an optimizer's step in parts; one for each optimizer.

    Raises:
        UnsupportedError: It is no optimizer; or see `check_separable`.
    """
    if not isinstance(optimizer, Optimizer):  # pyright: ignore[reportUnnecessaryIsInstance]  user input
        raise UnsupportedError(not_an_optimizer(optimizer))
    found = _all.get(optimizer)
    if found is None:
        found = _all[optimizer] = PartialSteps(optimizer)
    return found


def steps_in_parts(optimizer: Optimizer) -> PartialSteps | None:
    """Return the object that makes an optimizer's step in parts; None if nothing does."""
    return _all.get(optimizer)


def note_failed(optimizer: Optimizer | None, error: BaseException) -> None:
    """Add to an error that has left a backward where the step stands that this backward has made parts of."""
    steps = None if optimizer is None else steps_in_parts(optimizer)
    failed = "" if steps is None else steps.failed()
    if steps is not None and failed and not any("had made this step" in one for one in getattr(error, "__notes__", ())):
        error.add_note(f"{steps.name}: {failed}")


class _Rehearsed(NamedTuple):
    """The parts of a step that are run to be measured, in one backward."""

    task: int
    options: GroupOptions
    group_of: dict[int, Group]


class PartialSteps:
    """The step of an optimizer, made in parts.

    Attributes:
        release: Steps in the backward, if gradients are released.
        mover: Moves state, if that is in a store.
        keepers: Move parameters, if these are; one for each model.
        names: The names of parameters, by id, for messages.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        check_separable(optimizer)
        self.release: Releasing | None = None
        self.mover: StateMover | None = None
        self.keepers: list[Keeper] = []
        self.names: dict[int, str] = {}
        self._optimizer = ref(optimizer)
        self._before_step = optimizer.register_step_pre_hook(self._before)
        self._after_step = optimizer.register_step_post_hook(self._after)
        self._before_saving = optimizer.register_state_dict_pre_hook(self._check_saving)
        self._after_loading = optimizer.register_load_state_dict_post_hook(self._forget_parts)
        self._lock = threading.RLock()
        self._open_step: OpenStep | None = None
        self._hidden: list[tuple[Tensor, Tensor]] = []
        self._rehearsed: _Rehearsed | None = None

    @property
    def name(self) -> str:
        """The class of the optimizer."""
        return type(self._optimizer()).__name__

    def optimizer(self) -> Optimizer | None:
        """Return the optimizer; None if it is gone."""
        return self._optimizer()

    def check_closed(self, asked: str) -> None:
        """Raise an UnsupportedError if a part of a step was made, and the user's `step()` has not ended it."""
        self.check_backwards(asked)
        if self._open_step:
            raise UnsupportedError(
                f"{asked}: a backward has released gradients. Call `optimizer.step()` first; or, if it was the "
                "backward of another optimizer's loss, load a checkpoint, and keep that loss out of these parameters "
                "by `requires_grad_(False)`."
            )

    def check_backwards(self, asked: str) -> None:
        """Raise an UnsupportedError if a backward has made parts of a step, and failed."""
        if current_graph_task() < 0 and (failed := self.failed()):
            raise UnsupportedError(f"{asked}: {failed}")

    def failed(self) -> str:
        """Return where the open step stands, if a backward has made parts of it and has not ended; else ""."""
        step = self._open_step
        return "" if step is None else step.failed(current_graph_task(), self.names)

    def _forget_parts(self, optimizer: Optimizer) -> None:
        with self._lock:
            step = self._open_step
            if step is None:
                return
            if self.release is not None and not self.failed():
                step.is_over = True  # a plain `step()` would still step, on the loaded state: see `check_unchanged`
                return
            self._close(optimizer)
            for one in parameters_of([optimizer]):
                if isinstance(one.grad, ReleasedGradient):
                    one.grad = None

    def _check_saving(self, _: Optimizer) -> None:
        # The loss of another optimizer may have gone through these parameters, and no `step()` of this one follows.
        self.check_closed("state_dict()")

    @property
    def _moves(self) -> bool:
        return self.mover is not None or bool(self.keepers)

    def is_done(self, parameter: Tensor) -> bool:
        """Return whether a parameter has made its part of the open step."""
        step = self._open_step
        return step is not None and not step.is_over and parameter in step

    def name_of(self, parameter: Tensor) -> str:
        """Return the name of a parameter, for messages."""
        return self.names.get(id(parameter)) or f"a parameter of shape {tuple(parameter.shape)}"

    def end(self) -> None:
        """Leave the optimizer as it was, if neither gradients are released nor state is moved any more."""
        optimizer = self._optimizer()
        if self.release is self.mover is None and not self.keepers and optimizer is not None:
            self._before_step.remove()
            self._after_step.remove()
            self._before_saving.remove()
            self._after_loading.remove()
            _all.pop(optimizer, None)

    def step(self, parameters: Sequence[Tensor], released: Callable[[Tensor], Tensor] | None = None) -> None:
        """Make the part of the step for some parameters, whose gradients are complete.

        Args:
            parameters: The parameters.
            released: Returns what takes the place of a parameter's gradient.

        Raises:
            StoreError: Their state cannot be brought back. The message says which parameters have stepped.
        """
        optimizer = self._optimizer()
        if optimizer is None:
            return
        with self._lock:
            check_may_step(optimizer)
            step = self._open(optimizer)
            enter_backward(step.backwards)
            is_written = False
            try:
                with self._in_memory(optimizer, parameters):
                    is_written = True
                    with without_autocast(parameters[0].device):
                        step.make(optimizer, parameters)
                    is_written = False
                if released is not None:
                    for one in parameters:
                        step.release(optimizer, one, released(one))
            except BaseException as error:
                error.add_note(self._where_it_stands(step, parameters, is_written=is_written))
                raise

    def rehearse(self, parameters: Sequence[Tensor], *, is_last: bool = False) -> None:
        """Run the part of the step for some parameters as it would run, and undo it. See `rehearsal`.

        Args:
            parameters: The parameters.
            is_last: Whether no other part follows; after parts in a backward, its end says so.

        Raises:
            UnsupportedError: It cannot be undone.
        """
        optimizer = self._optimizer()
        if optimizer is None:
            return
        task, state = current_graph_task(), optimizer.state
        with self._lock, marked_rehearsal():
            if self._rehearsed is None or 0 <= task != self._rehearsed.task:
                options = GroupOptions(optimizer.param_groups)
                self._rehearsed = _Rehearsed(task, options, groups_by_parameter(optimizer))
                if task >= 0:
                    at_end_of_backward(self.end_rehearsal)
            made = without_state(state, parameters)
            with self._in_memory(optimizer, parameters):
                with put_back_after(state, parameters), without_autocast(parameters[0].device):
                    step_on(optimizer, parameters, self._rehearsed.group_of)
                self._rehearsed.options.put_back()
            drop_state(state, made)
            if is_last and self._rehearsed.task < 0:
                self.end_rehearsal()

    def rehearse_step(self) -> None:
        """Run all parts that a user's `step()` makes of a step, and undo them: none if the backward makes them."""
        optimizer = self._optimizer()
        if optimizer is None or not self._moves or self.release is not None:
            return
        parts = list(slices(_with_gradients(optimizer)))
        # The first one does not know what to bring ahead.
        for _ in range(2 if self.mover is not None and not self.mover.knows_order else 1):
            for number, some in enumerate(parts, 1):
                self.rehearse(some, is_last=number == len(parts))

    @contextmanager
    def state_made(self) -> Generator[None]:
        """Let each parameter have state in the block, as after a first step; what was made is dropped at its end.

        Groups have options as after it: some classes count their steps there, and make no more than state in the first.

        Raises:
            UnsupportedError: The state that exists cannot be copied.
        """
        optimizer = self._optimizer()
        if optimizer is None:
            yield
            return
        state = optimizer.state
        made = without_state(state, (one for one in parameters_of([optimizer]) if one.requires_grad))
        options, group_of = GroupOptions(optimizer.param_groups), groups_by_parameter(optimizer)
        stepped: dict[int, GroupOptions] = {}
        try:
            for one in made:
                with put_back_after(state, [one]), gradient_of_zeros(one):
                    step_on(optimizer, [one], group_of)
                stepped[id(group_of[id(one)])] = GroupOptions([group_of[id(one)]])
                options.put_back()
                if self.mover is not None:
                    self.mover.put_away(state, [one])
            for one in stepped.values():
                one.put_back()
            yield
        finally:
            options.put_back()
            drop_state(state, made)

    def end_rehearsal(self) -> None:
        """End the parts that were run to be measured."""
        self._rehearsed = None
        if self.mover is not None:
            self.mover.end()

    def _open(self, optimizer: Optimizer) -> OpenStep:
        if self._open_step is None or self._open_step.is_over:
            self._show()  # of a step whose own code has raised
            self._open_step = OpenStep(optimizer)
            if self.mover is not None:
                self.mover.begin(optimizer.state)
        return self._open_step

    def _in_memory(self, optimizer: Optimizer, parameters: Sequence[Tensor]) -> AbstractContextManager[None]:
        return self._move(optimizer, parameters) if self._moves else nullcontext()

    @contextmanager
    def _move(self, optimizer: Optimizer, parameters: Sequence[Tensor]) -> Generator[None]:
        with ExitStack() as stack:
            for keeper in self.keepers:
                stack.enter_context(keeper.in_memory(parameters))
            if self.mover is not None:
                self.mover.take(optimizer.state, parameters)
            yield
            if self.mover is not None:
                self.mover.give(optimizer.state, parameters)

    def _where_it_stands(self, step: OpenStep, parameters: Sequence[Tensor], *, is_written: bool) -> str:
        at = ", ".join(map(self.name_of, parameters))
        half = f"; {at} may be in the middle of it" if is_written else ""
        return (
            f"{self.name} was at {at}. {step.done(self.names)}{half}; all others, and their state, are as before it. "
            "Load a checkpoint before you go on."
        )

    # ------------------------------------------------------------------------------------------- the user's `step()`

    @outside_graphs
    def _before(
        self, optimizer: Optimizer, args: tuple[object, ...], kwargs: Mapping[str, object]
    ) -> tuple[tuple[object, ...], dict[str, object]] | None:
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        hooks = optimizer._optimizer_step_pre_hooks
        if (self.release is not None and len(hooks) > 1) or next(reversed(hooks)) != self._before_step.id:
            raise UnsupportedError(
                f"{self.name} has a hook that runs before its step, and finds parameters that the step has changed "
                "already. Register such a hook before torchremat.offload_optimizer; with "
                "torchremat.release_gradients there can be none."
            )
        self.check_backwards("step()")
        if self.release is not None:
            self.release.check_step()
        changed = None
        if closure is not None:
            # Outside of the lock: threads of its backward may make parts of the step.
            with torch.enable_grad():
                loss = cast("Callable[[], object]", closure)()
            changed = (*args[:1], RunClosure(loss, self.name)), {}
        with self._lock:
            step = self._open_step or self._open(optimizer)
            if not self._hidden:  # else it is the step of a base class, which runs hooks as well
                step.check_unchanged(optimizer, self.names)
            if self._moves:
                for some in slices(_with_gradients(optimizer)):
                    self.step(some)
            # The optimizer's own code runs once more, and must find nothing of what has stepped.
            for parameter in parameters_of([optimizer]):
                gradient = parameter.grad
                if gradient is not None and (parameter in step or isinstance(gradient, ReleasedGradient)):
                    self._hidden.append((parameter, gradient))
                    parameter.grad = None
            step.put_options_back()
        return changed

    @outside_graphs
    def _after(self, optimizer: Optimizer, *_: object) -> None:
        with self._lock:
            if self._open_step is not None:
                self._open_step.put_state_in_order(optimizer)
            self._close(optimizer)

    def _close(self, optimizer: Optimizer) -> None:
        self._show()
        self._open_step = None
        if self.mover is not None:
            self.mover.end()
        for keeper in self.keepers:
            keeper.end()
        if self.release is not None:
            self.release.end_step(optimizer)

    def _show(self) -> None:
        hidden, self._hidden = self._hidden, []
        for parameter, gradient in hidden:
            if parameter.grad is None:
                parameter.grad = gradient


def _with_gradients(optimizer: Optimizer) -> list[Tensor]:
    return [
        one for one in parameters_of([optimizer]) if one.grad is not None and not isinstance(one.grad, ReleasedGradient)
    ]
