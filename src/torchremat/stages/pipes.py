"""What each device of a `Pipe` runs and holds, with one microbatch of each of its stages to profile.

A step runs once with every cell as a region, so it keeps only the inputs of the cells. Then the loss runs once more by
itself, from outputs that no stage has computed.

A device holds at each of its actions, forwards clock by clock and backwards in reverse:

                     forward                                  backward
    in a stage       microbatches that have run               microbatches whose backward has not run
    between stages   outputs not yet taken by the next stage  gradients that the stage before has not taken yet
    after the last   its outputs, until they are put          the gradient of all outputs, and other bytes that the
                     together and the loss is computed        loss holds, until the last stage has run them all
    of each weight   -                                        a sum, from the first microbatch of its stage to the last

The order of a device is known; see NOTE [ Backward in reverse ]. How far the others are by then is known in the
forward, which goes clock by clock. In backward it is not, and counted are the most gradients that can be there:

    from stage t of another device  as many as the device has begun in stage s, and t - s more, for which its edge
                                    lets the copy start; but no more than its own stages behind t have run
    for a stage of another device   one, that the copy has not taken yet; none while its stage runs again
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from typing import cast

from torch import Tensor, nn

from torchremat._compat.binding import overridden
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
from torchremat.stages.loads import DeviceLoad, Phase, sorted_counts
from torchremat.stages.losses import LossBytes, loss_bytes
from torchremat.stages.samples import Sample, Site, Taken, receive, storage_bytes, take


@dataclass(frozen=True, kw_only=True)
class Passed:
    """The tensors that each microbatch passes from one stage to another, and back as gradients.

    Attributes:
        source: The stage that makes it.
        target: The stage that takes it.
        size_bytes: Of a microbatch.
        grad_bytes: Of its gradients, other than those that the loss makes.
    """

    source: int
    target: int
    size_bytes: int
    grad_bytes: int


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
        clocks = [{stage for _, stage in clock} for clock in clock_cycles(self.microbatches, self.stages)]
        yield from self._forward(clocks)
        if self.stages - 1 in self.sums:
            held = dict.fromkeys(self.sums, self.microbatches)
            yield DeviceLoad(None, "loss", sorted_counts(Counter(held)), other_bytes=self.loss.peak_bytes)
        yield from self._backward([stage for clock in reversed(clocks) for stage in reversed(self._here(clock))])

    def _forward(self, clocks: Sequence[Collection[int]]) -> Iterator[DeviceLoad]:
        ran = Counter[int]()  # before the clock, of all stages
        for clock in clocks:
            arrived, here = ran + Counter(clock), self._here(clock)
            # All copies of a clock are made before its cells run, and until then the copied tensors are there as well.
            if len(self.sums) < self.stages and (copies := self._waiting(ran, arrived, ran)):
                yield DeviceLoad(None, "copies", self._held(ran), other_bytes=copies)
            made = arrived - Counter(here)
            for stage in here:
                begun = made + Counter([stage])
                yield DeviceLoad(stage, "forward", self._held(made), other_bytes=self._waiting(made, arrived, begun))
                made = begun
            ran = arrived

    def _waiting(self, made: Counter[int], arrived: Counter[int], begun: Counter[int]) -> int:
        """Return the bytes that wait between stages on the device in a forward.

        Args:
            made: How many outputs each stage of the device has made.
            arrived: How many inputs each stage has got from other devices.
            begun: How many inputs each stage has taken; one of another device has a copy of its own.
        """
        total = 0
        for one in self.passed:
            if one.source in self.sums:
                total += (made[one.source] - begun[one.target]) * one.size_bytes
            elif one.target in self.sums:
                total += (arrived[one.target] - begun[one.target]) * one.size_bytes
        return total

    def _backward(self, order: Sequence[int]) -> Iterator[DeviceLoad]:
        done = Counter[int]()  # of the device's own stages
        for stage in order:
            begun = done + Counter([stage])
            others = self._gradients(done, begun) + self._added(done)
            if self.stages - 1 in self.sums:
                others += self.loss.held_bytes[done[self.stages - 1]]
            held = Counter(dict.fromkeys(self.sums, self.microbatches)) - begun
            yield DeviceLoad(stage, self._phase(done[stage]), sorted_counts(held), other_bytes=others)
            done = begun

    def _gradients(self, done: Counter[int], begun: Counter[int]) -> int:
        """Return the most bytes of gradients that wait between stages on the device while one of its stages runs."""
        total = 0
        for one in self.passed:
            if one.source in self.sums and one.target in self.sums:
                total += (done[one.target] - begun[one.source]) * one.grad_bytes
            elif one.source in self.sums:
                may_come = begun[one.source] + one.target - one.source
                made = min((done[stage] for stage in self._needed(one.target)), default=self.microbatches)
                total += (min(may_come, made, self.microbatches) - begun[one.source]) * one.grad_bytes
            elif one.target in self.sums and 0 < done[one.target] == begun[one.target]:
                total += one.grad_bytes
        return total

    def _needed(self, stage: int) -> Iterator[int]:
        """Yield the stages of the device whose gradients the backward of another stage needs."""
        passes = {one.target for one in self.passed if one.source == one.target - 1 and one.grad_bytes}
        for behind in takewhile(passes.__contains__, range(stage + 1, self.stages)):
            if behind in self.sums:
                yield behind

    def _here(self, clock: Collection[int]) -> list[int]:
        return sorted(stage for stage in clock if stage in self.sums)

    def _held(self, counts: Counter[int]) -> tuple[tuple[int, int], ...]:
        return sorted_counts(Counter({stage: count for stage, count in counts.items() if stage in self.sums}))

    def _added(self, done: Counter[int]) -> int:
        """Return the bytes of the sums of gradients that are live while the backward of a stage runs."""
        return sum(size for stage, size in self.sums.items() if 0 < done[stage] < self.microbatches)

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

    Raises:
        StepError: The step returns no loss, or does not call the pipe once.
    """
    inputs, outputs = _sample(pipe, step)
    layout = inspect_skip_layout(list(pipe.partitions))
    last, microbatches = len(pipe.partitions) - 1, len(outputs)
    loss = loss_bytes(pipe, pipe.devices[-1], step, outputs)
    to_loss = Passed(source=last, target=last + 1, size_bytes=storage_bytes(outputs[0].given.tensors), grad_bytes=0)
    passed = [*_find_passed(inputs, layout), to_loss]
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
                        holds=(*inputs[stage].given.tensors, *(loss.grads if stage == last else ())),
                    )
                    for stage in stages
                ],
                boundary_bytes=microbatches * storage_bytes(inputs[0].given.tensors) if 0 in stages else 0,
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
        return receive((output, tracker.outgoing), grads=self.grads)


