"""Sessions, look-ahead and a record for a schedule of torch.distributed.pipelining.

    attribute                                        of              replaced by              if
    `step`                                           schedule        _ScheduleStep
    `forward_one_chunk` and both backward pieces     each stage      SessionsOfStage
    `_step_microbatches`, `get_bwd_recv_ops`, ...    GPipe, 1F1B     Waits                    `lookahead`, `record`
    `bwd_recv_ops`, `fwd_recv_ops`                   the others      Waits                    `lookahead`, `record`

All are attributes of instances. Through them the schedule keeps the attached objects; the attached objects keep neither
schedule nor stages, so that dropping a schedule drops all.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal, cast

import torch.distributed as dist

from torchremat._compat.binding import Original, Patch
from torchremat._compat.pipelining import SINGLE, STEP, check_hooks, group_of, name_of, stages_of
from torchremat._compat.sharding import is_managed, is_sharded
from torchremat.errors import UnsupportedError, check_flags
from torchremat.pipeline.attaching.orders import followed_at_once, order_of
from torchremat.pipeline.attaching.stages import Lookahead, SessionsOfStage
from torchremat.pipeline.attaching.waits import Waits
from torchremat.pipeline.event_recorder import Recorder
from torchremat.pipeline.events import PipelineEvent
from torchremat.pipeline.timeline import Timeline, timeline_of, with_prediction
from torchremat.regions.patches import scopes_on
from torchremat.schedules.pipelines import Order, recomputing
from torchremat.tensors.sizes import parse_bytes


def gather_records(recorder: Recorder, order: Order, group: object) -> Timeline:
    """Return the records of all processes of a group, on one clock; each process gets them."""
    events = recorder.events()
    ours = cast("dist.ProcessGroup | None", group)
    dist.barrier(group=ours)
    now_s = recorder.elapsed_s()  # all processes are here now
    found: list[tuple[float, tuple[PipelineEvent, ...]] | None] = [None] * dist.get_world_size(ours)
    dist.all_gather_object(found, (now_s, events), group=ours)
    known = [one for one in found if one is not None]
    end_s = max(then_s for then_s, _ in known)
    moved = tuple(
        replace(event, start_s=event.start_s + end_s - then_s, end_s=event.end_s + end_s - then_s)
        for then_s, those in known
        for event in those
    )
    return timeline_of(moved, order)


Choice = Literal["all", "in_flight"]


class Attached:
    """The attachment to a schedule. `attach` makes it; as a context manager it detaches at the end of the block.

    Args:
        schedule: The schedule.
        lookahead: Whether to recompute ahead of a gradient.
        lookahead_bytes: The most bytes recomputed ahead at once, None for no bound.
        checkpoint: Which microbatches run with regions.
        record: Whether to record which code runs when.
    """

    def __init__(
        self, schedule: object, *, lookahead: bool, lookahead_bytes: int | None, checkpoint: Choice, record: bool
    ) -> None:
        self._recorder = Recorder(on=record)
        self._group = group_of(schedule)
        self._order = order_of(schedule)
        self._lookahead = lookahead
        plain = followed_at_once(schedule) if checkpoint == "in_flight" else set[tuple[int, int]]()
        self._stages: dict[int, SessionsOfStage] = {}
        self._patches: list[Patch] = []
        for stage in stages_of(schedule):
            of_stage = {microbatch for number, microbatch in plain if number == stage.stage_index}
            sessions = SessionsOfStage(stage, self._recorder, of_stage, weighs=lookahead_bytes is not None)
            self._stages[sessions.index] = sessions
            self._patches += sessions.patches()
        self._waits = Waits(self._stages, Lookahead(lookahead_bytes) if lookahead else None, self._recorder)
        if lookahead or record:
            self._patches += self._waits.patches(schedule)
        self._patches.append(Patch(schedule, STEP, _ScheduleStep(schedule, self)))

    @property
    def events(self) -> tuple[PipelineEvent, ...]:
        """The events of this process in the last step, in the order in which they ended; empty without `record`."""
        return self._recorder.events()

    def timeline(self) -> Timeline:
        """Return the events of every stage in the last step, with a prediction from the times of the parts.

        All processes of the schedule must call it; their clocks are compared at a barrier. Transfers are not seen, only
        the time that a stage waits for them; the prediction assumes that they are free.

        Raises:
            UnsupportedError: `record` was not asked for.
        """
        if not self._recorder.on:
            raise UnsupportedError("timeline: nothing was recorded. Attach with `record=True`, and run a step.")
        measured = gather_records(self._recorder, self._order, self._group)
        recomputed = {(event.stage, event.microbatch) for event in measured.events if event.kind == "recompute"}
        order = recomputing(self._order, chosen=lambda stage, microbatch: (stage, microbatch) in recomputed)
        return with_prediction(measured, order, lookahead=self._lookahead)

    @property
    def open_sessions(self) -> int:
        """How many microbatches are between their forward and the end of their backward."""
        return sum(map(len, self._stages.values()))

    def begin(self) -> None:
        """Forget what earlier steps have recorded."""
        self._recorder.start()

    def close(self) -> None:
        """Close all sessions; their microbatches then recompute as if nothing were attached."""
        self._waits.forget()
        for stage in self._stages.values():
            stage.close()

    def detach(self) -> None:
        """Restore the schedule from before `attach`. Detaching twice is a no-op.

        Raises:
            UnsupportedError: Other code has replaced an attribute of the schedule since; nothing is undone then.
        """
        problems = [problem for patch in self._patches if (problem := patch.problem()) is not None]
        if problems:
            raise UnsupportedError(f"cannot detach: {'; '.join(problems)}. Undo that first.")
        while self._patches:
            self._patches.pop().undo()
        self.close()

    def __enter__(self) -> Attached:
        return self

    def __exit__(self, *_: object) -> None:
        self.detach()


class _ScheduleStep:
    """The `step` of a schedule, which leaves no session open."""

    def __init__(self, schedule: object, attached: Attached) -> None:
        self._step = Original(schedule, STEP)
        self.attached = attached

    def __call__(self, *args: Any, **kwargs: Any) -> object:
        self.attached.begin()
        try:
            return self._step(*args, **kwargs)
        finally:
            self.attached.close()


def attach(
    schedule: object,
    *,
    lookahead: bool = True,
    lookahead_bytes: int | str | None = None,
    checkpoint: Choice = "all",
    record: bool = False,
) -> Attached:
    """Give each microbatch of each stage its own session, and recompute ahead of gradients.

    A region in a stage (`wrap`, `checkpoint`) is then recomputed once per microbatch, also if a schedule splits the
    backward into an input and a weight pass. Gradients are the same as without `attach`, bit for bit.

    Args:
        schedule: A ScheduleGPipe, Schedule1F1B, ScheduleInterleaved1F1B, ScheduleLoopedBFS,
            ScheduleInterleavedZeroBubble, ScheduleZBVZeroBubble or ScheduleDualPipeV.
        lookahead: Whether to recompute during the transfer of a gradient: after its receive is posted, before the wait,
            last region first, until the gradient has arrived.
        lookahead_bytes: The most bytes recomputed ahead at once, None for no bound. Needs `lookahead`.
        checkpoint: `"all"`: regions recompute in every microbatch. `"in_flight"`: except in microbatches whose backward
            follows at once, as on the last stage of 1F1B; their forward makes no regions. Not with a plan on a stage.
        record: Whether to record which code runs when, for `Attached.timeline` and `Attached.events`.

    Raises:
        UnsupportedError: A schedule of another class, or one that is attached already; an invalid option; a look-ahead
            that would meet sharded parameters.
        VersionError: This torch lacks a name that `attach` uses.
    """
    check_flags(lookahead=lookahead, record=record)
    name = name_of(schedule)
    if isinstance(vars(schedule).get(STEP), _ScheduleStep):
        raise UnsupportedError(
            f"this {name} is attached already. Detach it first: torchremat.pipeline.detach(schedule)."
        )
    budget = None if lookahead_bytes is None else parse_bytes(lookahead_bytes)
    problems: list[str] = []
    if checkpoint not in ("all", "in_flight"):
        problems.append(f"checkpoint={checkpoint!r}: 'all' or 'in_flight' is allowed")
    if budget is not None and not lookahead:
        problems.append(f"lookahead_bytes={lookahead_bytes!r} with lookahead=False: there is nothing to bound")
    if checkpoint == "in_flight":
        problems += _problems_of_plans(schedule)
    check_hooks(schedule, waits=lookahead or record)
    if lookahead:
        problems += _problems_of_shards(schedule, name)
    if problems:
        raise UnsupportedError(f"{'; '.join(problems)}.")
    return Attached(schedule, lookahead=lookahead, lookahead_bytes=budget, checkpoint=checkpoint, record=record)


def detach(schedule: object) -> None:
    """Restore a schedule from before `attach`.

    Raises:
        UnsupportedError: Nothing is attached, or other code has replaced an attribute since.
    """
    step = getattr(schedule, "__dict__", {}).get(STEP)
    if not isinstance(step, _ScheduleStep):
        raise UnsupportedError(f"nothing is attached to this {type(schedule).__name__}, so there is nothing to detach.")
    step.attached.detach()


def _problems_of_plans(schedule: object) -> list[str]:
    """Return the reasons why microbatches cannot run without regions: a plan needs all of its regions."""
    return [
        f"checkpoint='in_flight' with a plan on stage {stage.stage_index}: microbatches whose backward follows at "
        "once would keep more than the plan has counted; use checkpoint='all' (plans of `plan_stages` recompute only "
        "as much as a stage has to)"
        for stage in stages_of(schedule)
        if any(scope.choices for scope in scopes_on(stage.submod))
    ]


def _problems_of_shards(schedule: object, name: str) -> list[str]:
    """Return why a look-ahead would not find parameters gathered: the schedule must have unsharded the stage."""
    problems: list[str] = []
    for stage in stages_of(schedule):
        if not any(is_managed(module) for module in stage.submod.modules()):
            continue
        if name in SINGLE:
            problems.append(
                f"lookahead=True with stage {stage.stage_index} sharded by `fully_shard`: a {name} does not unshard a "
                "stage ahead of its backward; use lookahead=False, or a schedule of several stages, which does"
            )
        elif not is_sharded(stage.submod):
            problems.append(
                f"lookahead=True with modules of stage {stage.stage_index} sharded by `fully_shard`, but not its own "
                "one: the schedule unshards a stage only if its own module is sharded; shard that too, or use "
                "lookahead=False"
            )
    return problems
