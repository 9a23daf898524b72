"""The operators of a plain step and the values that its backward reads: the data for a bound over all schedules.

One plain step is recorded, see `measuring.recorder`. Its forward gives operators and values; its backward gives for
each operator which of these values it reads, and how many bytes made by backward itself are live then. These are
gradients: autograd alone decides their live ranges, so they are live in every schedule. So is the workspace of a
running kernel, which the allocator reports.

Tensors from before the step do not count, even if written: parameters, gradients, buffers, inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from torchremat._compat.operators import is_query
from torchremat.measuring.exhaustion import IfItFits
from torchremat.measuring.flops import FlopCounter
from torchremat.measuring.recorder import StepRecorder
from torchremat.measuring.runs import StepObserver, Subject
from torchremat.measuring.step_record import Run, SeenValue, StepRecord, StorageFreed
from torchremat.measuring.traces import AllocationRecorder, AllocationTrace
from torchremat.planning.devices.machines import Machine, has_room
from torchremat.planning.peers.peers import Peers
from torchremat.planning.profiles.reading import Profile
from torchremat.planning.searches.chains import Cost
from torchremat.planning.searches.flows import pooled_seconds, seconds_of
from torchremat.schedules.bounds import Pull
from torchremat.schedules.dataflow import Dataflow, Operator, Value
from torchremat.tensors.metadata import covers

_NO_ROOM = "a step without any recompute, which shows what backward reads, does not fit into memory"
ABOVE = (
    "a step without any recompute, which shows what backward reads, needs more than the budget; for a budget that is a "
    "share of its peak it is run"
)
TAKES_GRADIENTS = "the step takes gradients itself, and was planned by running it under each plan"
_LOOPED = "the step runs a `torchremat.loop`, which recomputes by itself"
_COMPILED = "the step runs compiled code, of which no operators are seen"


@dataclass(frozen=True, kw_only=True)
class PlainStep:
    """A plain step as data.

    Attributes:
        flow: The operators of its forward.
        pulls: The operators of its backward, in order.
        flops: Of forward and backward.
    """

    flow: Dataflow
    pulls: tuple[Pull, ...]
    flops: int


@dataclass(frozen=True, kw_only=True)
class Unseen:
    """No plain step, and why."""

    reason: str


def plain_step(
    subject: Subject,
    machine: Machine,
    cost: Cost,
    *,
    profile: Profile,
    peak_bytes: int,
    peers: Peers | None = None,
    stepping: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> PlainStep | Unseen:
    """Run a plain step without side effects, and return its record.

    Args:
        subject: The step; no module of its models may be wrapped.
        machine: Where it runs.
        cost: The unit of the costs.
        profile: Of the step: the seconds of plans and of their bounds come from one measurement.
        peak_bytes: Bytes that the step will need in addition to existing ones; it does not run if they are not free.
        peers: The processes of which all run it, or none.
        stepping: Lets the optimizer step as it does under the plan.
    """
    peers = peers or Peers()
    if profile.units.trace.loops:
        return Unseen(reason=_LOOPED)
    if not peers.everywhere(lambda: has_room(machine, peak_bytes)):
        return Unseen(reason=_NO_ROOM)
    with IfItFits(), stepping():
        return peers.each(lambda: _plain_step(subject, machine, cost, profile))
    return Unseen(reason=_NO_ROOM)


def _plain_step(subject: Subject, machine: Machine, cost: Cost, profile: Profile) -> PlainStep | Unseen:
    flops = FlopCounter()
    with machine.logged() as recorder:  # around all of the run: tensors without data are compared in it
        step = subject.train(_record(flops, recorder, machine.device))
    if any(run.is_compiled for run in step.runs):
        # It runs eagerly under a mode, so the record does not show the operators of a training step.
        return Unseen(reason=_COMPILED)
    pulls = step.pulls(None if recorder is None else recorder.trace)
    return PlainStep(flow=step.flow(_costs(step.runs, cost, profile)), pulls=pulls, flops=flops.total)


def _record(
    flops: FlopCounter, recorder: AllocationRecorder | None, device: torch.device
) -> StepObserver[_PlainRecord]:
    with StepRecorder(flops, recorder) as log:
        log.marks = False  # allocations of the forward do not matter
        yield
        forward = len(log.record.events), len(log.record.values)
        log.marks = log.sees_all = True
        yield
    return _PlainRecord(log.record, *forward, device)


def _costs(runs: list[Run], cost: Cost, profile: Profile) -> list[float]:
    if cost == "flops":
        return [float(run.flops) for run in runs]
    if [run.name for run in runs] == [run.name for run in profile.units.trace.operators.runs]:
        return seconds_of(profile)
    seconds = pooled_seconds(runs)
    factor = profile.forward_seconds / max(sum(seconds), 1e-12)
    return [one * factor for one in seconds]


class _PlainRecord:
    """Reads the record of a plain step whose forward has the first `events` and `values`; others count on a device.

    Attributes:
        runs: The operators of the forward.
    """

    def __init__(self, record: StepRecord, events: int, values: int, device: torch.device) -> None:
        self.runs = [event for event in record.events[:events] if isinstance(event, Run)]
        self._backward = record.events[events:]
        self._forward_values, self._values = record.values[:values], record.values
        self._device = device

    def _counts(self, value: SeenValue) -> bool:
        return covers(self._device, value.device)

    def flow(self, costs: list[float]) -> Dataflow:
        """Return the forward with these costs."""
        made = {value for run in self.runs for value in run.makes}
        values = self._forward_values
        free = {one.storage for number, one in enumerate(values) if number not in made or not self._counts(one)}
        operators = (
            Operator(name=run.name, inputs=run.reads, outputs=run.makes, cost=cost)
            for run, cost in zip(self.runs, costs, strict=True)
        )
        sizes = (Value(size_bytes=0 if one.storage in free else one.size_bytes) for one in values)
        return Dataflow(operators=tuple(operators), values=tuple(sizes))

    def pulls(self, trace: AllocationTrace | None) -> tuple[Pull, ...]:
        """Return the operators of the backward, with the most bytes live in addition to the values that each reads.

        These are gradients, and with the allocations, if known, the workspaces of kernels.
        """
        last = {value.storage: number for number, value in enumerate(self._forward_values)}
        gradients: dict[int, int] = {}  # by live storage, its bytes
        live_bytes = 0
        found: list[Pull] = []
        for event in self._backward:
            if isinstance(event, StorageFreed):
                live_bytes -= gradients.pop(event.storage, 0)
            elif isinstance(event, Run) and not is_query(event.op_info.operator):
                before_bytes = live_bytes
                given = {self._values[value].storage for value in event.reads}
                for made in (self._values[value] for value in event.makes):
                    # An argument that it writes to, such as a `.grad` that it adds to, existed before.
                    if made.storage not in given and self._counts(made):
                        gradients[made.storage] = made.size_bytes
                        live_bytes += made.size_bytes
                other_bytes = live_bytes
                if trace is not None:
                    other_bytes = max(other_bytes, before_bytes + trace.rise_bytes_between(event.begins, event.ends))
                reads = tuple(sorted(last[storage] for storage in given if storage in last))
                found.append(Pull(reads=reads, other_bytes=other_bytes))
        return tuple(found)
