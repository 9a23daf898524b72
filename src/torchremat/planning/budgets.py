"""A budget: bytes, or relative to the step: a share of its plain peak or of its activations, or the smallest."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from torchremat._compat.accelerators import accelerator_of
from torchremat.errors import BudgetError
from torchremat.planning.hosts import HostMachine
from torchremat.tensors.sizes import format_bytes, parse_bytes

_SHARE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*%\s*(?:of\s+(\w+)\s*)?", re.IGNORECASE)
_SMALLEST = "min"
# No training step fits into less, so the caller has left out the unit of the number.
_LEAST_BYTES = 1000


@dataclass(frozen=True, kw_only=True)
class Relative:
    """A budget that is known only when the step is.

    Attributes:
        percent: The share; 100 for the smallest.
        of: `"peak"`: the plain step's peak. `"activations"`: the part of that peak beyond the live bytes before the
            step, the only part that can be recomputed. `"smallest"`: the smallest budget that a plan was found for.
    """

    percent: float
    of: Literal["peak", "activations", "smallest"]

    def bytes(self, *, plain_bytes: int, before_bytes: int, smallest: Callable[[], int]) -> int:
        """Return the budget in bytes.

        Args:
            plain_bytes: The peak of the plain step.
            before_bytes: Live bytes before it.
            smallest: Returns the smallest budget that works; this may start a search.
        """
        match self.of:
            case "peak":
                return int(plain_bytes * self.percent / 100)
            case "activations":
                return before_bytes + int((plain_bytes - before_bytes) * self.percent / 100)
            case "smallest":
                return smallest()


def relative_of(budget: int | str) -> Relative | None:
    """Return a budget like `"60%"`, `"40% of activations"` or `"min"`; None for any other.

    Raises:
        BudgetError: The percentage is 0 or not finite, or of an unknown quantity.
    """
    if not isinstance(budget, str):
        return None
    if budget.strip().lower() == _SMALLEST:
        return Relative(percent=100.0, of="smallest")
    matched = _SHARE.fullmatch(budget)
    if matched is None:
        return None
    percent, of = float(matched[1]), (matched[2] or "peak").lower()
    if not 0 < percent < math.inf:
        raise BudgetError(f"budget={budget!r}: expected a percentage above 0.")
    if of not in ("peak", "activations"):
        raise BudgetError(
            f'budget={budget!r}: a percentage is a share of the plain step\'s peak, "60%", or of the part of it that '
            'the step adds to the bytes live before it, "40% of activations".'
        )
    return Relative(percent=percent, of=of)


def shares_that_work(size: int, *, plain_bytes: int, before_bytes: int) -> str:
    """Return a sentence with the shares equal to a budget, rounded up; empty if it covers the plain step."""
    if size > plain_bytes or plain_bytes <= before_bytes:
        return ""
    of_peak = math.ceil(100 * size / plain_bytes)
    of_activations = math.ceil(100 * (size - before_bytes) / (plain_bytes - before_bytes))
    return f'As shares: "{of_peak}%", or "{of_activations}% of activations"; budget="min" asks for the smallest.'


def checked_bytes(budget: int | str) -> int:
    """Return the bytes of a budget that is a size.

    Raises:
        BudgetError: It is no size, or an implausible one: `60` and `0.6`.
    """
    number = _number_of(budget)
    if number is not None and 0 < number < _LEAST_BYTES and budget is not True:
        unit = "GiB" if number <= 100 else "MiB"
        shares = [f'"{100 * number:g}%"'] if number < 1 else [f'"{number:g}%"'] if number <= 100 else []
        meant = " or ".join([*shares, f'"{number:g}{unit}"'])
        what = f"{budget} bytes" if isinstance(budget, int) else "not a size, since it has no unit"
        raise BudgetError(f"budget={budget!r} is {what}. Did you mean {meant}?")
    return parse_bytes(budget)


def _number_of(budget: object) -> float | None:
    """Return a budget that is a bare number, or text with one."""
    if isinstance(budget, int | float):
        return float(budget) if abs(budget) < _LEAST_BYTES else None
    if (
        isinstance(budget, str)
        and re.fullmatch(r"\s*([0-9]+\.?[0-9]*|\.[0-9]+)\s*", budget, re.ASCII)
        and len(budget) < 20
    ):
        return float(budget)
    return None


def bytes_of(budget: int | str, device: torch.device | str, capacity: int | None = None) -> int:
    """Return the bytes of a budget that does not depend on the step.

    Args:
        budget: Bytes, or a size like `"6GiB"`.
        device: The device of the budget; the name of an absent one.
        capacity: The bytes of an absent device.

    Raises:
        BudgetError: It is no size, or more than the device has.
    """
    size = checked_bytes(budget)
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
    """Raise if a budget cannot be met on a device, or a margin leaves nothing of it, before any work is done.

    Raises:
        BudgetError: It is no budget, or more than the device has; or the margin is no size, or as large
            as the budget.
    """
    reserved = margin_of(margin)
    size = bytes_of(budget, device, capacity) if relative_of(budget) is None else None
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


def optimizer_alone(
    size: int, budget: int | str, optimizer: Optimizer | None, *, peak_bytes: int, reserved_bytes: int
) -> str:
    """Return the message for a budget below the peak of `optimizer.step()`, which no plan lowers.

    `size` is the budget in bytes, `budget` as it was given; `reserved_bytes` of it have to stay free.
    """
    reserved = f", of which {format_bytes(reserved_bytes)} are set aside" if reserved_bytes else ""
    return (
        f"the budget is {format_bytes(size)} ({budget}){reserved}, but optimizer.step() alone peaks at "
        f"{format_bytes(peak_bytes)}, which no recomputation lowers. Smallest budget that works: "
        f"{peak_bytes + reserved_bytes} bytes." + _needing_less(optimizer)
    )


def _needing_less(optimizer: Optimizer | None) -> str:
    """Return the options with which an optimizer's step has fewer temporaries, as a sentence; "" if it has none."""
    groups = [] if optimizer is None else optimizer.param_groups
    options = {
        # None means foreach wherever a tensor is not on the host.
        "foreach=False": any(
            group.get("foreach", False) is not False and (group["foreach"] or not _is_on_host(group["params"]))
            for group in groups
        ),
        "fused=True": any("fused" in group and not group["fused"] for group in groups),
    }
    chosen = " or ".join(option for option, lowers in options.items() if lowers)
    return f" {type(optimizer).__name__} with {chosen} needs less." if chosen else ""


def _is_on_host(tensors: Iterable[Tensor]) -> bool:
    return all(accelerator_of(one.device).is_host for one in tensors)


def capacity_of(device: torch.device) -> int | None:
    """Return the total bytes of a device; None if unknown."""
    accelerator = accelerator_of(device)
    return HostMachine().capacity_bytes() if accelerator.is_host else accelerator.total_bytes(device)


def free_on(device: torch.device) -> int | None:
    """Return the bytes that are free on a device now; None if unknown."""
    accelerator = accelerator_of(device)
    return HostMachine().free_bytes() if accelerator.is_host else accelerator.free_bytes(device)
