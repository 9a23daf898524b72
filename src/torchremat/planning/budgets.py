"""A budget: bytes, or a percentage of the plain step's peak."""

from __future__ import annotations

import math
import re

import torch

from torchremat._compat.accelerators import accelerator_of
from torchremat.errors import BudgetError
from torchremat.planning.hosts import Host
from torchremat.tensors.sizes import format_bytes, parse_bytes

_PERCENT = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*%\s*")


def percentage_of(budget: int | str) -> float | None:
    """Return the number in a budget like `"60%"`, or None if it is no percentage.

    Raises:
        BudgetError: The percentage is 0 or not finite.
    """
    matched = _PERCENT.fullmatch(budget) if isinstance(budget, str) else None
    if matched is None:
        return None
    percent = float(matched[1])
    if not 0 < percent < math.inf:
        raise BudgetError(f"budget={budget!r}: a percentage above 0 is needed.")
    return percent


def bytes_of(budget: int | str, device: torch.device | str, capacity: int | None = None) -> int:
    """Return the bytes of a budget that is no percentage.

    Args:
        budget: Bytes, or a size like `"6GiB"`.
        device: The device that it is for; of one that is not here, the name.
        capacity: The bytes of a device that is not here.

    Raises:
        BudgetError: It is no size, or more than the device has.
    """
    size = parse_bytes(budget)
    if isinstance(device, torch.device):
        capacity = capacity_of(device)
    if capacity is not None and size > capacity:
        raise BudgetError(
            f"budget={budget!r} is {format_bytes(size)}, but {device} has {format_bytes(capacity)} in all."
        )
    return size


def check_budget(
    budget: int | str, device: torch.device | str, capacity: int | None = None, *, margin: int | str = 0
) -> None:
    """Raise where a budget cannot be met on a device, or a margin leaves nothing of it, before any work is done.

    Raises:
        BudgetError: It is no size and no percentage, or more than the device has; or the margin is no size, or as large
            as the budget.
    """
    reserved = margin_of(margin)
    size = bytes_of(budget, device, capacity) if percentage_of(budget) is None else None
    if size is not None and reserved >= size:
        raise BudgetError(
            f"margin={margin!r} is {format_bytes(reserved)}, which leaves nothing of the budget of "
            f"{format_bytes(size)} ({budget})."
        )


def margin_of(margin: int | str) -> int:
    """Return the bytes of a margin, which unlike a budget may be 0.

    Raises:
        BudgetError: It is no size.
    """
    return parse_bytes(margin, least=0)


def capacity_of(device: torch.device) -> int | None:
    """Return the bytes that a device has in all; None if that cannot be known."""
    accelerator = accelerator_of(device)
    return Host().capacity_bytes() if accelerator.is_host else accelerator.total_bytes(device)


def free_on(device: torch.device) -> int | None:
    """Return the bytes that are free on a device now; None if that cannot be known."""
    accelerator = accelerator_of(device)
    return Host().free_bytes() if accelerator.is_host else accelerator.free_bytes(device)
