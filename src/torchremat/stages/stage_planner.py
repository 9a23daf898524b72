"""The planner of stages: from a budget for each device to a plan for each stage."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import nn

from torchremat._compat.collectives import ranks_of
from torchremat._compat.pipelining import group_of
from torchremat.errors import BudgetError, PipelineError, StepError, UnsupportedError, check_flags
from torchremat.measuring.before import BytesBefore
from torchremat.measuring.heap import heap_set_aside
from torchremat.measuring.step import check_kinds, check_steps_on
from torchremat.measuring.storages import address_of
from torchremat.optimizing.module_runs import check_in_memory
from torchremat.pipeline.pipe import Pipe
from torchremat.planning.budgets import bytes_of, check_budget, margin_of, optimizer_alone, relative_of
from torchremat.planning.layout import check_bare
from torchremat.planning.peers.peers import Peers, peers_of
from torchremat.planning.plan_options import PlanOptions
from torchremat.planning.planner import Planner
from torchremat.planning.profiles.run_profile import not_by_runs
from torchremat.planning.results.descriptions import plan_of
from torchremat.planning.searches.chains import Cost
from torchremat.planning.searches.microbatches import Share, shares
from torchremat.planning.searches.search import Search
from torchremat.regions.selective.kept import memory_of
from torchremat.stages.choosing import Choices, Chosen
from torchremat.stages.losses import optimizer_bytes
from torchremat.stages.pipes import sites_of_pipe
from torchremat.stages.samples import Sample, Site, resident_bytes
from torchremat.stages.schedules import site_of_schedule
from torchremat.stages.split_microbatch import SplitBackward
from torchremat.stages.stage_plans import DevicePlan, StagePlan, StagePlans, stages_in
from torchremat.stages.sums import Sums
from torchremat.tensors.sizes import format_bytes

T = TypeVar("T")
Budgets = int | str | Sequence[int | str]


class StagePlanner:
    """Plans the stages of one pipeline, any number of times from one profile of each stage.

    Args:
        pipeline: As for `plan_stages`.
        step: As for `plan_stages`.
        optimizer: As for `plan_stages`.
        lookahead: As for `plan_stages`.
        cost: As for `plan_stages`.

    Raises:
        StepError: See `plan_stages`.
        PlanError: See `plan_stages`.
        UnsupportedError: See `plan_stages`.
    """

    def __init__(
        self,
        pipeline: object,
        step: Callable[[Any], object],
        *,
        optimizer: torch.optim.Optimizer | None = None,
        lookahead: bool | None = None,
        cost: Cost = "seconds",
    ) -> None:
        check_kinds(step, None, optimizer, needs_model=False)
        options = PlanOptions(cost=cost)
        check_flags(may_be_none=True, lookahead=lookahead)
        own, self._stages = stages_in(pipeline)
        if isinstance(pipeline, Pipe) and lookahead is not None:
            raise UnsupportedError(
                f"lookahead={lookahead} with a Pipe: it recomputes plans when gradients have come. Leave it out; it is "
                "for schedules that `attach` is called with."
            )
        for _, module in own:
            check_bare(module)
            check_in_memory(module)
        if optimizer is not None:
            check_steps_on(optimizer, [parameter for _, module in own for parameter in module.parameters()])
        self._devices = _devices_of(pipeline)
        if isinstance(pipeline, Pipe):
            self._peers = Peers()
            sites = sites_of_pipe(pipeline, step)
        else:
            self._peers = peers_of([ranks_of(cast("dist.ProcessGroup | None", group_of(pipeline)))])
            sites = [site_of_schedule(pipeline, step, lookahead=lookahead is not False)]
        modules = [module for _, module in own]
        resident = partial(resident_bytes, step, modules, optimizer, [one for site in sites for one in site.samples])
        self._planned = self._peers.each(
            lambda: [_Planned(site, options, modules, optimizer, resident) for site in sites]
        )

    def plan(self, budget: Budgets, *, margin: int | str = 0) -> StagePlans:
        """Return the cheapest plans found that keep every device within its budget.

        Args:
            budget: As for `plan_stages`.
            margin: As for `plan_stages`.

        Raises:
            BudgetError: See `plan_stages`.
            PipelineError: See `plan_stages`.
        """

        def plans_here() -> list[tuple[DevicePlan, list[StagePlan]]]:
            budgets = _budgets_of(self._devices, budget, margin)[self._peers.place :]
            return [planned.plan(each, margin) for planned, each in zip(self._planned, budgets, strict=False)]

        plans = [plan for those in self._peers.all(plans_here) for plan in those]
        return StagePlans(
            stages=tuple(sorted((stage for _, those in plans for stage in those), key=lambda one: one.stage)),
            devices=tuple(device for device, _ in plans),
            microbatches=self._planned[0].microbatches,
        )


class _Planned:
    """A device whose stages have been profiled."""

    def __init__(
        self,
        site: Site,
        options: PlanOptions,
        modules: Sequence[nn.Module],
        optimizer: torch.optim.Optimizer | None,
        resident: Callable[[torch.device], int],
    ) -> None:
        self.site, self._stepped_by = site, optimizer
        self._optimizer = None if optimizer is None else optimizer_bytes(modules, optimizer, site.device)
        self._planners = {sample.stage: _planner(sample, site, options) for sample in site.samples}
        self._split_backwards = {
            one.stage: SplitBackward(one.module, one.ends, self._search(one.stage).pair).predict
            for one in site.samples
            if one.ends is not None
        }
        self._sums = {
            one.stage: Sums(one.module, one.step, self._search(one.stage).pair_in_parts, site.microbatches).predict
            for one in site.samples
            if one.added
        }
        self.microbatches = site.microbatches
        self._resident_bytes = resident(site.device)  # now that the workspaces of all stages are there

    def _search(self, stage: int) -> Search:
        search = self._planners[stage].solver
        if not isinstance(search, Search):
            raise not_by_runs("A stage of a pipeline does not run alone: take gradients outside of the pipeline.")
        return search

    @cached_property
    def _shares(self) -> dict[int, tuple[Share, ...]]:
        with heap_set_aside():
            return {
                one.stage: shares(
                    self._search(one.stage),
                    self._split_backwards.get(one.stage),
                    self._sums.get(one.stage),
                    ahead=one.ahead,
                )
                for one in self.site.samples
            }

    @cached_property
    def _choices(self) -> Choices:
        return Choices(self._shares, self.site.loads)

    @property
    def _before_bytes(self) -> int:
        """Parameters, gradients and buffers of all stages here, their optimizer's state, the device's own bytes."""
        found = {stage: planner.profile.before for stage, planner in self._planners.items()}
        state_bytes = 0 if self._optimizer is None else self._optimizer.state_bytes
        stages_bytes = sum(one.total_bytes - one.input_bytes - _kept_by_device(one) for one in found.values())
        return (
            stages_bytes
            - _shared_bytes([one.module for one in self.site.samples])
            + state_bytes
            + self._resident_bytes
            + sum(self.site.in_flight[stage] * one.slack_bytes for stage, one in found.items())
        )

    @property
    def _fixed_bytes(self) -> int:
        return self._before_bytes + self.site.boundary_bytes

    @property
    def _optimizer_peak_bytes(self) -> int | None:
        own = self._optimizer
        return None if own is None else self._fixed_bytes - own.state_bytes + own.peak_bytes

    def _peak_bytes(self, chosen: Chosen) -> int:
        return max(self._fixed_bytes + chosen.peak_bytes, self._optimizer_peak_bytes or 0)

    def plan(self, budget: int | str, margin: int | str) -> tuple[DevicePlan, list[StagePlan]]:
        """Return the bytes that the device needs, and the plans of its stages."""
        plain, floor = self._choices.plain, self._choices.floor
        relative, reserved = relative_of(budget), margin_of(margin)
        if relative is not None:
            size = relative.bytes(
                plain_bytes=self._peak_bytes(plain),
                before_bytes=self._fixed_bytes,
                smallest=lambda: self._peak_bytes(floor) + reserved,
            )
        else:
            size = bytes_of(budget, self.site.device)
        chosen = self._choices.cheapest(size - reserved - self._fixed_bytes)
        if chosen is None or self._peak_bytes(chosen) > size - reserved:
            raise BudgetError(self._nothing_fits(size, str(budget), reserved))
        device = DevicePlan(
            name=self.site.name,
            stages=tuple(sorted(self._planners)),
            budget_bytes=size,
            peak_bytes=self._peak_bytes(chosen),
            plain_peak_bytes=self._peak_bytes(plain),
            floor_bytes=self._peak_bytes(floor),
            optimizer_peak_bytes=self._optimizer_peak_bytes,
            before_bytes=self._before_bytes,
            boundary_bytes=self.site.boundary_bytes,
            where="optimizer.step()" if self._peak_bytes(chosen) == self._optimizer_peak_bytes else _words(chosen),
        )
        return device, [self._stage(stage, chosen, size) for stage in sorted(self._planners)]

    def _stage(self, stage: int, chosen: Chosen, size: int) -> StagePlan:
        planner, share, plain = self._planners[stage], chosen.shares[stage], self._choices.plain.shares[stage]
        prediction = share.candidate.prediction
        return StagePlan(
            stage=stage,
            plan=None if share is plain else plan_of(planner.profiled, share.candidate, size, str(size)),
            in_flight=self.site.in_flight[stage],
            kept_bytes=share.kept_bytes,
            plain_kept_bytes=plain.kept_bytes,
            recomputed_flops=prediction.flops,
            slowdown=1 + prediction.seconds / planner.profile.seconds,
        )

    def _nothing_fits(self, size: int, budget: str, reserved_bytes: int) -> str:
        floor = self._peak_bytes(self._choices.floor) + reserved_bytes
        reserved = f", of which {format_bytes(reserved_bytes)} are set aside" if reserved_bytes else ""
        if self._optimizer is not None and floor - reserved_bytes == self._optimizer_peak_bytes:
            peak_bytes = floor - reserved_bytes
            alone = optimizer_alone(
                size, budget, self._stepped_by, peak_bytes=peak_bytes, reserved_bytes=reserved_bytes
            )
            return f"{self.site.name}: {alone}"
        held = ", ".join(f"stage {stage} holds {count}" for stage, count in sorted(self.site.in_flight.items()))
        state = ", buffers and optimizer state" if self._optimizer is not None else " and buffers"
        if any(_kept_by_device(planner.profile.before) for planner in self._planners.values()):
            state += " and what the device's libraries and allocator keep"
        return (
            f"{self.site.name}: no plans fit the budget of {format_bytes(size)} ({budget}){reserved}. Smallest budget "
            f"that works: {floor} bytes ({format_bytes(floor)}). {format_bytes(self._before_bytes)} of it are "
            f"parameters, gradients{state}, and {format_bytes(self.site.boundary_bytes)} lie between the stages; "
            f"of microbatches, {held} at a time. Smaller microbatches lower what is left; so do more stages."
            + self._recomputed_whole
        )

    @property
    def _recomputed_whole(self) -> str:
        """Words on the stages that cannot be recomputed in parts, which would need less."""
        split = [one.stage for one in self.site.samples if one.ends is not None]
        ahead = [one.stage for one in self.site.samples if one.ahead]
        if split:
            return f" Stages {split} recompute whole blocks, not parts of them, since their backward is split in two."
        told = "With `lookahead=False`, here and in `attach`, it may recompute parts of blocks"
        return f" Stages {ahead} recompute whole blocks ahead of the gradient. {told}." if ahead else ""


def _kept_by_device(before: BytesBefore) -> int:
    """Return the bytes that belong to the device and to no stage; see NOTE [ What a device holds ]."""
    return before.resident_bytes + before.slack_bytes


def _devices_of(pipeline: object) -> Sequence[torch.device | str]:
    """Return the devices of a pipe, or the names of a schedule's processes."""
    if isinstance(pipeline, Pipe):
        return list(dict.fromkeys(pipeline.devices))
    group = cast("dist.ProcessGroup | None", group_of(pipeline))
    return [f"process {rank}" for rank in range(dist.get_world_size(group))]


