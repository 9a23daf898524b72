"""A step with all that it touches: how it is run, observed and undone.

Every run begins with the same gradients, buffers and generators, and ends with the user's.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal, TypeAlias, TypeVar, cast

import torch
from torch import Tensor, nn

from torchremat._compat.accelerators import accelerator_of, accelerators
from torchremat.errors import UnsupportedError, bug
from torchremat.measuring.before import BytesBefore, bytes_before
from torchremat.measuring.communication import check_reductions
from torchremat.measuring.modules import has_compiled
from torchremat.measuring.optimizers import with_wrapped
from torchremat.measuring.step import (
    check_arguments,
    check_materialised,
    check_steps_on,
    holdings_of,
    loss_of,
    run_backward,
    used_up,
)
from torchremat.measuring.untouched import StateBefore, gradient_leaves, untouched
from torchremat.measuring.writes import Known, Looking
from torchremat.regions.rehearsals import rehearsing
from torchremat.stores.stored_parameters import put_away_all

T = TypeVar("T")

# What watches a run of a step, and what it returns at the end. See `Subject.train`.
StepObserver: TypeAlias = Generator[None, Tensor, T]


def unobserved(*contexts: AbstractContextManager[object]) -> StepObserver[None]:
    """Observe nothing, while a step runs in some contexts."""
    with ExitStack() as stack:
        for one in contexts:
            stack.enter_context(one)
        yield
        yield


@dataclass
class _Undisturbed:
    """Whether a step is undisturbed, and the state before its runs, if it is known by then and no run is going on."""

    is_on: bool = False
    before: StateBefore | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class Subject:
    """A step with all the state that it touches. Made by `subject_of`, whose arguments say what each is."""

    step: Callable[..., object]
    model: nn.Module | None
    models: tuple[nn.Module, ...]
    inputs: tuple[Tensor, ...]
    optimizer: torch.optim.Optimizer | None
    accumulates: bool | None = None
    _resident: dict[torch.device, int] = field(default_factory=dict[torch.device, int], repr=False)
    _known: Known = field(default_factory=Known, repr=False)
    _undisturbed: _Undisturbed = field(default_factory=_Undisturbed, repr=False)

    @cached_property
    def optimizers(self) -> tuple[torch.optim.Optimizer, ...]:
        """The optimizer, and the optimizers that it wraps."""
        return with_wrapped(self.optimizer)

    @property
    def runs(self) -> int:
        """How often we have run the step."""
        return self._known.runs

    @contextmanager
    def untouched(self, *, looks: bool | Literal["told"] = False, steps: bool = False) -> Generator[Looking | None]:
        """Protect the state that the step touches, for one run.

        Args:
            looks: Whether its operators may be intercepted, once, to learn which tensors the step writes; the sooner
                the better. Not for a run whose bytes or seconds count. See `untouched` for `"told"`.
            steps: Whether the optimizer may step.
        """
        own = self._undisturbed
        put_away_all(one for model in self.models for one in model.parameters())
        before, own.before = None if steps else own.before, None
        if before is None:
            # Before anything is set aside: copies are on the device as well, and not in the user's own step.
            self._resident.update(self._resident_now())
            before = StateBefore(self.models, self.optimizer, self.inputs)
        with (
            rehearsing(),
            untouched(
                self.models,
                self.optimizer,
                tensors=self.inputs,
                step=self.step,
                known=self._known,
                looks=looks if looks and not any(map(has_compiled, self.models)) else False,
                but=self.optimizers if steps else (),
                before=before,
                accumulates=self.accumulates,
            ) as looking,
        ):
            yield looking
        if own.is_on and before.stays and not steps:
            own.before = before

    @contextmanager
    def undisturbed(self) -> Generator[None]:
        """Look only once, in the block, for the state that each run restores: nothing changes it between the runs."""
        own = self._undisturbed
        was, own.is_on = own.is_on, True
        try:
            yield
        finally:
            own.is_on, own.before = was, None

    def _resident_now(self) -> Iterator[tuple[torch.device, int]]:
        """Yield each device's allocated bytes that hold no tensor of the step. See NOTE [ What a device holds ]."""
        counting = [accelerator for accelerator in accelerators() if accelerator.counts]
        if counting:
            gc.collect()  # a step does not keep garbage that only waits for collection
        for accelerator in counting:
            for device in accelerator.in_use():
                known = self._bytes_before(device).total_bytes
                yield device, max(0, accelerator.counters(device).allocated_bytes - known)

    def run(self) -> object:
        """Run the step and return its result.

        Raises:
            StepError: It has used up its inputs.
        """
        try:
            result = self.step() if self.model is None else self.step(self.model)
        except (StopIteration, LookupError) as error:
            if not self._known.runs and isinstance(error, LookupError):
                raise  # an ordinary error of the user's code
            raise used_up(self.step, error, self._known.runs) from error
        self._known.runs += 1
        return result

    def forward(self) -> Tensor:
        """Run the step and return the loss. The rest of its result is dropped, as in `loss = step(model).loss`."""
        return loss_of(self.run())

    def train(self, observer: StepObserver[T], *, looks: bool = False) -> T:
        """Run the step with its backward, undo what it has done, and return what an observer returns.

        The observer is a generator. It runs until it yields before the forward, until it yields again between forward
        and backward, and to its end after the backward, when the gradients are there. Its first `yield` returns the
        loss, which lives for as long as the observer has it.

        Args:
            observer: For example `unobserved()`.
            looks: See `untouched`.
        """
        with self.untouched(looks=looks):
            try:
                next(observer)
                loss = self.forward()
                observer.send(loss)
                run_backward(loss)
                del loss
            except BaseException as error:
                observer.throw(error)  # its own contexts end first, and it raises the error again
                raise
            return _result_of(observer)

    def before(self, device: torch.device) -> BytesBefore:
        """Return the bytes on `device` now; inside `untouched`, with the gradients that a step begins with."""
        if device not in self._resident:
            self._resident.update(self._resident_now())
        return replace(self._bytes_before(device), resident_bytes=self._resident.get(device, 0))

    def made_bytes(self, device: torch.device) -> int:
        """Return the bytes on `device` of the gradients that backward makes, as the last step of an optimizer found."""
        return self._known.made_bytes(device, self.inputs)

    def _bytes_before(self, device: torch.device) -> BytesBefore:
        return bytes_before(
            models=self.models,
            leaves=gradient_leaves(self.models, self.optimizer, self.inputs),
            optimizers=self.optimizers,
            inputs=self.inputs,
            device=device,
        )

    def device(self, wanted: torch.device | str | None = None) -> torch.device:
        """Return the wanted device, as its tensors name it, else the first parameter's or input's, else the CPU.

        Raises:
            UnsupportedError: The device does not exist.
        """
        if wanted is not None:
            return _existing(wanted)
        parameters = [parameter for model in self.models for parameter in model.parameters()]
        return next((tensor.device for tensor in [*parameters, *self.inputs]), torch.device("cpu"))


