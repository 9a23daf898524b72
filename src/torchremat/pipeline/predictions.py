"""The predicted time of a step, and the step of a pipe as a timeline with its prediction."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from statistics import median

from torchremat.pipeline.events import PipelineEvent
from torchremat.pipeline.recorder import Recorder
from torchremat.pipeline.runner import Runner
from torchremat.pipeline.timeline import Timeline, timeline_of
from torchremat.schedules.pipelines import Action, Costs, Kind, Order, clock_cycles, simulate


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

    >>> costs = {(0, "forward"): 1, (0, "backward"): 2, (1, "forward"): 1, (1, "backward"): 2}
    >>> actions = ("forward", 0), ("forward", 1), ("backward", 1), ("backward", 0)
    >>> order = [[Action(kind=kind, stage=stage, microbatch=one) for kind, one in actions] for stage in (0, 1)]
    >>> predict(Timeline(events=(), stages=2), order, costs=costs).step_s  # (2 + 2 - 1) * (1 + 2)
    9.0

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
    return timeline_of(events, order)


def with_prediction(measured: Timeline, order: Order, *, lookahead: bool) -> Timeline:
    """Return a measured step with the simulation of its order, with the times of its parts.

    Without one if an action of the order was not measured: then backward went through some of the stages, or none.
    """
    costs = costs_of(measured)
    if any((action.stage, action.kind) not in costs for actions in order for action in actions):
        return measured
    return replace(measured, predicted=predict(measured, order, lookahead=lookahead))


def predicted_step(recorder: Recorder, runner: Runner) -> Timeline:
    """Return the record of a step, with the simulation of its order with the times of its parts."""
    events = recorder.events()
    order = order_of(runner, has_backward=any(event.kind == "backward" for event in events))
    return with_prediction(timeline_of(events, order), order, lookahead=True)


def order_of(runner: Runner, *, has_backward: bool) -> Order:
    """Return the actions of each device in a step: the clocks, and then the same clocks in reverse order."""
    count = max((len(settings) for settings in runner.settings), default=0)
    cells = [cell for clock in clock_cycles(count, len(runner.stages)) for cell in clock]
    actions = [Action(kind="forward", stage=stage, microbatch=number) for number, stage in cells]
    for number, stage in reversed(cells) if has_backward else ():
        if runner.settings[stage][number] is not None:
            actions.append(Action(kind="recompute", stage=stage, microbatch=number))
        actions.append(Action(kind="backward", stage=stage, microbatch=number))
    devices = dict.fromkeys(runner.devices)
    return tuple(tuple(one for one in actions if runner.devices[one.stage] == device) for device in devices)