def _gradient_bytes(module: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in module.parameters() if parameter.requires_grad)


def _find_passed(inputs: Mapping[int, Taken], layout: SkipLayout) -> Iterator[Passed]:
    """Yield the tensors passed from stage to stage."""
    for stage, own in inputs.items():
        in_graph = {id(tensor) for tensor, requires in zip(own.given.tensors, own.requires, strict=True) if requires}
        value, skips = cast("tuple[object, dict[Key, object]]", own.given.value)
        given = [(layout.routes[key][0], skip) for key, skip in skips.items()]
        for source, one in [(stage - 1, value), *given] if stage else []:
            tensors = Microbatch.of(one).tensors
            yield Passed(
                source=source,
                target=stage,
                size_bytes=storage_bytes(tensors),
                grad_bytes=storage_bytes([tensor for tensor in tensors if id(tensor) in in_graph]),
            )


def _sample(pipe: Pipe, step: PipeStep) -> tuple[Mapping[int, Taken], Sequence[Taken]]:
    """Return the first input of each stage, and the output of each microbatch."""
    inputs: dict[int, Taken] = {}
    outputs: list[Taken] = []
    calls = [0]

    def entered(stage: int, _: nn.Module, args: tuple[object, ...]) -> None:
        tracker = cast("CellTracker", current_skip_tracker())
        if stage not in inputs:
            inputs[stage] = take((args[0], tracker.waiting))

    def left(_: nn.Module, args: object, output: object) -> None:
        outputs.append(take(output))

    def called(_: nn.Module, args: object) -> None:
        calls[0] += 1

    with ExitStack() as stack:
        stack.enter_context(untouched(pipe))
        for stage, module in enumerate(pipe.partitions):
            stack.callback(module.register_forward_pre_hook(partial(entered, stage)).remove)
        if pipe.partitions:
            stack.callback(pipe.partitions[-1].register_forward_hook(left).remove)
        stack.callback(pipe.register_forward_pre_hook(called).remove)
        stack.enter_context(overridden([pipe], checkpoint="always"))
        abandon([loss_of(step(pipe))])
    if calls[0] != 1:
        raise StepError(f"the step calls the pipe {calls[0]} times; to plan its stages it has to call it once.")
    if not pipe.partitions:
        raise PipelineError("a pipe without layers has no stages to plan.")
    return inputs, outputs
