"""Checks a training under a plan: whether its step is the planned one, and stays within the planned bytes.

    another plan in another process            at the first forward
    DistributedDataParallel put around it      at the first forward, by the buckets
    a forward that finds gradients             at the first one that does, among the first of them
    an optimizer that was not planned          when one has stepped, by its state
    more than the budget                       at each forward by the counters of a device, on the CPU occasionally

Changes without an effect on the budget are not reported.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from torchremat._compat.accelerators import accelerator_of
from torchremat._compat.autograd import current_graph_task
from torchremat._compat.data_parallel import data_parallel_around
from torchremat._compat.transforms import is_transformed
from torchremat.errors import BudgetWarning, OrderWarning, PlanWarning, ShapeWarning, warn
from torchremat.measuring.communication import communication_bytes
from torchremat.measuring.optimizers import steps_alone
from torchremat.optimizing.partial_steps import steps_in_parts
from torchremat.planning.profiles.traces import named
from torchremat.planning.training.conditions import Conditions, InputSizes, conditions_of
from torchremat.planning.training.sounded import Soundings
from torchremat.planning.training.trained import Trained
from torchremat.regions.calls import Body
from torchremat.regions.rehearsals import is_rehearsing, rehearsals
from torchremat.regions.runs import Scope
from torchremat.tensors.sizes import format_bytes

# An optimizer with less than this share of the planned state is of another kind. The planned kind may have less for a
# while: parameters without a gradient at first have no state.
_LITTLE = 0.1
# How many forwards look for gradients of earlier steps. A loop that accumulates has some in its second.
_LOOKS = 64


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
        gradient_bytes: Bytes of the gradients that a step begins with.
        recomputes: Whether anything is recomputed or stored.
    """

    device: str
    budget_bytes: int
    peak_bytes: int
    state_bytes: int
    has_optimizer: bool
    bucket_bytes: int
    gradient_bytes: int
    recomputes: bool


