"""Live storages before a training step, in bytes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from torchremat._compat.accelerators import taken_bytes
from torchremat._compat.sharding import unreduced_gradients
from torchremat.measuring.communication import communication_bytes
from torchremat.measuring.storages import address_of, tensors_in
from torchremat.stores.stored_parameters import StoredParameter
from torchremat.tensors.metadata import covers


@dataclass(frozen=True, kw_only=True)
class BytesBefore:
    """Bytes on one device before a step. A storage that two parts reach counts under the first.

    `communication` holds the buffers that data parallelism communicates from. `resident` holds the memory that a
    device's libraries and others keep there, and `slack` the bytes that its allocator may give during the step beyond
    the requested ones: see NOTE [ What a device holds ].
    """

    parameter_bytes: int
    gradient_bytes: int
    buffer_bytes: int
    optimizer_bytes: int
    input_bytes: int
    communication_bytes: int = 0
    resident_bytes: int = 0
    slack_bytes: int = 0

    @property
    def parts(self) -> dict[str, int]:
        """The bytes by purpose; purposes that few steps have are left out where they are zero."""
        few = {
            "communication": self.communication_bytes,
            "resident": self.resident_bytes,
            "slack": self.slack_bytes,
        }
        return {
            "parameters": self.parameter_bytes,
            "gradients": self.gradient_bytes,
            "buffers": self.buffer_bytes,
            "optimizer": self.optimizer_bytes,
            "inputs": self.input_bytes,
            **{name: size for name, size in few.items() if size},
        }

    @property
    def total_bytes(self) -> int:
        """The sum."""
        return sum(self.parts.values())


def bytes_before(
    *,
    models: Iterable[nn.Module],
    leaves: Iterable[Tensor],
    optimizers: Iterable[torch.optim.Optimizer],
    inputs: Iterable[Tensor],
    device: torch.device,
) -> BytesBefore:
    """Return the bytes on `device` before a step.

    Args:
        models: Their parameters and buffers count.
        leaves: Their gradients count, and leaves that are not inputs count as parameters.
        optimizers: The tensors of their state count, if they have any before their first step.
        inputs: The tensors that the step holds.
        device: One without an index stands for all of its type.
    """
    leaves, inputs = list(leaves), list(inputs)
    modules = list({id(one): one for model in models for one in model.modules()}.values())
    counted: set[int] = set()

    def bytes_of(tensors: Iterable[object]) -> int:
        total = 0
        for tensor in tensors_in([one for one in tensors if type(one) is not StoredParameter]):
            storage = tensor.untyped_storage()
            if covers(device, tensor.device) and address_of(storage) not in counted:
                counted.add(address_of(storage))
                total += taken_bytes(storage)
        return total

    held = {id(tensor) for tensor in inputs}
    parameters = [one for module in modules for one in module._parameters.values()]
    others = [leaf for leaf in leaves if id(leaf) not in held]  # the optimizer may have more than the model
    state = [one for own in optimizers for one in cast("dict[Tensor, object]", own.state).values()]
    return BytesBefore(
        parameter_bytes=bytes_of([*parameters, *others]),
        gradient_bytes=bytes_of([*map(_gradient_of, leaves), *unreduced_gradients(modules).values()]),
        buffer_bytes=bytes_of(one for module in modules for one in module._buffers.values()),
        optimizer_bytes=bytes_of(state),
        input_bytes=bytes_of(inputs),
        communication_bytes=communication_bytes(modules, device),
    )


def _gradient_of(tensor: Tensor) -> Tensor | None:
    # In a `functional_call` the parameters of a module may be no leaves, whose gradient torch warns of.
    return tensor.grad if tensor.is_leaf or tensor.retains_grad else None
