"""The sites of a `Pipe`: its devices, each with the stages that lie there.

A step runs once with every cell as a region, so that it needs no more than the inputs of the cells. Then the loss runs
once more by itself, from outputs that no stage has computed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import cast

from torch import nn

from torchremat.errors import PipelineError, StepError
from torchremat.measuring.allocator import record_allocations
from torchremat.measuring.step import loss_of, run_backward
from torchremat.measuring.untouched import untouched
from torchremat.pipeline.budgets.loads import Load, counted
from torchremat.pipeline.budgets.samples import Sample, Site, Taken, bytes_of, received, taken
from torchremat.pipeline.microbatch import Microbatch
from torchremat.pipeline.pipe import Pipe
from torchremat.pipeline.skip import SkipLayout, inspect_skip_layout, use_skip_tracker
from torchremat.pipeline.skip.namespaces import Key
from torchremat.pipeline.skip.trackers import CellTracker, current_skip_tracker
from torchremat.schedules.pipelines import clock_cycles

PipeStep = Callable[[Pipe], object]


def sites_of_pipe(pipe: Pipe, step: PipeStep) -> list[Site]:
    """Return the devices of a pipe.

    Args:
        pipe: Without plans.
        step: Called with the pipe, runs it on a batch and returns the loss.

    Raises:
        StepError: The step returns no loss, or does not call the pipe once.
    """
    inputs, output, microbatches = _sampled(pipe, step)
    layout = inspect_skip_layout(list(pipe.partitions))
    last = len(pipe.partitions) - 1
    batch_bytes, output_bytes = microbatches * bytes_of(inputs[0].given.tensors), bytes_of(output.tensors)
    loss_bytes = max(_loss_bytes(pipe, step, output), output_bytes)
    # What each stage passes on; the outputs of the last one are put together, and counted for the whole step.
    passed = {stage: bytes_of(inputs[stage + 1].given.tensors) for stage in range(last)}
    sites: list[Site] = []
    for device in dict.fromkeys(pipe.devices):
        stages = [stage for stage, place in enumerate(pipe.devices) if place == device]
        gradients = {stage: sum(_weights(pipe.partitions[stage])) for stage in stages}
        here = {stage: passed.get(stage, 0) for stage in stages}
        largest = {stage: max(_weights(pipe.partitions[stage]), default=0) for stage in stages}
        loads = list(loads_of_pipe(microbatches, last + 1, here, gradients, largest))
        if last in stages:
            loads.append(Load(None, "loss", tuple((stage, microbatches) for stage in stages), beside_bytes=loss_bytes))
        sites.append(
            Site(
                name=str(device),
                device=device,
                loads=list(dict.fromkeys(loads)),
                in_flight=dict.fromkeys(stages, microbatches),
                microbatches=microbatches,
                samples=[_sample(pipe.partitions[stage], stage, inputs[stage], layout) for stage in stages],
                boundary_bytes=(batch_bytes if 0 in stages else 0) + (output_bytes if last in stages else 0),
            )
        )
    return sites


def loads_of_pipe(
    microbatches: int,
    stages: int,
    passed: Mapping[int, int],
    gradients: Mapping[int, int],
    largest: Mapping[int, int],
) -> Iterator[Load]:
    """Yield the loads of a device: forwards clock by clock, and the backwards the other way around.

    In which order autograd runs the cells of a clock is not said, so each of them may be the first one. Between the
    stages a tensor waits for each other cell: one that it was given, or one that it has made. And as one backward runs
    all microbatches, autograd adds up the gradients of a weight before it adds them to what is there: from the first
    microbatch of a stage to the last, it holds them once more.

    Args:
        microbatches: Of a step.
        stages: Of the pipe.
        passed: The stages of the device, with the bytes that each passes on of a microbatch.
        gradients: And with the bytes of the gradients of their weights.
        largest: And with those of the largest one.
    """
    clocks = list(clock_cycles(microbatches, stages))
    held = Counter[int]()
    for clock in clocks:
        here = [stage for _, stage in clock if stage in passed]
        for stage in here:
            waiting = sum(passed[other] for other in here if other != stage)
            yield Load(stage, "forward", counted(held), beside_bytes=waiting)
        held.update(here)
    adding: set[int] = set()
    for clock in reversed(clocks):
        here = [stage for _, stage in clock]
        for number, stage in clock:
            if stage in passed:
                others = sum(max(passed.get(one, 0), passed.get(one - 1, 0)) for one in here if one != stage)
                # The second gradient of a weight is added out of place: for a while there are both and their sum.
                added_bytes = largest[stage] if number == microbatches - 2 else 0
                begun = adding.union(one for one in here if one in passed) - {stage}
                is_first = microbatches > 1 and number == microbatches - 1
                added = sum(gradients[one] for one in begun if microbatches > 1)
                added += gradients[stage] if stage in adding and microbatches > 1 else 0
                phase = "first" if is_first else "backward"
                yield Load(stage, phase, counted(held - Counter([stage])), beside_bytes=others + added + added_bytes)
        held.subtract(stage for stage in here if stage in passed)
        adding.update(stage for stage in here if stage in passed)
        adding -= {stage for stage in here if not held[stage]}


@dataclass(frozen=True, kw_only=True, eq=False)
class _Run:
    """Runs a stage on a microbatch, as a cell of the pipe does.

    The input of the first stage is a part of the batch, which is there all the time; that of another one is made for
    it, and lives as long as somebody holds it.
    """

    taken: Taken
    layout: SkipLayout
    stage: int

    def __call__(self, module: nn.Module) -> object:
        value, skips = cast("tuple[object, dict[Key, object]]", self.taken.leaves(new=self.stage > 0))
        tracker = CellTracker(self.layout, self.stage, skips)
        with use_skip_tracker(tracker):
            del skips
            output = module(value)
        return received((output, tracker.outgoing))


def _weights(module: nn.Module) -> list[int]:
    return [parameter.nbytes for parameter in module.parameters() if parameter.requires_grad]


def _sample(module: nn.Module, stage: int, found: Taken, layout: SkipLayout) -> Sample:
    return Sample(stage=stage, module=module, step=_Run(taken=found, layout=layout, stage=stage))


def _sampled(pipe: Pipe, step: PipeStep) -> tuple[Mapping[int, Taken], Microbatch, int]:
    """Return the first input of each stage, the output of the pipe, and the number of microbatches."""
    inputs: dict[int, Taken] = {}
    counts = [0]
    outputs: list[Microbatch] = []

    def entered(stage: int, _: nn.Module, args: tuple[object, ...]) -> None:
        tracker = cast("CellTracker", current_skip_tracker())
        if stage == 0:
            counts[0] += 1
        if stage not in inputs:
            inputs[stage] = taken((args[0], tracker.waiting))

    def left(_: nn.Module, args: object, output: object) -> None:
        outputs.append(taken(output).given)

    mode = pipe.checkpoint
    with ExitStack() as stack:
        stack.enter_context(untouched(pipe))
        for stage, module in enumerate(pipe.partitions):
            stack.callback(module.register_forward_pre_hook(partial(entered, stage)).remove)
        stack.callback(pipe.register_forward_hook(left).remove)
        stack.callback(setattr, pipe, "checkpoint", mode)
        pipe.checkpoint = "always"
        loss_of(step(pipe))
    if len(outputs) != 1:
        raise StepError(f"the step calls the pipe {len(outputs)} times; to plan its stages it has to call it once.")
    if not pipe.partitions:
        raise PipelineError("a pipe without layers has no stages to plan.")
    return inputs, outputs[0], counts[0]


class _StandIn(nn.Module):
    """In the place of the pipe: returns what it has returned."""

    def __init__(self, output: Microbatch) -> None:
        super().__init__()
        self._output = output

    def forward(self, *_: object, **__: object) -> object:
        """Return the output."""
        return self._output.value


def _loss_bytes(pipe: Pipe, step: PipeStep, output: Microbatch) -> int:
    """Return what the step takes beside the pipe and its output, at most."""
    device = pipe.devices[-1]
    tensors = [tensor.detach().requires_grad_(tensor.is_floating_point()) for tensor in output.tensors]
    stand_in = _StandIn(Microbatch(output.template, tensors))
    with untouched(pipe), record_allocations(device) as recorder:
        run_backward(loss_of(step(cast("Pipe", stand_in))))
    return recorder.trace.peak_bytes
