"""The records of all processes of a schedule, on one clock."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import torch.distributed as dist

from torchremat.pipeline.events import PipelineEvent
from torchremat.pipeline.recorder import Recorder
from torchremat.pipeline.timeline import Timeline
from torchremat.schedules.pipelines import Order


def gathered(recorder: Recorder, order: Order, group: object) -> Timeline:
    """Return the records of all processes of a group, on one clock; each process gets them.

    Args:
        recorder: The record of this process.
        order: The actions of each process.
        group: The process group, None for all processes.
    """
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
    workers = tuple(tuple(sorted({action.stage for action in actions})) for actions in order)
    stages = sum(map(len, workers))
    alone = workers == tuple((stage,) for stage in range(stages))
    return Timeline(events=moved, stages=stages, workers=() if alone else workers)
