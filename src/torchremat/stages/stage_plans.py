"""Plans of the stages of a pipeline, as data."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import cast, overload

from torch import nn

from torchremat._compat.pipelining import stages_of
from torchremat.errors import PipelineError, PlanError
from torchremat.planning.layout import check_bare
from torchremat.planning.results.plans import Plan
from torchremat.regions.patches import count_elsewhere
from torchremat.tensors.sizes import format_bytes


@dataclass(frozen=True, kw_only=True)
class StagePlan:
    """The plan of one stage.

    Attributes:
        stage: Its number.
        plan: For one microbatch of the stage; None if nothing is recomputed.
        in_flight: How many microbatches it holds at most, the one that runs included.
        kept_bytes: The bytes that a microbatch keeps from its forward to its backward.
        plain_kept_bytes: The same without any recompute.
        recomputed_flops: Of one microbatch.
        slowdown: Predicted seconds of a microbatch over the seconds of a plain one.
    """

    stage: int
    plan: Plan | None
    in_flight: int
    kept_bytes: int
    plain_kept_bytes: int
    recomputed_flops: int
    slowdown: float


@dataclass(frozen=True, kw_only=True)
class DevicePlan:
    """The bytes that a device needs under the plans of its stages.

    Attributes:
        name: The device; with many processes, the process as well.
        stages: Its stages.
        budget_bytes: Its budget.
        peak_bytes: Predicted peak of a step.
        plain_peak_bytes: The same without any recompute.
        floor_bytes: The smallest budget for which plans exist.
        optimizer_peak_bytes: Peak of the optimizer's step, which the peaks above count; None if no optimizer was given.
        before_bytes: Bytes on the device under any plans: parameters, gradients, buffers, state of the optimizer.
        boundary_bytes: Likewise between the stages: inputs, outputs, gradients in transit.
        where: The action that runs at the peak.
    """

    name: str
    stages: tuple[int, ...]
    budget_bytes: int
    peak_bytes: int
    plain_peak_bytes: int
    floor_bytes: int
    optimizer_peak_bytes: int | None
    before_bytes: int
    boundary_bytes: int
    where: str


@dataclass(frozen=True, kw_only=True)
class StagePlans(Sequence[StagePlan]):
    """A plan for each stage of a pipeline that keeps every device within its budget. See `plan_stages`.

    Attributes:
        stages: In order.
        devices: In the order of their first stages; with many processes, of the processes.
        microbatches: Of a step.
    """

    stages: tuple[StagePlan, ...]
    devices: tuple[DevicePlan, ...]
    microbatches: int

    @overload
    def __getitem__(self, index: int) -> StagePlan: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[StagePlan]: ...

    def __getitem__(self, index: int | slice) -> StagePlan | Sequence[StagePlan]:
        """Return a stage's plan."""
        return self.stages[index]

    def __len__(self) -> int:
        """Return the number of stages."""
        return len(self.stages)

    @property
    def recomputed_flops(self) -> int:
        """Recomputed flops of a step, in all stages."""
        return self.microbatches * sum(stage.recomputed_flops for stage in self.stages)

    def check(self, pipeline: object) -> None:
        """Raise if the plans were made for stages other than a pipe's or, in this process, a schedule's.

        Raises:
            PipelineError: The numbers of stages differ.
            PlanError: A stage differs; the message has all differences.
            UnsupportedError: It is neither a pipe nor a known schedule.
        """
        for number, module in self._stages_of(pipeline):
            plan = self.stages[number].plan
            if plan is not None:
                _named(number, plan.check, module)

    def apply(self, pipeline: object) -> None:
        """Put the plans on the stages of a pipe, or on the schedule's stages that this process runs. Runs nothing.

        Raises:
            PipelineError: See `check`.
            PlanError: See `check`; or a stage has a plan or a wrapped module already.
            UnsupportedError: See `check`.
        """
        self.check(pipeline)
        done: list[tuple[Plan, nn.Module]] = []
        try:
            for number, module in self._stages_of(pipeline):
                check_bare(module)
                plan = self.stages[number].plan
                if plan is not None:
                    plan.apply(module)
                    count_elsewhere(module)
                    done.append((plan, module))
        except BaseException:
            for plan, module in done:
                plan.remove(module)
            raise

    def remove(self, pipeline: object) -> None:
        """Remove the plans that are on.

        Raises:
            PipelineError: See `check`.
            PlanError: See `check`.
            UnsupportedError: See `check`.
        """
        self.check(pipeline)
        for number, module in self._stages_of(pipeline):
            plan = self.stages[number].plan
            if plan is not None and plan.is_on(module):
                plan.remove(module)

    def _stages_of(self, pipeline: object) -> Sequence[tuple[int, nn.Module]]:
        found, count = stages_in(pipeline)
        if count != len(self.stages):
            raise PipelineError(
                f"checkpoint: plans of {len(self.stages)} stages were given, and the pipeline has {count}. Plan these "
                "stages, with `torchremat.pipeline.plan_stages`."
            )
        return found

    def __str__(self) -> str:
        return "\n".join([*_device_rows(self.devices), "", *_stage_rows(self.stages)])


def stages_in(pipeline: object) -> tuple[Sequence[tuple[int, nn.Module]], int]:
    """Return the stages that this process runs, each with its number, and the number of all stages.

    Raises:
        UnsupportedError: It is neither a pipe nor a known schedule.
    """
    if isinstance(pipeline, nn.Module) and hasattr(pipeline, "partitions"):
        partitions = list(cast("Sequence[nn.Module]", pipeline.partitions))
        return list(enumerate(partitions)), len(partitions)
    found = stages_of(pipeline)
    return [(stage.stage_index, stage.submod) for stage in found], found[0].num_stages


def _named(stage: int, check: Callable[[nn.Module], None], module: nn.Module) -> None:
    try:
        check(module)
    except PlanError as error:
        raise PlanError(f"stage {stage}: {error}") from None


def _device_rows(devices: Sequence[DevicePlan]) -> Iterator[str]:
    width = max(6, *(len(device.name) for device in devices))
    names = ("budget", "peak", "plain", "floor", "before")
    yield "  ".join([f"{'device':<{width}}", *(f"{name:>10}" for name in names), "highest during"])
    for one in devices:
        sizes = (
            one.budget_bytes,
            one.peak_bytes,
            one.plain_peak_bytes,
            one.floor_bytes,
            one.before_bytes + one.boundary_bytes,
        )
        yield "  ".join([f"{one.name:<{width}}", *(f"{format_bytes(size):>10}" for size in sizes), one.where])


def _stage_rows(stages: Sequence[StagePlan]) -> Iterator[str]:
    yield f"{'stage':<5}  {'in flight':>9}  {'each keeps':>10}  {'plain':>10}  {'time':>7}  plan"
    for one in stages:
        words = "never" if one.plan is None else f"{one.plan.recomputed_calls} calls recomputed"
        yield (
            f"{one.stage:<5}  {one.in_flight:>9}  {format_bytes(one.kept_bytes):>10}  "
            f"{format_bytes(one.plain_kept_bytes):>10}  {one.slowdown:>5.2f} x  {words}"
        )
