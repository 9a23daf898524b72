"""The operators of a plain step and the values that its backward reads: the data for a bound over all schedules.

One plain step runs under a log. In its forward the log notes operators and values, as in a profile's trace; in its
backward it notes for each operator which of these values it reads, and how many bytes made by backward itself are live
then. These are gradients: autograd alone decides their live ranges, so they are live in every schedule. So is the
workspace of a running kernel, which the allocator reports.

Tensors from before the step do not count, even if written: parameters, gradients, buffers, inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, UntypedStorage

from torchremat._compat.accelerators import taken_bytes
from torchremat.measuring.exhaustion import is_out_of_memory
from torchremat.measuring.flops import FlopCounter
from torchremat.measuring.runs import Subject
from torchremat.measuring.step import run_backward
from torchremat.measuring.storages import StorageMap, address_of
from torchremat.measuring.traces import AllocationRecorder, AllocationTrace
from torchremat.planning.devices.machines import Machine, has_room
from torchremat.planning.peers.peers import Peers
from torchremat.planning.profiles.operators import OperatorTrace, OperatorTracer
from torchremat.planning.profiles.reading import Profile
from torchremat.planning.searches.chains import Cost
from torchremat.planning.searches.flows import pooled_seconds, seconds_of
from torchremat.schedules.bounds import Pull
from torchremat.schedules.dataflow import Dataflow, Operator, Value
from torchremat.tensors.parts import memories_of
from torchremat.tensors.structure import tensors_in

_DEVICE = torch.ops.prim.device.default  # a query for the device of a fake is not an operator of a step
_NO_ROOM = "a step without any recompute, which shows what backward reads, does not fit into memory"
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

    def stepped() -> PlainStep | Unseen:
        with stepping():
            return _plain_step(subject, machine, cost, profile)

    try:
        return peers.each(stepped)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        return Unseen(reason=_NO_ROOM)


def _plain_step(subject: Subject, machine: Machine, cost: Cost, profile: Profile) -> PlainStep | Unseen:
    flops = FlopCounter()
    with (
        machine.logged() as recorder,
        subject.untouched(),
        _PlainStepTracer(flops, machine.device, recorder) as log,
    ):
        loss = subject.forward()
        log.in_backward = True
        run_backward(loss)
        del loss
    if any(run.is_compiled for run in log.trace.runs):
        # It runs eagerly under a log, so the log does not show the operators of a training step.
        return Unseen(reason=_COMPILED)
    costs = _costs(log.trace, cost, profile)
    pulls = log.pulls(None if recorder is None else recorder.trace)
    return PlainStep(flow=log.flow(costs), pulls=pulls, flops=flops.total)


def _costs(trace: OperatorTrace, cost: Cost, profile: Profile) -> list[float]:
    if cost == "flops":
        return [float(run.flops) for run in trace.runs]
    if [run.name for run in trace.runs] == [run.name for run in profile.units.trace.operators.runs]:
        return seconds_of(profile)
    seconds = pooled_seconds(trace.runs)
    factor = profile.forward_seconds / max(sum(seconds), 1e-12)
    return [one * factor for one in seconds]


class _BackwardOperator(NamedTuple):
    """An operator of the backward: its reads, the bytes of gradients before and after it, and its marks."""

    reads: tuple[int, ...]
    before_bytes: int
    after_bytes: int
    begins: int
    ends: int

    def pull(self, trace: AllocationTrace | None) -> Pull:
        """Return it with the most bytes live in addition to its reads."""
        other_bytes = self.after_bytes
        if trace is not None:
            other_bytes = max(other_bytes, self.before_bytes + trace.rise_bytes_between(self.begins, self.ends))
        return Pull(reads=self.reads, other_bytes=other_bytes)


class _PlainStepTracer(OperatorTracer):
    """Logs the operators of a forward, and the reads of the operators of the backward after it.

    Attributes:
        in_backward: Whether the backward has begun; the code that begins it sets it.
    """

    def __init__(self, flops: FlopCounter, device: torch.device, recorder: AllocationRecorder | None) -> None:
        super().__init__(flops, recorder)
        self.in_backward = False
        self._seen: list[_BackwardOperator] = []
        self._device = device
        self._elsewhere: set[int] = set()  # storages on other devices
        self._gradients = StorageMap[int](self._gradient_dies)  # sizes
        self._gradient_bytes = 0

    def mark(self) -> int:
        """Mark the current time among the allocations; allocations of the forward do not matter."""
        return super().mark() if self.in_backward else -1

    def _new(self, memory: UntypedStorage, tensor: Tensor) -> int:
        value = super()._new(memory, tensor)
        if not self._counts(tensor):
            self._elsewhere.add(self.trace.values[value].storage)
        return value

    def _counts(self, tensor: Tensor) -> bool:
        # Not the memory's device: the memory of fakes is on none. "cuda" without an index means any.
        return tensor.device.type == self._device.type and self._device.index in (None, tensor.device.index)

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: tuple[type, ...],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        if not self.in_backward or func is _DEVICE:
            return super().__torch_dispatch__(func, types, args, kwargs)
        named = kwargs or {}
        memories = [one for tensor in tensors_in((args, dict(named))) for one in memories_of(tensor)]
        given = set(map(address_of, memories))
        known = {own.value for one in memories if (own := self._storages.get(one)) is not None}
        before_bytes, begins = self._gradient_bytes, self.mark()
        result = self._flops.run(func, args, named)
        ends = self.mark()
        for tensor in tensors_in(result):
            for memory in memories_of(tensor) if self._counts(tensor) else ():
                # An argument that it returns, such as a `.grad` that it adds to, existed before.
                if address_of(memory) not in given:
                    self._add(memory)
        self._seen.append(_BackwardOperator(tuple(sorted(known)), before_bytes, self._gradient_bytes, begins, ends))
        return result

    def pulls(self, trace: AllocationTrace | None) -> tuple[Pull, ...]:
        """Return the operators of the backward, with their allocations, if known."""
        return tuple(seen.pull(trace) for seen in self._seen)

    def _add(self, memory: UntypedStorage) -> None:
        if memory not in self._storages and memory not in self._gradients:
            size = self._gradients[memory] = taken_bytes(memory)
            self._gradient_bytes += size

    def _gradient_dies(self, size: int) -> None:
        self._gradient_bytes -= size

    def flow(self, costs: list[float]) -> Dataflow:
        """Return the forward with these costs."""
        made = {value for run in self.trace.runs for value in run.makes}
        values = self.trace.values
        outside = {value.storage for number, value in enumerate(values) if number not in made}
        free = outside | self._elsewhere
        return Dataflow(
            operators=tuple(
                Operator(name=run.name, inputs=run.reads, outputs=run.makes, cost=cost)
                for run, cost in zip(self.trace.runs, costs, strict=True)
            ),
            values=tuple(Value(size_bytes=0 if value.storage in free else value.size_bytes) for value in values),
        )
