"""The bytes that the optimizer of stages needs on one device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from torchremat.measuring.before import bytes_before
from torchremat.measuring.runs import Subject
from torchremat.measuring.step import check_kinds, check_steps_on
from torchremat.planning.devices.machines import Here
from torchremat.planning.profiles.optimizers import OptimizerBytes, measure_optimizer


def optimizer_bytes(
    modules: Sequence[nn.Module], optimizer: torch.optim.Optimizer, device: torch.device
) -> OptimizerBytes:
    """Return the bytes of an optimizer on a device; existing state counts like future state.

    Args:
        modules: The stages of this process.
        optimizer: Steps on their parameters, on this device and on others.
        device: Whose bytes count.

    Raises:
        StepError: It is not an optimizer, or has none of their parameters.
        UnsupportedError: It cannot step by itself.
    """

    def step() -> None:
        """Run nothing but the optimizer."""

    check_kinds(step, None, optimizer, needs_model=False)
    check_steps_on(optimizer, [parameter for module in modules for parameter in module.parameters()])
    subject = Subject(step=step, model=None, models=tuple(modules), inputs=(), optimizer=optimizer)
    there = bytes_before(models=(), leaves=(), optimizers=subject.optimizers, inputs=(), device=device).optimizer_bytes
    own = measure_optimizer(subject, optimizer, Here(device))
    return OptimizerBytes(name=own.name, state_bytes=there + own.state_bytes, peak_bytes=there + own.peak_bytes)
