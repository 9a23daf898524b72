"""The sites of a `Pipe`: its devices, each with its stages.

A step runs once with every cell as a region, so it keeps only the inputs of the cells. Then the loss runs once more by
itself, from outputs that no stage has computed.

A device holds at each of its actions, forwards clock by clock and backwards in reverse:

                     forward                                  backward
    in a stage       microbatches that have run               microbatches whose backward has not run
    between stages   outputs not yet taken by the next stage  gradients that the stage before has not taken yet
    after the last   its outputs, until they are put          the gradient of all outputs, and other bytes that the
                     together and the loss is computed        loss holds, until the last stage has run them all
    of each weight   -                                        a sum, from the first microbatch of its stage to the last

Of the nodes that are ready, autograd takes for each device the one that was created last. So a lone device runs all
cells in the reverse order of the forward, once the calling thread has created more nodes than a worker creates in a
step: the calling thread creates the nodes that lead from stage to stage, and each thread has its own counter. A device
among others may have to wait for their gradients, and the order of the cells in a clock is not determined: each may be
the first one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import cast

from torch import Tensor, nn

from torchremat.errors import PipelineError, StepError
from torchremat.measuring.step import loss_of
from torchremat.measuring.untouched import untouched
from torchremat.pipeline.microbatch import Microbatch
from torchremat.pipeline.pipe import Pipe
from torchremat.pipeline.skip import SkipLayout, inspect_skip_layout, use_skip_tracker
from torchremat.pipeline.skip.layouts import Key
from torchremat.pipeline.skip.trackers import CellTracker, current_skip_tracker
from torchremat.regions.footprints import abandon
from torchremat.schedules.pipelines import clock_cycles
from torchremat.stages.loads import DeviceLoad, Phase, counted
from torchremat.stages.losses import LossBytes, loss_bytes
from torchremat.stages.samples import Sample, Site, Taken, bytes_of, received, taken


@dataclass(frozen=True)
class Passed:
    """The tensors that each microbatch passes from one stage to another, and back as gradients.

    Attributes:
        source: The stage that makes it.
        target: The stage that takes it.
        size_bytes: Of a microbatch.
    """

    source: int
    target: int
    size_bytes: int


@dataclass(frozen=True, kw_only=True)
class Clocks:
    """The clocks of a pipe, as a device sees them.

    Attributes:
        microbatches: Of a step.
        stages: Of the pipe.
        sums: The stages of the device, with the bytes of the gradients of their weights.
        passed: The tensors that go from stage to stage, and from the last stage to the loss, which counts as one more
            stage.
        loss: The bytes that the loss needs.
    """

    microbatches: int
    stages: int
    sums: Mapping[int, int]
    passed: Sequence[Passed]
    loss: LossBytes

    def loads(self) -> Iterator[DeviceLoad]:
        """Yield the load of the device at each of its actions."""
        last = self.stages - 1
        clocks = [[stage for _, stage in clock] for clock in clock_cycles(self.microbatches, self.stages)]
        if len(self.sums) == self.stages:
            clocks = [[stage] for clock in clocks for stage in clock]
        ran = Counter[int]()
        for clock in clocks:
            for stage in self._here(clock):
                yield DeviceLoad(
                    stage, "forward", self._held(ran), other_bytes=self._waiting(self.passed, ran, clock, stage)
                )
            ran.update(clock)
        if last in self.sums:
            yield DeviceLoad(None, "loss", self._held(ran), other_bytes=self.loss.peak_bytes)
        back = [Passed(one.target, one.source, one.size_bytes) for one in self.passed if one.target <= last]
        done = Counter[int]()
        for clock in reversed(clocks):
            for stage in self._here(clock):
                others = self._waiting(back, done, clock, stage) + self._added(done, clock, stage)
                if last in self.sums:
                    others += self.loss.held_bytes[done[last]]
                yield DeviceLoad(
                    stage, self._phase(done[stage]), self._held(ran - done - Counter([stage])), other_bytes=others
                )
            done.update(clock)

    def _here(self, clock: Collection[int]) -> list[int]:
        return [stage for stage in clock if stage in self.sums]

    def _held(self, counts: Counter[int]) -> tuple[tuple[int, int], ...]:
        return counted(Counter({stage: count for stage, count in counts.items() if stage in self.sums}))

    def _waiting(self, passed: Sequence[Passed], ran: Counter[int], clock: Collection[int], stage: int) -> int:
        """Return the bytes that wait between stages on the device while a stage runs; the stage counts its own input.

        Args:
            passed: The tensors with their source and target stages.
            ran: How many microbatches each stage has run before the clock.
            clock: The stages that run in it.
            stage: The one of them that runs.
        """
        total, more = 0, Counter[int]()
        for one in passed:
            waiting = ran[one.source] - ran[one.target]
            if one.source in self.sums:
                # Tensors for another device were copied there when the clock began.
                is_taken = one.target == stage or (one.target in clock and not self._is_here(one.target))
                total += (waiting - is_taken) * one.size_bytes
                more[one.source] += one.size_bytes
                if not is_taken and one.target in clock:
                    more[one.target] -= one.size_bytes
            elif self._is_here(one.target) and one.target in clock and one.target != stage:
                total += one.size_bytes
                more[one.target] -= one.size_bytes
        others = [one for one in self._here(clock) if one != stage]
        return total + sum(max(0, more[one]) for one in others)

    def _is_here(self, stage: int) -> bool:
        """Whether a stage is on the device; the loss is where the last stage is."""
        return min(stage, self.stages - 1) in self.sums

    def _added(self, done: Counter[int], clock: Collection[int], stage: int) -> int:
        """Return the bytes of the sums of gradients that are live while the backward of a stage runs."""
        if self.microbatches == 1:
            return 0
        begun = {one for one in self.sums if 0 < done[one] < self.microbatches}
        begun |= {one for one in self._here(clock) if one != stage}
        return sum(self.sums[one] for one in begun)

    def _phase(self, number: int) -> Phase:
        """Return the phase of a backward after `number` others of its stage."""
        if self.microbatches == 1:
            return "backward"
        if number == 0:
            return "first"
        if number == self.microbatches - 1:
            return "last"
        return "second" if number == 1 else "backward"


PipeStep = Callable[[Pipe], object]


def sites_of_pipe(pipe: Pipe, step: PipeStep) -> list[Site]:
    """Return the devices of a pipe.

    Args:
        pipe: Without plans.
        step: Called with the pipe, runs it on a batch and returns the loss.

    Raises:
        StepError: The step returns no loss, or does not call the pipe once.
    """
    inputs, outputs = _sampled(pipe, step)
    layout = inspect_skip_layout(list(pipe.partitions))
    last, microbatches = len(pipe.partitions) - 1, len(outputs)
    loss = loss_bytes(pipe, pipe.devices[-1], step, outputs)
    passed = [*_passed(inputs, layout), Passed(last, last + 1, bytes_of(outputs[0].given.tensors))]
    sites: list[Site] = []
    for device in dict.fromkeys(pipe.devices):
        stages = [stage for stage, place in enumerate(pipe.devices) if place == device]
        sums = {stage: _gradient_bytes(pipe.partitions[stage]) for stage in stages}
        clocks = Clocks(microbatches=microbatches, stages=last + 1, sums=sums, passed=passed, loss=loss)
        sites.append(
            Site(
                name=str(device),
                device=device,
                loads=list(dict.fromkeys(clocks.loads())),
                in_flight=dict.fromkeys(stages, microbatches),
                microbatches=microbatches,
                samples=[
                    Sample(
                        stage=stage,
                        module=pipe.partitions[stage],
                        step=_PipeRun(
                            taken=inputs[stage], layout=layout, stage=stage, grads=loss.grads if stage == last else ()
                        ),
                        added=microbatches > 1,
                    )
                    for stage in stages
                ],
                boundary_bytes=microbatches * bytes_of(inputs[0].given.tensors) if 0 in stages else 0,
            )
        )
    return sites


@dataclass(frozen=True, kw_only=True, eq=False)
class _PipeRun:
    """Runs a stage on a microbatch, as a cell of the pipe does.

    The input of the first stage is a part of the batch, which is live all the time; the input of any other stage is
    made for it, and lives as long as it is referenced. Likewise gradients of outputs: the last stage's are parts of one
    tensor.
    """

    taken: Taken
    layout: SkipLayout
    stage: int
    grads: Sequence[Tensor]

    def __call__(self, module: nn.Module) -> object:
        value, skips = cast("tuple[object, dict[Key, object]]", self.taken.leaves(new=self.stage > 0))
        tracker = CellTracker(self.layout, self.stage, skips)
        with use_skip_tracker(tracker), self.taken.under_autocast():
            del skips
            output = module(value)
        return received((output, tracker.outgoing), grads=self.grads)


def _gradient_bytes(module: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in module.parameters() if parameter.requires_grad)


def _passed(inputs: Mapping[int, Taken], layout: SkipLayout) -> Iterator[Passed]:
    """Yield the tensors passed from stage to stage."""
    for stage, own in inputs.items():
        value, skips = cast("tuple[object, dict[Key, object]]", own.given.value)
        if stage:
            yield Passed(stage - 1, stage, bytes_of(Microbatch.of(value).tensors))
        for key, skip in skips.items():
            yield Passed(layout.routes[key][0], stage, bytes_of(Microbatch.of(skip).tensors))


def _sampled(pipe: Pipe, step: PipeStep) -> tuple[Mapping[int, Taken], Sequence[Taken]]:
    """Return the first input of each stage, and the output of each microbatch."""
    inputs: dict[int, Taken] = {}
    outputs: list[Taken] = []
    calls = [0]

    def entered(stage: int, _: nn.Module, args: tuple[object, ...]) -> None:
        tracker = cast("CellTracker", current_skip_tracker())
        if stage not in inputs:
            inputs[stage] = taken((args[0], tracker.waiting))

    def left(_: nn.Module, args: object, output: object) -> None:
        outputs.append(taken(output))

    def called(_: nn.Module, args: object) -> None:
        calls[0] += 1

    mode = pipe.checkpoint
    with ExitStack() as stack:
        stack.enter_context(untouched(pipe))
        for stage, module in enumerate(pipe.partitions):
            stack.callback(module.register_forward_pre_hook(partial(entered, stage)).remove)
        if pipe.partitions:
            stack.callback(pipe.partitions[-1].register_forward_hook(left).remove)
        stack.callback(pipe.register_forward_pre_hook(called).remove)
        stack.callback(setattr, pipe, "checkpoint", mode)
        pipe.checkpoint = "always"
        abandon([loss_of(step(pipe))])
    if calls[0] != 1:
        raise StepError(f"the step calls the pipe {calls[0]} times; to plan its stages it has to call it once.")
    if not pipe.partitions:
        raise PipelineError("a pipe without layers has no stages to plan.")
    return inputs, outputs
