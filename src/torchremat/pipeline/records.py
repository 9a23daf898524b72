"""The step of a pipe as a timeline, with its prediction."""

from __future__ import annotations

from dataclasses import replace

from torchremat.pipeline.prediction import costs_of, predict
from torchremat.pipeline.recorder import Recorder
from torchremat.pipeline.runner import Runner
from torchremat.pipeline.timeline import Timeline
from torchremat.schedules.pipelines import Action, Order, clock_cycles


def predicted_step(recorder: Recorder, runner: Runner) -> Timeline:
    """Return the record of a step, with the simulation of its order with the times of its parts."""
    groups: dict[object, list[int]] = {}
    for stage, device in enumerate(runner.devices):
        groups.setdefault(device, []).append(stage)
    workers = tuple(map(tuple, groups.values()))
    alone = len(workers) == len(runner.stages)
    measured = recorder.timeline(stages=len(runner.stages), workers=() if alone else workers)
    has_backward = any(event.kind == "backward" for event in measured.events)
    order = order_of(runner, workers, has_backward=has_backward)
    costs = costs_of(measured)
    if any((action.stage, action.kind) not in costs for actions in order for action in actions):
        return measured  # a backward that went through some of the stages
    return replace(measured, predicted=predict(measured, order, lookahead=True))


def order_of(runner: Runner, workers: tuple[tuple[int, ...], ...], *, has_backward: bool) -> Order:
    """Return the actions of each worker in a step: the clocks, and then the same clocks in reverse order."""
    count = max((len(settings) for settings in runner.settings), default=0)
    cells = [cell for clock in clock_cycles(count, len(runner.stages)) for cell in clock]
    actions = [Action(kind="forward", stage=stage, microbatch=number) for number, stage in cells]
    for number, stage in reversed(cells) if has_backward else ():
        if runner.settings[stage][number] is not None:
            actions.append(Action(kind="recompute", stage=stage, microbatch=number))
        actions.append(Action(kind="backward", stage=stage, microbatch=number))
    return tuple(tuple(action for action in actions if action.stage in stages) for stages in workers)
