"""One microbatch of each stage, to be profiled by itself, and what lies on its device whatever the plan is."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from torchremat.pipeline.microbatch import Microbatch
from torchremat.stages.loads import DeviceLoad


@dataclass(frozen=True, kw_only=True, eq=False)
class Sample:
    """A microbatch of a stage.

    Attributes:
        stage: The number of the stage.
        module: Its layers.
        step: Called with them, runs the microbatch from its input and returns what backward begins from.
        ends: The same for a backward in two parts; None if there is none.
        ahead: Whether microbatches of the stage may be recomputed before their gradient comes.
        added: Whether one backward runs several of them, and adds up the gradients of their weights.
    """

    stage: int
    module: nn.Module
    step: Callable[[nn.Module], object]
    ends: Callable[[nn.Module], Ends] | None = None
    ahead: bool = False
    added: bool = False


@dataclass(frozen=True, kw_only=True, eq=False)
class Ends:
    """What the backward of a microbatch begins from, and where it ends.

    Attributes:
        roots: The outputs of the stage, or the loss.
        grads: Their gradients; None for a loss.
        inputs: Of the stage.
        outputs: Of the stage; they live until the weight part has ended.
    """

    roots: Sequence[Tensor]
    grads: Sequence[Tensor] | None
    inputs: Sequence[Tensor]
    outputs: Sequence[Tensor]


@dataclass(frozen=True, kw_only=True, eq=False)
class Site:
    """A device with what it runs.

    Attributes:
        name: In messages.
        device: Whose bytes count.
        loads: What it holds when.
        in_flight: How many microbatches each of its stages holds at most, the one that runs included.
        microbatches: Of a step.
        samples: One of each stage.
        boundary_bytes: What lies there beside parameters, gradients and buffers whatever the plan is: buffers between
            the stages, and outputs.
    """

    name: str
    device: torch.device
    loads: Sequence[DeviceLoad]
    in_flight: Mapping[int, int]
    microbatches: int
    samples: Sequence[Sample]
    boundary_bytes: int


class _Received(torch.autograd.Function):
    """Stands for what comes after a stage: takes its outputs, and gives them gradients in backward."""

    @staticmethod
    def forward(ctx: FunctionCtx, held: bool, grads: Sequence[Tensor], *outputs: Tensor) -> Tensor:
        """Return a scalar that backward can begin from."""
        saved = cast("Any", ctx)
        saved.grads = grads
        saved.shapes = [(tensor.shape, tensor.dtype, tensor.device) for tensor in outputs]
        if held:
            ctx.save_for_backward(*outputs)
        return outputs[0].new_zeros(())

    @staticmethod
    def backward(ctx: FunctionCtx, *_: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return the gradients: those that are there, or new ones."""
        saved = cast("Any", ctx)
        made = (torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in saved.shapes)
        return None, None, *(saved.grads or made)


def received(output: object, *, held: bool = False, grads: Sequence[Tensor] = ()) -> Tensor:
    """Return what stands for the loss of a stage that is not the last one.

    Args:
        output: Of the stage.
        held: Whether the output lives until backward, as in the schedules of torch.
        grads: Buffers that the gradients have come into, for each output that requires grad; else they are made.
    """
    outputs = [tensor for tensor in Microbatch.of(output).tensors if tensor.requires_grad]
    if not outputs:
        return torch.zeros(())
    return cast("Tensor", _Received.apply(held, grads, *outputs))  # pyright: ignore[reportUnknownMemberType]


class _HoldUntilBackward(torch.autograd.Function):
    """Holds tensors from the forward to the backward of what it is given with."""

    @staticmethod
    def forward(ctx: FunctionCtx, loss: Tensor, *held: Tensor) -> Tensor:
        """Return the loss."""
        ctx.save_for_backward(*held)
        return loss.detach()

    @staticmethod
    def backward(ctx: FunctionCtx, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return the gradient of the loss."""
        return grads[0], *(None for _ in range(len(cast("Any", ctx).saved_tensors)))


def holding(loss: Tensor, output: object) -> Tensor:
    """Return a loss such that an output lives until its backward begins."""
    held = [tensor.detach() for tensor in Microbatch.of(output).tensors]
    return cast("Tensor", _HoldUntilBackward.apply(loss, *held))  # pyright: ignore[reportUnknownMemberType]


@dataclass(frozen=True, kw_only=True, eq=False)
class Taken:
    """A value as it was at some moment.

    Attributes:
        given: The value, with copies of its tensors that are in no graph.
        requires: Which of them required grad.
    """

    given: Microbatch
    requires: tuple[bool, ...]

    def leaves(self, *, new: bool) -> object:
        """Return the value, with leaves that require grad where its tensors did.

        Args:
            new: Whether they have memory of their own, which lives as long as somebody holds it.
        """
        tensors = [
            (tensor.clone() if new else tensor.detach()).requires_grad_(requires)
            for tensor, requires in zip(self.given.tensors, self.requires, strict=True)
        ]
        return Microbatch(self.given.template, tensors).value


def taken(value: object) -> Taken:
    """Return a value as it is now."""
    found = Microbatch.of(value)
    requires = tuple(tensor.requires_grad for tensor in found.tensors)
    return Taken(
        given=Microbatch(found.template, [tensor.detach().clone() for tensor in found.tensors]), requires=requires
    )


def bytes_of(tensors: Sequence[Tensor]) -> int:
    """Return the bytes of tensors, each storage once."""
    return sum({tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}.values())
