"""Whether training exceeds the budget of its plan: as a device has allocated, or as the CPU is sounded.

On the CPU only the profiler sees the allocator's events, and it takes time. So steps are sounded occasionally: the
second, and others at doubling distances, as long as this is a small share of the elapsed time.

    a forward begins      live bytes are counted, and the recording begins
    backward begins       the freed gradients are known
    backward has ended    the peak of forward and backward is known
    the optimizer steps   the peak of its step is known
    a forward begins      an excess over the budget is reported
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress

import torch

from torchremat._compat.accelerators import accelerator_of
from torchremat._compat.transforms import is_transformed
from torchremat.errors import BudgetWarning, UnsupportedError, warn
from torchremat.planning.sounded import Log, SoundedStep, SoundedUpdate
from torchremat.planning.trained import Trained
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


# The first step differs from the others: optimizers make their state in it.
_FIRST = 2
# The share of the training time that measuring may take. The first time it may take more, as planning did.
_SHARE = 0.01


class Soundings:
    """Measures steps of a model occasionally.

    Args:
        trained: The model.
        device: The CPU.
        clock: Returns the current time in seconds.

    Attributes:
        measured: The forwards whose steps were measured, by number.
    """

    def __init__(
        self, trained: Trained, device: torch.device, *, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._trained = trained
        self._device = device
        self._log = Log(clock)
        self._forwards = 0
        self._due = _FIRST
        self._began_s = 0.0
        self._step: SoundedStep | None = None
        self._update: SoundedUpdate | None = None
        self.measured: list[int] = []

    def begun(self, args: object) -> tuple[int, str] | None:
        """Record that a forward begins, and return the highest peak measured since, with its description."""
        self._forwards += 1
        if self._step is not None and self._step.is_elsewhere:
            return None
        if self._step is not None and self._step.goes_on(args):
            return None
        self._step = None
        found = max(self._log.peaks, default=None)
        self._log.peaks.clear()
        if self._forwards == 1:
            self._began_s = self._log.clock()
        if self._forwards >= self._due and not is_transformed():
            self._due = 2 * self._forwards
            self._sound(args)
        return found

    def came(self, output: object) -> None:
        """Record the output of a forward."""
        if self._step is not None:
            self._step.watch(output)

    def stop(self) -> None:
        """Stop the running measurement: the forward has raised, or the result is no longer needed."""
        if self._step is not None and self._step.is_elsewhere:
            return
        if self._step is not None:
            self._step.settle()
        if self._update is not None:
            self._update.drop()
        self._step = self._update = None

    def _sound(self, args: object) -> None:
        if self.measured and self._log.spent_s > _SHARE * (self._log.clock() - self._began_s):
            return
        self.stop()  # an optimizer that has not stepped yet
        with suppress(UnsupportedError), self._log.spending():  # a profiler runs, or another step is measured
            self._step = step = SoundedStep(self._trained, self._device, args, self._log)
            self._update = SoundedUpdate(self._trained, self._device, step, self._log)
            self.measured.append(self._forwards)
