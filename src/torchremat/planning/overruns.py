"""Whether a device has allocated more than the budget of the plan that a model trains under."""

from __future__ import annotations

import torch

from torchremat._compat.accelerators import accelerator_of
from torchremat.errors import BudgetWarning, warn
from torchremat.regions.rehearsals import rehearsals
from torchremat.tensors.sizes import format_bytes


class Overruns:
    """Looks at the counters of a device whenever a forward under a plan begins, and warns once.

    Between two forwards run a backward, the step of the optimizer, and anything else that the program does.

    Args:
        device: A device whose allocator counts.
        budget_bytes: Bytes that it may allocate.
        peak_bytes: The predicted peak.
    """

    def __init__(self, device: torch.device, *, budget_bytes: int, peak_bytes: int) -> None:
        self._device = device
        self._budget_bytes = budget_bytes
        self._peak_bytes = peak_bytes
        self._rehearsals = -1
        self._is_told = False

    def look(self) -> None:
        """Warn if more was allocated since the previous forward."""
        if self._is_told:
            return
        accelerator, past = accelerator_of(self._device), rehearsals()
        peak_bytes = accelerator.counters(self._device).peak_bytes
        if peak_bytes <= self._budget_bytes:
            self._rehearsals = past
        elif past != self._rehearsals:
            # A plain step measured meanwhile, as while planning, has set a record that belongs to no training step.
            self._rehearsals = past
            accelerator.reset_peak(self._device)
        else:
            self._is_told = True
            warn(
                f"since the previous forward, {self._device} has given out up to {format_bytes(peak_bytes)}, above "
                f"the budget of {format_bytes(self._budget_bytes)} of the plan, which predicted "
                f"{format_bytes(self._peak_bytes)}. Is there memory that was not there when it was planned, a larger "
                "batch, or an evaluation that takes more than a step? Ask `torchremat.measure`, plan again, or give "
                "a `margin`.",
                BudgetWarning,
            )