def _budgets_of(devices: Sequence[torch.device | str], budget: Budgets, margin: int | str) -> list[int | str]:
    """Return the budget of each device or process.

    Raises:
        BudgetError: See `check_budget`.
        PipelineError: The number of budgets differs from the number of devices.
    """
    if isinstance(budget, Sequence) and not isinstance(budget, str):
        budgets = list(budget)
    else:
        budgets = [budget] * len(devices)
    if len(budgets) != len(devices):
        are_here = all(isinstance(one, torch.device) for one in devices)
        what = f"devices: {', '.join(map(str, devices))}" if are_here else "processes"
        raise PipelineError(
            f"budget: {len(budgets)} were given for {len(devices)} {what}. Give one for each, or one for all."
        )
    for each, device in zip(budgets, devices, strict=True):
        check_budget(each, device, margin=margin)
    return budgets


def _planner(sample: Sample, site: Site, options: PlanOptions) -> Planner:
    try:
        return Planner(sample.module, sample.step, **replace(options, device=site.device, accumulates=True).keywords)
    except StepError as error:
        raise StepError(f"stage {sample.stage}: {error}") from error


def _shared_bytes(modules: Sequence[nn.Module]) -> int:
    """Return the bytes that modules share with earlier ones: parameters with their gradients, and buffers."""
    known, shared_bytes = set[int](), 0
    for module in modules:
        tensors = (*module.parameters(), *module.buffers())
        own = {address_of(memory): tensor for tensor in tensors if (memory := memory_of(tensor)) is not None}
        shared = (own[address] for address in own.keys() & known)
        shared_bytes += sum(one.untyped_storage().nbytes() + (one.nbytes if one.requires_grad else 0) for one in shared)
        known |= own.keys()
    return shared_bytes


