"""The predicted time of a step: an order simulated with the times of a measured step."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median

from torchremat.pipeline.events import PipelineEvent
from torchremat.pipeline.timeline import Timeline
from torchremat.schedules.pipelines import Kind, Order
from torchremat.schedules.simulation import Costs, simulate


def costs_of(timeline: Timeline) -> dict[tuple[int, Kind], float]:
    """Return the median seconds of each kind of event of each stage, including copies and excluding waits.

    The time of an event inside another event counts for the inner one. See NOTE [ Whose time it is ].
    """
    found: dict[tuple[int, Kind], list[float]] = {}
    for stage in range(timeline.stages):
        events = timeline.events_of(stage)
        own_s = dict.fromkeys(map(id, events), 0.0)
        for piece in timeline.pieces_of(stage):
            own_s[id(piece.event)] += piece.seconds
        for event in events:
            if event.kind != "wait":
                found.setdefault((stage, event.kind), []).append(own_s[id(event)])
    return {key: median(seconds) for key, seconds in found.items()}


def predict(timeline: Timeline, order: Order, *, lookahead: bool = False, costs: Costs | None = None) -> Timeline:
    """Return the step of an order with the times of a measured step.

    >>> from torchremat.schedules.pipelines import gpipe
    >>> costs = {(0, "forward"): 1, (0, "backward"): 2, (1, "forward"): 1, (1, "backward"): 2}
    >>> predict(Timeline(events=(), stages=2), gpipe(3, 2), costs=costs).step_s  # (3 + 2 - 1) * (1 + 2)
    12.0

    Args:
        timeline: The median times of each stage are taken from it.
        order: The actions of each worker: another order than the measured one, or the same.
        lookahead: Whether a recompute begins before its gradient has come.
        costs: Better known seconds, by stage and kind; they replace the measured ones.

    Raises:
        ScheduleError: The order cannot run, or has an action without a known time.
    """
    known: Mapping[tuple[int, Kind], float] = {**costs_of(timeline), **(costs or {})}
    events = tuple(
        PipelineEvent(
            stage=span.action.stage,
            microbatch=span.action.microbatch,
            kind=span.action.kind,
            start_s=span.start_s,
            end_s=span.end_s,
        )
        for span in simulate(order, known, lookahead=lookahead)
    )
    workers = tuple(tuple(sorted({action.stage for action in actions})) for actions in order)
    stages = sum(map(len, workers))
    alone = workers == tuple((stage,) for stage in range(stages))
    return Timeline(events=events, stages=stages, workers=() if alone else workers)
