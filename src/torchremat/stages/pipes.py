"""The sites of a `Pipe`: its devices, each with its stages.

A step runs once with every cell as a region, so it keeps only the inputs of the cells. Then the loss runs once more by
itself, from outputs that no stage has computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
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
from torchremat.stages.clocks import Clocks, Passed
from torchremat.stages.losses import loss_bytes
from torchremat.stages.samples import Sample, Site, Taken, bytes_of, received, taken

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
        with use_skip_tracker(tracker):
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
