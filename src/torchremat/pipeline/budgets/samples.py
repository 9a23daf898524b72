"""One microbatch of each stage, to be profiled by itself, and what lies on its device whatever the plan is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from torchremat.pipeline.microbatch import Microbatch
from torchremat.schedules.pipelines import Action


@dataclass(frozen=True, kw_only=True, eq=False)
class Sample:
    """A microbatch of a stage.

    Attributes:
        stage: The number of the stage.
        module: Its layers.
        step: Called with them, runs the microbatch from its input and returns what backward begins from.
    """

    stage: int
    module: nn.Module
    step: Callable[[nn.Module], object]


@dataclass(frozen=True, kw_only=True, eq=False)
class Site:
    """A device with what it runs.

    Attributes:
        name: In messages.
        device: Whose bytes count.
        actions: Forwards and backwards of all its stages, in the order in which it runs them.
        samples: One of each stage.
        boundary_bytes: What lies there beside parameters, gradients and buffers whatever the plan is: buffers between
            the stages, and outputs.
        loss_bytes: What the loss of a whole batch takes, with all microbatches held; 0 if each has its own.
    """

    name: str
    device: torch.device
    actions: Sequence[Action]
    samples: Sequence[Sample]
    boundary_bytes: int
    loss_bytes: int = 0


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


def taken(value: object) -> tuple[Microbatch, tuple[bool, ...]]:
    """Return a value with its tensors as they are now, out of any graph, and which of them require grad."""
    found = Microbatch.of(value)
    requires = tuple(tensor.requires_grad for tensor in found.tensors)
    return Microbatch(found.template, [tensor.detach().clone() for tensor in found.tensors]), requires


def bytes_of(tensors: Sequence[Tensor]) -> int:
    """Return the bytes of tensors, each storage once."""
    return sum({tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}.values())
