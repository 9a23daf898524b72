"""The checks while a model trains under a plan: that the bytes of its steps are those that the plan counted.

    DistributedDataParallel put around it      at the first forward, by the buckets
    an optimizer that was not planned          when one has stepped, by its state
    more than the budget                       at each forward by the counters of a device, on the CPU occasionally

Changes without an effect on the budget are not reported.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from torchremat._compat.accelerators import accelerator_of
from torchremat._compat.sharding import data_parallel_around
from torchremat.errors import BudgetWarning, PlanWarning, warn
from torchremat.measuring.communication import communication_bytes
from torchremat.planning.overruns import Overruns, Soundings
from torchremat.planning.trained import Trained
from torchremat.tensors.sizes import format_bytes

# An optimizer with less than this share of the planned state is of another kind. The planned kind may have less for a
# while: parameters without a gradient at first have no state.
_LITTLE = 0.1


@dataclass(frozen=True, kw_only=True)
class CountedBytes:
    """The bytes that a plan has counted.

    Attributes:
        device: The device of the bytes, by its name in plans.
        budget_bytes: The budget.
        peak_bytes: The predicted peak.
        state_bytes: Bytes of the optimizer's state.
        has_optimizer: Whether one was given.
        bucket_bytes: Bytes of the buckets that data parallelism communicates from.
        recomputes: Whether anything is recomputed or stored.
    """

    device: str
    budget_bytes: int
    peak_bytes: int
    state_bytes: int
    has_optimizer: bool
    bucket_bytes: int
    recomputes: bool


class Checks:
    """The checks on a model under a plan, and on copies of it; they keep neither alive.

    Args:
        counted: The bytes that the plan has counted.
        model: The model; None if it was loaded from a file together with its plan.
        device: The device of its parameters.
    """

    def __init__(self, counted: CountedBytes, device: torch.device, model: nn.Module | None = None) -> None:
        self._counted = counted
        self._device = device
        self._trained = Trained(model, device)
        self._is_first = True
        self._is_stepped = False
        self._overruns = self._soundings = None
        accelerator = accelerator_of(device)
        if accelerator.counts:
            self._overruns = Overruns(device, budget_bytes=counted.budget_bytes, peak_bytes=counted.peak_bytes)
        elif accelerator.records == "profiler" and counted.device == str(device):
            self._soundings = Soundings(self._trained, device)

    def __reduce__(self) -> tuple[object, ...]:
        return Checks, (self._counted, self._device)

    def only_counters(self) -> None:
        """Check only the counters of the device: the budget is a part of one that another owner counts."""
        self._is_first, self._is_stepped, self._soundings = False, True, None

    def begun(self, module: nn.Module, name: str, args: object) -> None:
        """Run the checks that are possible when a forward begins.

        Args:
            module: The called module.
            name: Its name in messages.
            args: Its arguments.
        """
        self._trained.meet(module)
        if self._is_first:
            self._is_first = False
            self._trained.listen()
            self._look_around(name)
        elif not self._is_stepped and self._trained.optimizers:
            self._is_stepped = True
            self._trained.stop()
            self._compare_optimizers(name)
        if self._overruns is not None:
            self._overruns.look()
        if self._soundings is not None:
            found = self._soundings.begun(args)
            if found is not None and found[0] > self._counted.budget_bytes:
                self._soundings.stop()
                self._soundings = None
                self._tell_measured(*found)

    def came(self, output: object) -> None:
        """Record the output of a forward."""
        if self._soundings is not None:
            self._soundings.came(output)

    def failed(self) -> None:
        """Record that a forward has raised."""
        if self._soundings is not None:
            self._soundings.stop()

    def _look_around(self, name: str) -> None:
        around = data_parallel_around()
        if around is None:
            return
        more_bytes = communication_bytes([around], self._device) - self._counted.bucket_bytes
        if more_bytes > 0 and self._is_above(more_bytes):
            warn(
                f"{name} has a plan and was put into {type(around).__name__} afterwards, whose buckets take "
                f"{format_bytes(more_bytes)} that the plan has not counted: {self._sum(more_bytes)}. Plan the "
                f"{type(around).__name__}, or pass it `gradient_as_bucket_view=True`.",
                PlanWarning,
            )

    def _compare_optimizers(self, name: str) -> None:
        state_bytes, planned_bytes = self._trained.bytes_now().optimizer_bytes, self._counted.state_bytes
        kinds = " and ".join(dict.fromkeys(type(one).__name__ for one in self._trained.optimizers))
        has = f"{format_bytes(state_bytes)} of state" if state_bytes else "no state"
        more_bytes = state_bytes - planned_bytes
        if more_bytes > 0 and self._is_above(more_bytes):
            counted = (
                f"the plan has counted {format_bytes(planned_bytes)}"
                if self._counted.has_optimizer
                else "the plan was made without an optimizer"
            )
            warn(
                f"{name} is trained by {kinds}, which has {has}, and {counted}: {self._sum(more_bytes)}. Plan with the "
                "optimizer that trains, `optimizer=`.",
                PlanWarning,
            )
        elif state_bytes < _LITTLE * planned_bytes and self._counted.recomputes:
            warn(
                f"{name} is trained by {kinds}, which has {has}, and the plan has counted "
                f"{format_bytes(planned_bytes)}: it recomputes more than the budget asks for. Plan with the optimizer "
                "that trains, `optimizer=`.",
                PlanWarning,
            )

    def _is_above(self, more_bytes: int) -> bool:
        return self._counted.peak_bytes + more_bytes > self._counted.budget_bytes

    def _sum(self, more_bytes: int) -> str:
        return (
            f"a step takes up to {format_bytes(self._counted.peak_bytes + more_bytes)}, above the budget of "
            f"{format_bytes(self._counted.budget_bytes)}"
        )

    def _tell_measured(self, peak_bytes: int, when: str) -> None:
        over_bytes = peak_bytes - self._counted.budget_bytes
        warn(
            f"a step was measured at {format_bytes(peak_bytes)}, in {when}: {format_bytes(over_bytes)} above the "
            f"budget of {format_bytes(self._counted.budget_bytes)} of the plan, which predicted "
            f"{format_bytes(self._counted.peak_bytes)}. Is the batch larger than the one that was planned, or does the "
            "step call other modules, or another optimizer? Ask `torchremat.measure`, plan again with the step that "
            "takes most, or give a `margin`.",
            BudgetWarning,
        )


def checks_on(model: nn.Module, counted: CountedBytes) -> Checks:
    """Return the checks on a model under a plan that has counted these bytes."""
    device = next((one.device for one in model.parameters()), torch.device("cpu"))
    return Checks(counted, device, model)
