"""The runs of a step that make up a measurement, and the results of each.

Every run begins with the same gradients, buffers and generators, and ends with the user's.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Literal

import torch
from torch import Tensor, nn

from torchremat._compat.accelerators import accelerator_of, accelerators
from torchremat._compat.autograd import top_saved_tensor_hooks
from torchremat.errors import UnsupportedError
from torchremat.measuring.allocator import record_allocations
from torchremat.measuring.before import BytesBefore, bytes_before
from torchremat.measuring.communication import check_reductions
from torchremat.measuring.flops import FlopCounter
from torchremat.measuring.lines import OperatorLines, OperatorStart
from torchremat.measuring.modules import has_compiled, module_stack
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
from torchremat.measuring.threads import OwnThread
from torchremat.measuring.timeline import StepEvents
from torchremat.measuring.tracker import StorageTracker
from torchremat.measuring.untouched import StateBefore, gradient_leaves, untouched
from torchremat.measuring.writes import Known, Looking
from torchremat.regions.rehearsals import rehearsing
from torchremat.regions.threads import thread
from torchremat.stores.stored_parameters import put_away_all


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


@dataclass(frozen=True, kw_only=True, eq=False)
class Counted:
    """Results of the counted run, whose events are those of storages."""

    before: BytesBefore
    events: StepEvents
    flops: int
    recomputed_flops: int
    ran: tuple[OperatorStart, ...]


@dataclass(frozen=True, kw_only=True)
class Plain:
    """Results of the plain run. Bytes come from the device's counters; None where it has none."""

    seconds: float
    peak_bytes: int | None = None
    kept_bytes: int | None = None
    reserved_bytes: int | None = None
    context_bytes: int | None = None


# NOTE [ What a recompute looks like ]
#
# Backward without `create_graph` runs its own operators with grad mode off. A recompute builds a graph, so it runs with
# grad mode on, torch's reentrant and non-reentrant checkpoints and our regions alike. That misses one case: the forward
# of a custom autograd Function runs with grad mode off, in a recompute too. All non-reentrant recomputes then have
# saved-tensor hooks on top that backward itself did not begin with.
#
# The backward of a graph that a recompute has built (reentrant) runs with grad mode off again, and counts as backward.
# A backward in the forward, for a gradient that the step takes itself, may build a graph as well: there only our own
# regions are known.


class _Phase:
    """Whether a recompute is running. See NOTE [ What a recompute looks like ]."""

    def __init__(self) -> None:
        self._in_backward = False
        self._hooks: object = None

    def begin_backward(self) -> None:
        self._in_backward = True
        self._hooks = top_saved_tensor_hooks(False)

    def is_recomputing(self) -> bool:
        if not self._in_backward:
            return thread.now.recomputing > 0
        return torch.is_grad_enabled() or top_saved_tensor_hooks(False) != self._hooks


def run_counted(subject: Subject, device: torch.device, *, lines: bool = False) -> Counted:
    """Run the step under the storage tracker and the flop counter; with `lines` operators are noted as well."""
    phase = _Phase()
    noting = OperatorLines(phase.is_recomputing) if lines else None
    tracker, counter, own = StorageTracker(device, noting), FlopCounter(phase.is_recomputing), OwnThread()
    with subject.untouched():
        before = subject.before(device)
        with module_stack(subject.models, partial(_changed, own, tracker.mark)), tracker, counter:
            start = tracker.mark("start")
            loss = subject.forward()
            tracker.refresh()
            backward = tracker.mark("end of forward")
            phase.begin_backward()
            run_backward(loss)
            tracker.refresh()
            # Before the gradients of the run are freed: those frees are not the step's events.
            trace = tracker.trace
    own.check(device)
    is_eager = noting is not None and not (noting.is_compiled or any(map(has_compiled, subject.models)))
    return Counted(
        before=before,
        events=StepEvents(trace=trace, start=start, backward=backward, before_bytes=before.total_bytes),
        flops=counter.total,
        recomputed_flops=counter.recomputed,
        ran=tuple(noting.ran) if noting is not None and is_eager else (),
    )


def run_traced(subject: Subject, device: torch.device, *, before_bytes: int) -> StepEvents:
    """Run the step under the allocator's events; `before_bytes` are added to the timeline's bytes."""
    own = OwnThread()
    with subject.untouched():
        with (
            record_allocations(device) as recorder,
            module_stack(subject.models, partial(_changed, own, recorder.mark)),
        ):
            start = recorder.mark("start")
            loss = subject.forward()
            backward = recorder.mark("end of forward")
            run_backward(loss)
        trace = recorder.trace
        del loss
    own.check(device)
    return StepEvents(trace=trace, start=start, backward=backward, before_bytes=before_bytes)


def _changed(own: OwnThread, mark: Callable[[str], int], module: str) -> None:
    own.note(module)
    mark(module)


def run_plain(subject: Subject, device: torch.device) -> Plain:
    """Run the step under a clock only; a device's counters run anyway, and are read."""
    accelerator = accelerator_of(device)
    with subject.untouched():
        if not accelerator.counts:
            start_s = accelerator.seconds(device)
            run_backward(subject.forward())
            return Plain(seconds=accelerator.seconds(device) - start_s)
        start_s = accelerator.seconds(device)
        accelerator.reset_peak(device)
        # Gradients set aside for this run are live as well, so only the difference to the start is the step's.
        start_bytes = accelerator.counters(device).allocated_bytes
        loss = subject.forward()
        kept_bytes = accelerator.counters(device).allocated_bytes - start_bytes
        run_backward(loss)
        seconds = accelerator.seconds(device) - start_s
        counted = accelerator.counters(device)
        return Plain(
            seconds=seconds,
            peak_bytes=counted.peak_bytes - start_bytes,
            kept_bytes=kept_bytes,
            reserved_bytes=counted.peak_reserved_bytes,
            context_bytes=accelerator.context_bytes(device),
        )
