"""Requests to a planner, checked before any work."""

from __future__ import annotations

from torch import nn

from torchremat.measuring.runs import subject_of
from torchremat.planning.budgets import check_budget
from torchremat.planning.devices.device import device_of
from torchremat.planning.devices.fakes import torch_device
from torchremat.planning.plan_options import PlanOptions
from torchremat.planning.profiles.tracing import Step


def check_request(model: nn.Module, step: Step, options: PlanOptions, budget: int | str, *, margin: int | str) -> None:
    """Raise if no plan can exist for a budget, whatever the step does; see `plan` for the arguments.

    With any other `on` nothing is checked: `placed` refuses it.

    Raises:
        BudgetError: The budget or the margin is no size, the device has fewer bytes, or the margin leaves none.
        DeviceError: With `on="meta"`: the device is not known, or its description lacks something.
        StepError: One of the arguments is no model, step or optimizer.
        UnsupportedError: The device does not exist.
    """
    if options.on == "meta":
        described = device_of(options.device)
        check_budget(budget, described.name, described.memory_bytes, margin=margin)
    elif options.on is None:
        subject = subject_of(step, model, options.optimizer, needs_model=True)
        check_budget(budget, subject.device(torch_device(options.device)), margin=margin)