def _result_of(observer: StepObserver[T]) -> T:
    try:
        next(observer)
    except StopIteration as ended:
        return cast("T", ended.value)
    raise bug("an observer of a step goes on after its end")


def _existing(wanted: torch.device | str) -> torch.device:
    try:
        place = torch.device(wanted)
    except (RuntimeError, TypeError) as error:
        raise UnsupportedError(f'device={wanted!r} is not a device such as "cpu" or "cuda:0".') from error
    accelerator = accelerator_of(place)
    if accelerator.records is None:
        return place
    count = len(accelerator.devices())
    if not accelerator.is_host and (place.index or 0) >= count:
        raise UnsupportedError(f"device={wanted!r}: torch finds {count} {place.type.upper()} devices here.")
    # Tensors on "cuda" have the index of the current device, and tensors on "cpu:0" have none.
    return torch.empty(0, device=place).device


def subject_of(
    step: Callable[..., object],
    model: nn.Module | None,
    optimizer: torch.optim.Optimizer | None,
    *,
    needs_model: bool = False,
    needs_values: bool = True,
    accumulates: bool | None = None,
) -> Subject:
    """Return the step together with the modules and tensors that it holds.

    Args:
        step: The step.
        model: Its model.
        optimizer: The optimizer, if it counts.
        needs_model: Whether None as the model is an error.
        needs_values: Whether parameters on the meta device are an error.
        accumulates: Whether each leaf begins the step with a gradient; None for those that have one now.

    Raises:
        StepError: An argument is not a model, step or optimizer, or a parameter has no values to run with.
        UnsupportedError: See `check_reductions`.
    """
    check_arguments(step, model, optimizer, needs_model=needs_model)
    holdings = holdings_of(step)
    models = {id(root): root for root in (*(() if model is None else (model,)), *holdings.modules)}
    for root in models.values():
        check_materialised(root, needs_values=needs_values)
    if needs_values:
        check_reductions(models.values())
    if model is not None and optimizer is not None:
        check_steps_on(optimizer, (*holdings.tensors, *(one for root in models.values() for one in root.parameters())))
    return Subject(
        step=step,
        model=model,
        models=tuple(models.values()),
        inputs=holdings.tensors,
        optimizer=optimizer,
        accumulates=accumulates,
    )
