"""One microbatch of each stage, to profile by itself, and the bytes on its device under any plan."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from torchremat.ambient.global_state import AmbientState, ambient_state
from torchremat.measuring.runs import Subject
from torchremat.measuring.step import holdings_of
from torchremat.measuring.storages import StorageNumbers
from torchremat.pipeline.microbatch import Microbatch
from torchremat.stages.loads import DeviceLoad


@dataclass(frozen=True, kw_only=True, eq=False)
class Sample:
    """A microbatch of a stage.

    Attributes:
        stage: The number of the stage.
        module: Its layers.
        step: Called with the module, runs the microbatch from its input and returns the tensor that backward begins
            from.
        ends: The same for a split backward; None if the backward is whole.
        ahead: Whether microbatches of the stage may be recomputed before their gradient arrives.
        added: Whether one backward runs several microbatches, and sums the gradients of their weights.
        holds: The tensors that `step` has, in memory of its own or of the batch.
    """

    stage: int
    module: nn.Module
    step: Callable[[nn.Module], object]
    ends: Callable[[nn.Module], Ends] | None = None
    ahead: bool = False
    added: bool = False
    holds: Sequence[Tensor] = ()


@dataclass(frozen=True, kw_only=True, eq=False)
class Ends:
    """The tensors at which the backward of a microbatch begins and ends.

    Attributes:
        roots: The outputs of the stage, or the loss.
        grads: Their gradients; None for a loss.
        inputs: Of the stage.
        outputs: Of the stage; they live until the weight pass has ended.
    """

    roots: Sequence[Tensor]
    grads: Sequence[Tensor] | None
    inputs: Sequence[Tensor]
    outputs: Sequence[Tensor]


@dataclass(frozen=True, kw_only=True, eq=False)
class Site:
    """A device with its stages.

    Attributes:
        name: Its name in messages.
        device: Whose bytes count.
        loads: The loads of its actions.
        in_flight: How many microbatches each of its stages holds at most, the one that runs included.
        microbatches: Of a step.
        samples: One of each stage.
        boundary_bytes: Bytes on the device under any plan in addition to parameters, gradients and buffers: buffers
            between the stages, and outputs.
    """

    name: str
    device: torch.device
    loads: Sequence[DeviceLoad]
    in_flight: Mapping[int, int]
    microbatches: int
    samples: Sequence[Sample]
    boundary_bytes: int


class _Received(torch.autograd.Function):
    """Stands for the steps after a stage: takes its outputs, and gives them gradients in backward."""

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
        """Return the gradients: existing or new ones."""
        saved = cast("Any", ctx)
        made = (torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in saved.shapes)
        return None, None, *(saved.grads or made)


def receive(output: object, *, held: bool = False, grads: Sequence[Tensor] = ()) -> Tensor:
    """Return a stand-in for the loss of a stage that is not the last one.

    Args:
        output: Of the stage.
        held: Whether the output lives until backward, as in the schedules of torch.
        grads: Buffers that received the gradients, for each output that requires grad; else new gradients are made.
    """
    outputs = [tensor for tensor in Microbatch.of(output).tensors if tensor.requires_grad]
    if not outputs:
        return torch.zeros(())
    return cast("Tensor", _Received.apply(held, grads, *outputs))  # pyright: ignore[reportUnknownMemberType]


class _HoldUntilBackward(torch.autograd.Function):
    """Holds tensors from the forward to the backward of a loss."""

    @staticmethod
    def forward(ctx: FunctionCtx, loss: Tensor, *held: Tensor) -> Tensor:
        """Return the loss."""
        ctx.save_for_backward(*held)
        return loss.detach()

    @staticmethod
    def backward(ctx: FunctionCtx, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return the gradient of the loss."""
        return grads[0], *(None for _ in range(len(cast("Any", ctx).saved_tensors)))


def hold_until_backward(loss: Tensor, output: object) -> Tensor:
    """Return a loss such that an output lives until its backward begins."""
    held = [tensor.detach() for tensor in Microbatch.of(output).tensors]
    return cast("Tensor", _HoldUntilBackward.apply(loss, *held))  # pyright: ignore[reportUnknownMemberType]


@dataclass(frozen=True, kw_only=True, eq=False)
class Taken:
    """A value at the time when it was taken.

    Attributes:
        given: The value, with copies of its tensors outside of any graph.
        requires: Which of these tensors required grad.
        around: The state around the code that had it.
    """

    given: Microbatch
    requires: tuple[bool, ...]
    around: AmbientState

    @contextmanager
    def under_autocast(self) -> Generator[None]:
        """Run the block under the autocast that the value was taken under: a step may switch it on around its call."""
        with ExitStack() as stack:
            self.around.restore_autocast(stack, ambient_state())
            yield

    def leaves(self, *, new: bool) -> object:
        """Return the value, with leaves that require grad where its tensors did.

        Args:
            new: Whether they have their own memory, which lives as long as it is referenced.
        """
        tensors = [
            (tensor.clone() if new else tensor.detach()).requires_grad_(requires)
            for tensor, requires in zip(self.given.tensors, self.requires, strict=True)
        ]
        return Microbatch(self.given.template, tensors).value


def take(value: object) -> Taken:
    """Return a value as it is now."""
    microbatch = Microbatch.of(value)
    requires = tuple(tensor.requires_grad for tensor in microbatch.tensors)
    return Taken(
        given=Microbatch(microbatch.template, [tensor.detach().clone() for tensor in microbatch.tensors]),
        requires=requires,
        around=ambient_state(),
    )


def resident_bytes(
    step: Callable[[Any], object],
    modules: Sequence[nn.Module],
    optimizer: torch.optim.Optimizer | None,
    samples: Sequence[Sample],
    device: torch.device,
) -> int:
    """Return the bytes on a device that are neither of a pipeline's step nor of samples of its stages.

    See NOTE [ What a device holds ]. The profile of one stage counts the other stages and the batch there as well.
    """
    ours = [tensor for sample in samples for tensor in sample.holds]
    inputs = (*holdings_of(step).tensors, *ours)
    subject = Subject(step=step, model=None, models=tuple(modules), inputs=inputs, optimizer=optimizer)
    return subject.before(device).resident_bytes


def storage_bytes(tensors: Sequence[Tensor]) -> int:
    """Return the bytes of tensors, each storage once."""
    return StorageNumbers().new_bytes(tensors)
