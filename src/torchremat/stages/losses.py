"""The bytes that a step needs in addition to its stages: its loss and its optimizer.

The outputs of the microbatches are created, combined as a pipe combines them, and passed to the step. In backward each
output notes the arrival of its gradient; at that point the last stage would run its backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from torchremat.measuring.allocator import record_allocations
from torchremat.measuring.before import bytes_before
from torchremat.measuring.runs import Subject
from torchremat.measuring.step import check_kinds, check_steps_on, loss_of, run_backward
from torchremat.measuring.untouched import untouched
from torchremat.pipeline.dependency import replace_at
from torchremat.pipeline.microbatch import Microbatch, gather
from torchremat.planning.devices.machines import Here
from torchremat.planning.profiles.optimizers import OptimizerBytes, measure_optimizer
from torchremat.stages.samples import Taken
from torchremat.tensors.metadata import Metadata, empty_of


@dataclass(frozen=True, kw_only=True)
class LossBytes:
    """The bytes of a loss, above the bytes live before the outputs exist.

    Attributes:
        peak_bytes: The peak until a gradient arrives.
        held_bytes: The bytes while each microbatch's backward runs, in their order, and after the last one: gradients
            of all outputs, and the rest that is still live.
        grads: The gradients of the outputs of the first microbatch: tensors of the same form.
    """

    peak_bytes: int
    held_bytes: tuple[int, ...]
    grads: tuple[Tensor, ...]


def loss_bytes(
    module: nn.Module, device: torch.device, step: Callable[[Any], object], outputs: Sequence[Taken]
) -> LossBytes:
    """Return the bytes that a step needs in addition to a pipe.

    `step` is called with a stand-in for the pipe, which returns the given outputs of its microbatches.
    """
    stand_in = _StandIn(outputs)
    with untouched(module), record_allocations(device) as recorder:
        stand_in.note = lambda: recorder.mark("gradient")
        begins = recorder.mark("begin")
        loss = loss_of(step(stand_in))
        run_backward(loss)
        recorder.mark("end")
        del loss
    trace = recorder.trace
    came, ends = [mark.id for mark in trace.marks if mark.label == "gradient"], len(trace.marks) - 1
    first = came[0] if came else ends
    held = [trace.live_bytes_at(mark) for mark in came]
    # Gradients that arrive after a microbatch's turn are live in every turn.
    held += [trace.live_bytes_at(ends)] * (len(outputs) + 1 - len(held))
    return LossBytes(
        peak_bytes=trace.peak_bytes_between(begins, first), held_bytes=tuple(held), grads=tuple(stand_in.grads)
    )


class _Given(torch.autograd.Function):
    """Creates the outputs of a microbatch, and notes when their gradients arrive."""

    @staticmethod
    def forward(ctx: FunctionCtx, stand_in: _StandIn, number: int, _: Tensor, *outputs: Tensor) -> tuple[Tensor, ...]:
        """Return new tensors with the values of the outputs."""
        ctx.set_materialize_grads(False)
        saved = cast("Any", ctx)
        saved.stand_in, saved.number = stand_in, number
        saved.shapes = [(one.shape, one.dtype, one.device) for one in outputs]
        return tuple(output.clone() for output in outputs)

    @staticmethod
    def backward(ctx: FunctionCtx, *grads: Tensor | None) -> tuple[None, ...]:
        """Note the gradients, and drop them."""
        saved = cast("Any", ctx)
        stand_in = cast("_StandIn", saved.stand_in)
        stand_in.note()
        if saved.number == 0:
            stand_in.forms = [
                (*form, torch.empty(form[0], device="meta").stride() if grad is None else grad.stride())
                for grad, form in zip(grads, saved.shapes, strict=True)
            ]
        return (None,) * (3 + len(grads))


class _StandIn(nn.Module):
    """A stand-in for the pipe that returns the pipe's outputs."""

    def __init__(self, outputs: Sequence[Taken]) -> None:
        super().__init__()
        self._outputs = outputs
        self.note: Callable[[], object] = lambda: None
        self.forms: list[Metadata] = []

    def forward(self, *_: object, **__: object) -> object:
        """Return the outputs, put together."""
        root = torch.zeros((), requires_grad=True)
        return gather([self._make_again(number, one, root) for number, one in enumerate(self._outputs)])

    def _make_again(self, number: int, output: Taken, root: Tensor) -> Microbatch:
        pairs = zip(output.given.tensors, output.requires, strict=True)
        tensors = [tensor if requires else tensor.clone() for tensor, requires in pairs]
        places = [place for place, requires in enumerate(output.requires) if requires]
        made = replace_at(tensors, places, partial(_Given.apply, self, number, root))
        return Microbatch(output.given.template, made)

    @property
    def grads(self) -> list[Tensor]:
        """Tensors with the metadata of the first microbatch's gradients."""
        return [empty_of(form).zero_() for form in self.forms]


def optimizer_bytes(
    modules: Sequence[nn.Module], optimizer: torch.optim.Optimizer, device: torch.device
) -> OptimizerBytes:
    """Return the bytes of an optimizer on a device; existing state counts like future state.

    Raises:
        StepError: It is not an optimizer, or has none of their parameters.
        UnsupportedError: It cannot step by itself.
    """

    def step() -> None:
        """Run nothing but the optimizer."""

    check_kinds(step, None, optimizer, needs_model=False)
    check_steps_on(optimizer, [parameter for module in modules for parameter in module.parameters()])
    subject = Subject(step=step, model=None, models=tuple(modules), inputs=(), optimizer=optimizer, accumulates=True)
    there = bytes_before(models=(), leaves=(), optimizers=subject.optimizers, inputs=(), device=device).optimizer_bytes
    own = measure_optimizer(subject, optimizer, Here(device))
    return OptimizerBytes(name=own.name, state_bytes=there + own.state_bytes, peak_bytes=there + own.peak_bytes)