def _words(chosen: Chosen) -> str:
    match chosen.highest.phase:
        case "forward":
            return f"forward of stage {chosen.highest.running}"
        case "ahead":
            return f"look-ahead of stage {chosen.highest.running}"
        case "backward" | "first" | "second" | "last":
            return f"backward of stage {chosen.highest.running}"
        case "input" | "weight":
            return f"{chosen.highest.phase} pass of the backward of stage {chosen.highest.running}"
        case "copies":
            return "copies between stages, in forward"
        case "loss":
            return "the loss, between forward and backward"


def plan_stages(
    pipeline: object,
    step: Callable[[Any], object],
    *,
    budget: Budgets,
    optimizer: torch.optim.Optimizer | None = None,
    lookahead: bool | None = None,
    cost: Cost = "seconds",
    margin: int | str = 0,
) -> StagePlans:
    """Return a plan for each stage of a pipeline, such that every device stays within its budget; nothing is applied.

    Each stage is planned for as many microbatches as its schedule lets it hold: on 1F1B stage s of n holds n - s, and
    the last stage one. At any time of a step

        parameters, gradients, buffers, optimizer state + bytes between the stages
        + microbatches held x the bytes that each keeps + the peak of the running one    is at most the budget,

    and so is the peak of the optimizer's own step. For this the step is run once, one microbatch of each stage a few
    times by itself, and a step of the optimizer, which is undone.

    Args:
        pipeline: A `Pipe` made with a mode, not with plans; or a schedule that `attach` knows, and then all processes
            call this.
        step: Called with the pipeline. For a pipe it returns the loss of a batch, as for `plan`; for a schedule it runs
            a step: `lambda schedule: schedule.step(x, target=y)`.
        budget: Peak bytes of a device, or of a process, in a step: an int, `"6GiB"`; `"60%"` of its predicted plain
            peak, `"40% of activations"`, or `"min"`, as for `plan`; one for all, or one for each.
        optimizer: Of the stages of a pipe, or of the schedule's stages that this process runs. If given, the peak of
            its step counts, and its state, also before its first step has created it.
        lookahead: Whether schedules run with the look-ahead of `attach`, as they do by default. Then the tensors that
            it recomputes before a gradient arrives are counted: all of a microbatch, for each that waits for another
            process. A bound of `attach` lowers them. For schedules only: a `Pipe` does not recompute plans ahead.
        cost: What to minimise, `"seconds"` or `"flops"`.
        margin: Bytes of each budget to leave free.

    Raises:
        BudgetError: A budget or the margin is not a size, or no plans fit it; the message has the smallest that works.
        PipelineError: The number of budgets differs from the number of devices.
        PlanError: A stage has a plan or a wrapped module already.
        StepError: The step does not run the pipeline, or returns no loss; or the optimizer belongs to no stage here.
        UnsupportedError: A schedule of another class, `lookahead` for a `Pipe` or of another kind than True, False and
            None, or a profiler is active; or the optimizer cannot step by itself.
    """
    stages_in(pipeline)  # it is a pipeline
    _budgets_of(_devices_of(pipeline), budget, margin)
    return StagePlanner(pipeline, step, optimizer=optimizer, lookahead=lookahead, cost=cost).plan(budget, margin=margin)
