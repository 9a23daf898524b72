"""What a process runs and holds in a schedule of torch.distributed.pipelining, with one microbatch of each stage.

A step runs once with every stage as a region, in all processes, so that each microbatch holds no more than its input.

    bytes on the device under any plan                                                 times
    inputs, in buffers that are made once (of the first stage: parts of the batch)     microbatches
    gradients of outputs, in buffers that are made once; not of the last stage         microbatches
    targets of the last stage                                                          microbatches
    its outputs and losses, which live until the end of a step                         microbatches that are done
    outputs of a stage whose whole backward runs                                       1
    sent gradients: of 1F1B only the last one; the other schedules wait later          microbatches that are done
    sent outputs: likewise; GPipe waits for them before the first backward             microbatches that are done
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchremat._compat.binding import overridden
from torchremat._compat.pipelining import (
    LOSS,
    TorchStage,
    group_of,
    loss_function_of,
    microbatches_of,
    name_of,
    stages_of,
    whole_pass_of,
)
from torchremat.errors import StepError
from torchremat.measuring.step import loss_of
from torchremat.measuring.untouched import untouched
from torchremat.pipeline.attaching.orders import order_of
from torchremat.pipeline.microbatch import Microbatch
from torchremat.regions.doors import unwrap, wrap
from torchremat.schedules.pipelines import Action, most_held
from torchremat.stages.loads import loads_of
from torchremat.stages.samples import Ends, Sample, Site, Taken, hold_until_backward, receive, storage_bytes, take


def site_of_schedule(schedule: object, step: Callable[[object], object], *, lookahead: bool) -> Site:
    """Return this process's site.

    Args:
        schedule: One that `attach` knows, without plans on its stages.
        step: Called with the schedule, runs a step of it.
        lookahead: Whether the attached session recomputes ahead of gradients.

    Raises:
        StepError: The step did not run every stage, or the schedule has no loss.
    """
    stages = stages_of(schedule)
    seen = _watch_step(schedule, step)
    loss = loss_function_of(schedule)
    if loss is None:
        raise StepError("schedule: without a `loss_fn` it runs no backward, and there is nothing to plan.")
    microbatches = microbatches_of(schedule)
    rank = dist.get_rank(cast("dist.ProcessGroup | None", group_of(schedule)))
    samples: list[Sample] = []
    left_bytes: dict[int, int] = {}
    output_bytes: dict[int, int] = {}
    boundary_bytes = 0
    numbers = {stage.stage_index for stage in stages}
    # Where this process waits for a gradient: another process runs the next stage.
    ahead = (
        {one for one in numbers if one + 1 < stages[0].num_stages and one + 1 not in numbers} if lookahead else set()
    )
    actions = list(_as_run(order_of(schedule)[rank], stages, ahead))
    waits = name_of(schedule) == "Schedule1F1B"
    split = {action.stage for action in actions if action.kind == "input"}
    for stage in stages:
        stage_pass = seen[stage.stage_index]
        is_first, is_last = stage.stage_index == 0, stage.stage_index == stage.num_stages - 1
        run = _ScheduleRun(seen=stage_pass, loss=loss if is_last else None)
        ends = run.ends if stage.stage_index in split else None
        samples.append(
            Sample(
                stage=stage.stage_index,
                module=stage.submod,
                step=run,
                ends=ends,
                ahead=stage.stage_index in ahead,
                holds=(*stage_pass.taken.given.tensors, *stage_pass.output, *Microbatch.of(stage_pass.target).tensors),
            )
        )
        inputs, outputs = storage_bytes(stage_pass.taken.given.tensors), storage_bytes(stage_pass.output)
        output_bytes[stage.stage_index] = outputs
        sent = (0 if is_first else inputs) + (0 if is_last or name_of(schedule) == "ScheduleGPipe" else outputs)
        left_bytes[stage.stage_index] = (outputs + stage_pass.loss_bytes if is_last else 0) + (0 if waits else sent)
        boundary_bytes += microbatches * inputs + (sent if waits else 0)
        if is_last:
            boundary_bytes += microbatches * sum(one.nbytes for one in Microbatch.of(stage_pass.target).tensors)
        else:
            boundary_bytes += microbatches * outputs
    device = next((one.device for stage in stages for one in stage.submod.parameters()), torch.device("cpu"))
    return Site(
        name=f"process {rank} ({device})",
        device=device,
        loads=loads_of(actions, left_bytes, output_bytes),
        in_flight=most_held(actions),
        microbatches=microbatches,
        samples=samples,
        boundary_bytes=boundary_bytes,
    )


def _as_run(actions: Sequence[Action], stages: Sequence[TorchStage], ahead: Container[int]) -> Iterator[Action]:
    """Yield the actions as torch runs them: some backwards that the order splits are whole in the stage.

    Args:
        actions: In the order of the schedule.
        stages: Of this process.
        ahead: Stages that recompute before they wait for a gradient, which their backward follows.
    """
    whole = {stage.stage_index: whole_pass_of(stage) for stage in stages}
    for action in actions:
        if action.kind in ("backward", "input") and action.stage in ahead:
            yield replace(action, kind="recompute")
        part = whole[action.stage]
        if part is None or action.kind not in ("input", "weight"):
            yield action
        elif action.kind == part:
            yield replace(action, kind="backward")


@dataclass
class _StagePass:
    """The inputs and the result of a stage."""

    taken: Taken
    output: list[Tensor] = field(default_factory=list[Tensor])
    target: object = None
    loss_bytes: int = 0  # a loss may share memory with the tensor that it reduces


def _watch_step(schedule: object, step: Callable[[object], object]) -> dict[int, _StagePass]:
    """Run a step, and return the last microbatch of each stage: the first calls may be torch's own."""
    stages = stages_of(schedule)
    seen: dict[int, _StagePass] = {}

    def entered(stage: TorchStage, _: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        seen[stage.stage_index] = _StagePass(take((args, kwargs)))

    def left(stage: TorchStage, _: nn.Module, args: object, output: object) -> None:
        outputs = Microbatch.of(output).tensors
        seen[stage.stage_index].output = [torch.empty_like(one, requires_grad=False) for one in outputs]

    own = loss_function_of(schedule)

    def loss(output: object, target: object, **others: object) -> object:
        value = cast("Callable[..., object]", own)(output, target, **others)
        for stage in stages:
            if stage.stage_index == stage.num_stages - 1 and stage.stage_index in seen:
                seen[stage.stage_index].target = target
                seen[stage.stage_index].loss_bytes = storage_bytes([value]) if isinstance(value, Tensor) else 0
        return value

    with ExitStack() as stack:
        stack.enter_context(untouched([stage.submod for stage in stages]))
        for stage in stages:
            wrap(stage.submod, "")
            stack.callback(unwrap, stage.submod)
            stack.callback(stage.submod.register_forward_pre_hook(partial(entered, stage), with_kwargs=True).remove)
            stack.callback(stage.submod.register_forward_hook(partial(left, stage)).remove)
        if own is not None:
            stack.enter_context(overridden([schedule], **{LOSS: loss}))
        step(schedule)
    missing = [stage.stage_index for stage in stages if stage.stage_index not in seen]
    if missing:
        raise StepError(f"the step did not run the stages {missing} of the schedule; does it call `schedule.step`?")
    return seen


@dataclass(frozen=True, kw_only=True, eq=False)
class _ScheduleRun:
    """Runs a stage on a microbatch, as the schedule does."""

    seen: _StagePass
    loss: Callable[..., object] | None

    def __call__(self, module: nn.Module) -> object:
        _, output, loss = self._run(module)
        if self.loss is not None:
            # The profile rejects other kinds.
            return hold_until_backward(loss, output) if isinstance(loss, Tensor) else loss
        return receive(output, held=True, grads=self.seen.output)

    def ends(self, module: nn.Module) -> Ends:
        """Run the forward, for a split backward."""
        given, output, loss = self._run(module)
        inputs, outputs = Microbatch.of(given).tensors, Microbatch.of(output).tensors
        if self.loss is not None:
            return Ends(roots=[loss_of(loss)], grads=None, inputs=inputs, outputs=outputs)
        return Ends(roots=outputs, grads=self.seen.output, inputs=inputs, outputs=outputs)

    def _run(self, module: nn.Module) -> tuple[object, object, object]:
        """Return the arguments of a forward, its output and its loss."""
        args, kwargs = cast("tuple[tuple[object, ...], dict[str, object]]", self.seen.taken.leaves(new=False))
        with self.seen.taken.under_autocast():
            output = module(*args, **kwargs)
            return (args, kwargs), output, None if self.loss is None else self.loss(output, self.seen.target)