class Checks:
    """The checks on a model under a plan, and on copies of it; they keep neither alive.

    `model` is None if it was loaded from a file together with its plan. `agree` is called in the first step: it raises
    where other processes have not the same plan.
    """

    def __init__(
        self,
        counted: CountedBytes,
        device: torch.device,
        model: nn.Module | None = None,
        agree: Callable[[], None] | None = None,
    ) -> None:
        self._agree = agree
        self._counted = counted
        self._device = device
        self._trained = Trained(model, device)
        self._is_first = True
        self._is_stepped = False
        self._looks = _LOOKS
        self._soundings = None
        self._rehearsals = -1  # how many there were when the counters were last within the budget
        accelerator = accelerator_of(device)
        self._counts = accelerator.counts
        if not self._counts and accelerator.records == "profiler" and counted.device == str(device):
            self._soundings = Soundings(self._trained, device)

    def __reduce__(self) -> tuple[object, ...]:
        return Checks, (self._counted, self._device)

    def only_counters(self) -> None:
        """Check only the counters of the device: the budget is a part of one that another owner counts."""
        self._is_first, self._is_stepped, self._looks, self._soundings = False, True, 0, None

    def begun(self, module: nn.Module, name: str, args: object) -> None:
        """Run the checks that are possible when a forward begins; `name` is that of the module in messages."""
        self._trained.meet(module)
        if self._is_first:
            self._is_first = False
            if self._agree is not None:
                self._agree()
            self._trained.listen()
            self._look_around(name)
        elif not self._is_stepped and self._trained.optimizers:
            self._is_stepped = True
            self._trained.stop()
            self._compare_optimizers(name)
        if self._looks:
            self._looks -= 1
            self._look_for_gradients(name)
        if self._counts:
            self._look_at_counters()
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

    def _look_at_counters(self) -> None:
        """Warn once if more was allocated since the previous forward, by the step or by anything else that ran."""
        accelerator, past = accelerator_of(self._device), rehearsals()
        peak_bytes = accelerator.counters(self._device).peak_bytes
        if peak_bytes <= self._counted.budget_bytes:
            self._rehearsals = past
        elif past != self._rehearsals:
            # A plain step measured meanwhile, as while planning, has set a record that belongs to no training step.
            self._rehearsals = past
            accelerator.reset_peak(self._device)
        else:
            self._counts = False
            warn(
                f"since the previous forward, {self._device} has given out up to {format_bytes(peak_bytes)}, above "
                f"the budget of {format_bytes(self._counted.budget_bytes)} of the plan, which predicted "
                f"{format_bytes(self._counted.peak_bytes)}. Is there memory that was not there when it was planned, a "
                "larger batch, or an evaluation that takes more than a step? Ask `torchremat.measure`, plan again, or "
                "give a `margin`.",
                BudgetWarning,
            )

    def _look_around(self, name: str) -> None:
        around = data_parallel_around()
        if around is None:
            return
        more_bytes = communication_bytes(around.modules(), self._device) - self._counted.bucket_bytes
        if more_bytes > 0 and self._is_above(more_bytes):
            warn(
                f"{name} has a plan and was put into {type(around).__name__} afterwards, whose buckets take "
                f"{format_bytes(more_bytes)} that the plan has not counted: {self._sum(more_bytes)}. Plan the "
                f"{type(around).__name__}, or pass it `gradient_as_bucket_view=True`.",
                PlanWarning,
            )

    def _look_for_gradients(self, name: str) -> None:
        if not self._trained.has_gradients:
            return
        self._looks = 0
        more_bytes = self._trained.bytes_now().gradient_bytes - self._counted.gradient_bytes
        if more_bytes > 0 and self._is_above(more_bytes):
            warn(
                f"{name} has a plan for steps that begin without gradients, and a forward begins with "
                f"{format_bytes(more_bytes)} of them that it has not counted: {self._sum(more_bytes)}. If gradients "
                "of several backwards add up, or are set to zero and not to None, plan with `accumulates=True`; else "
                "call `optimizer.zero_grad()` before the forward.",
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
            optimizers = self._trained.optimizers
            parts = [found for one in optimizers if (found := steps_in_parts(one)) is not None]
            if any(one.mover is not None for one in parts):
                advice = (
                    "State that waits in a store has been read since the last step, as for a checkpoint, and is in "
                    "memory until the next one."
                )
            elif len(optimizers) == 1 and steps_alone(optimizers[0]):
                advice = (
                    "Plan with the optimizer that trains, `optimizer=`; if you did, it got more state in its first "
                    "steps than by its own step, as from a wrapper around it: plan after these."
                )
            else:
                advice = (
                    f"A plan counts one optimizer whose step runs by itself; for the rest give `margin={more_bytes}`."
                )
            warn(
                f"{name} is trained by {kinds}, which has {has}, and {counted}: {self._sum(more_bytes)}. {advice}",
                PlanWarning,
            )
        elif state_bytes < _LITTLE * planned_bytes and self._counted.recomputes:
            warn(
                f"{name} is trained by {kinds}, which has {has}, and the plan has counted "
                f"{format_bytes(planned_bytes)}: it recomputes more than the budget asks for. Plan with the optimizer "
                "that trains, `optimizer=`, and after `offload_optimizer` if its state waits in a store.",
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


def checks_on(model: nn.Module, counted: CountedBytes, agree: Callable[[], None]) -> Checks:
    """Return the checks on a model under a plan that has counted these bytes; see `Checks` for `agree`."""
    device = next((one.device for one in model.parameters()), torch.device("cpu"))
    return Checks(counted, device, model, agree)


# NOTE [ The first step under a plan ]
# A plan is for the step as it was planned: mode, precision, sharding and calls. The first step after the plan was
# applied is compared with that, once, and each difference is one warning that names it; later steps are not checked.
# A run of the library's own, to measure, is no training step, and is not compared: `rehearsing` marks it.


@dataclass(frozen=True, eq=False)
class PlannedScope(Scope):
    """The scope of a root, which also checks the sizes of the root's inputs."""

    root: str = ""
    inputs: InputSizes | None = None
    others: tuple[str, ...] = field(default=(), kw_only=True)  # roots inside this one, which look at their own calls
    rise_bytes: int | None = None
    slowdown: float | None = None
    gradient_bytes: int = field(default=0, kw_only=True)  # of those that the planned step begins with
    told: list[str] = field(default_factory=list[str])  # once per application of a plan
    conditions: Conditions | None = None
    # Reference for the comparison of the first step. See NOTE [ The first step under a plan ]
    seen: list[object] = field(default_factory=list[object])
    checks: Checks | None = None

    def run(self, body: Body, /, *args: object, **kwargs: object) -> object:
        """Run `body` with the scope open."""
        if self.inputs is not None and not self.told:
            said = self.inputs.are_exceeded(self.root, (args, kwargs))
            if said is not None:
                self.told.append(said)
                warn(said, ShapeWarning)
        if self.checks is None or not _is_a_step():
            return super().run(body, *args, **kwargs)
        try:
            output = super().run(body, *args, **kwargs)
        except BaseException:
            self.checks.failed()
            raise
        self.checks.came(output)
        return output

    def begun(self, module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        """Compare, in the first step, the conditions of the call with those of the planned one."""
        if not _is_a_step():
            return
        if self.checks is not None:
            self.checks.begun(module, named(self.root), (args, kwargs))
        if self.seen or self.conditions is None:
            return
        now = conditions_of(module)
        self.seen.append(now)
        for said in self.conditions.differences(now):
            warn(f"{named(self.root)} has a plan that was made under other conditions: {said}.", PlanWarning)

    def counted_elsewhere(self) -> None:
        """Leave the bytes of the model to the owner of the plan, which is one of several plans or changes."""
        if self.checks is not None:
            self.checks.only_counters()

    def ended(self, counts: Mapping[str, int]) -> None:
        """Compare, in the first step, the number of calls of modules with the planned number."""
        if len(self.seen) != 1 or self.calls_vary:
            return
        self.seen.append(counts)
        planned = Counter(
            name
            for name, _ in self.choices
            if is_part_of(name, self.root) and not any(is_part_of(name, one) for one in self.others)
        )
        fewer = [name for name, times in planned.items() if counts.get(name, 0) < times]
        if fewer:
            name = fewer[0]
            more = f", and {len(fewer) - 1} others were called less often too" if fewer[1:] else ""
            warn(
                f"`{name}` was called {counts.get(name, 0)} times in one forward, and planned for {planned[name]}"
                f"{more}: the step that was planned is not the one that trains, and its peak may be elsewhere. Plan "
                "the step that trains.",
                OrderWarning,
            )


def _is_a_step() -> bool:
    """Return whether a step of the user's begins, not a recompute by a checkpoint around the model.

    Under a transform the parameters may be others, whose memory cannot be asked for.
    """
    return not (is_rehearsing() or is_transformed()) and current_graph_task() == -1


def is_part_of(name: str, owner: str) -> bool:
    """Return whether a module is another one, or is inside it, by their names."""
    return f"{name}.".startswith(f"{owner}." if owner else "")
