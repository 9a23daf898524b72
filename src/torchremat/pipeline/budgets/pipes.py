"""The sites of a `Pipe`: its devices, each with the stages that lie there.

A step runs once with every cell as a region, so that it needs no more than the inputs of the cells. Then the loss runs
once more by itself, from outputs that no stage has computed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn

from torchremat.errors import PipelineError, StepError
from torchremat.measuring.allocator import record_allocations
from torchremat.measuring.step import loss_of, run_backward
from torchremat.measuring.untouched import untouched
from torchremat.pipeline.budgets.samples import Sample, Site, bytes_of, received, taken
from torchremat.pipeline.microbatch import Microbatch
from torchremat.pipeline.pipe import Pipe
from torchremat.pipeline.skip import SkipLayout, inspect_skip_layout, use_skip_tracker
from torchremat.pipeline.skip.namespaces import Key
from torchremat.pipeline.skip.trackers import CellTracker, current_skip_tracker
from torchremat.schedules.pipelines import Action, gpipe, clock_cycles

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
    loss_bytes = _loss_bytes(pipe, step, output)
    sites: list[Site] = []
    for device in dict.fromkeys(pipe.devices):
        stages = [stage for stage, place in enumerate(pipe.devices) if place == device]
        samples = [_sample(pipe.partitions[stage], stage, inputs[stage], layout) for stage in stages]
        boundary_bytes = microbatches * bytes_of(inputs[0][0].tensors) if 0 in stages else 0
        if last in stages:
            boundary_bytes += bytes_of(output.tensors)
        sites.append(
            Site(
                name=str(device),
                device=device,
                actions=_actions(microbatches, len(pipe.partitions), stages),
                samples=samples,
                boundary_bytes=boundary_bytes,
                loss_bytes=max(loss_bytes, bytes_of(output.tensors)) if last in stages else 0,
            )
        )
    return sites


def _actions(microbatches: int, stages: int, here: Sequence[int]) -> list[Action]:
    """Return what a device runs: forwards clock by clock, and the backwards the other way around."""
    cells = [(number, stage) for clock in clock_cycles(microbatches, stages) for number, stage in clock if stage in here]
    forwards = [Action(kind="forward", stage=stage, microbatch=number) for number, stage in cells]
    backwards = [Action(kind="backward", stage=stage, microbatch=number) for number, stage in reversed(cells)]
    return [*forwards, *backwards]


@dataclass(frozen=True, kw_only=True, eq=False)
class _Run:
    """Runs a stage on a microbatch, as a cell of the pipe does.

    The input of the first stage is a part of the batch, which is there all the time; that of another one is made for
    it, and lives as long as somebody holds it.
    """

    given: Microbatch
    requires: tuple[bool, ...]
    layout: SkipLayout
    stage: int

    def __call__(self, module: nn.Module) -> object:
        value, skips = cast("tuple[object, dict[Key, object]]", self._leaves())
        tracker = CellTracker(self.layout, self.stage, skips)
        with use_skip_tracker(tracker):
            del skips
            output = module(value)
        return received((output, tracker.outgoing))

    def _leaves(self) -> object:
        tensors = [
            (tensor.detach() if self.stage == 0 else tensor.clone()).requires_grad_(requires)
            for tensor, requires in zip(self.given.tensors, self.requires, strict=True)
        ]
        return Microbatch(self.given.template, tensors).value


def _sample(module: nn.Module, stage: int, given: tuple[Microbatch, tuple[bool, ...]], layout: SkipLayout) -> Sample:
    run = _Run(given=given[0], requires=given[1], layout=layout, stage=stage)
    return Sample(stage=stage, module=module, step=run)


def _sampled(pipe: Pipe, step: PipeStep) -> tuple[Mapping[int, tuple[Microbatch, tuple[bool, ...]]], Microbatch, int]:
    """Return the first input of each stage, the output of the pipe, and the number of microbatches."""
    inputs: dict[int, tuple[Microbatch, tuple[bool, ...]]] = {}
    counts = [0]
    outputs: list[Microbatch] = []

    def entered(stage: int, _: nn.Module, args: tuple[object, ...]) -> None:
        tracker = cast("CellTracker", current_skip_tracker())
        if stage == 0:
            counts[0] += 1
        if stage not in inputs:
            inputs[stage] = taken((args[0], tracker.waiting))

    def left(_: nn.Module, args: object, output: object) -> None:
        outputs.append(taken(output)[0])

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
