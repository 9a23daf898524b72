"""A pipeline's order simulated on a clock: the begin and end of each action, if each takes its cost in time.

An action begins when its worker has finished the one before, and its requirements have arrived:

    action  needs
    F s.i   F of stage s-1, copied here
    R s.i   F of this stage; without lookahead also the gradient, as B
    B s.i   F and R of this stage; B (or I) of stage s+1, copied here
    I s.i   as B
    W s.i   I of this stage

A copy goes from one worker to another while both compute; stages of one worker need none. Contention for a link is not
modelled: each copy takes its own time, no matter how many run.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

from torchremat.errors import ScheduleError
from torchremat.schedules.pipelines import LETTERS, Action, Kind, Order, check_order, needs

Costs: TypeAlias = Mapping[tuple[int, Kind], float]
"""Seconds by stage and kind; those of a copy are of what comes to this stage from another worker, 0 if not given."""


@dataclass(frozen=True, kw_only=True)
class Span:
    """An action, its worker, and its time: seconds since the start of the step."""

    worker: int
    action: Action
    start_s: float
    end_s: float


def simulate(order: Order, costs: Costs, *, lookahead: bool = False) -> tuple[Span, ...]:
    """Return the spans of all actions of an order, copies included, by start time.

    >>> costs = {(stage, kind): seconds for stage in (0, 1) for kind, seconds in (("forward", 1), ("backward", 2))}
    >>> actions = ("forward", 0), ("forward", 1), ("backward", 1), ("backward", 0)
    >>> order = [[Action(kind=kind, stage=stage, microbatch=one) for kind, one in actions] for stage in (0, 1)]
    >>> spans = simulate(order, costs)
    >>> max(span.end_s for span in spans)  # (2 microbatches + 2 stages - 1) * (1 + 2)
    9.0

    Args:
        order: The actions of each worker.
        costs: Of every kind of action that the order has in a stage.
        lookahead: Whether a recompute may begin before its gradient arrives.

    Raises:
        ScheduleError: The order lacks an action that another needs; its workers wait for each other (the message says
            for what each waits); or a cost is missing.
    """
    check_order(order)
    _check_costs(order, costs)
    return tuple(sorted(_Clock(order, costs, lookahead).run(), key=lambda span: (span.start_s, span.worker)))


class _Clock:
    def __init__(self, order: Order, costs: Costs, lookahead: bool) -> None:
        self.order = order
        self.costs = costs
        self.lookahead = lookahead
        self.worker_of = {action.stage: worker for worker, actions in enumerate(order) for action in actions}
        self.known = {action for actions in order for action in actions}
        # By action, one of another stage that needs its result.
        self.receivers = {
            needed: action
            for action in self.known
            for options in needs(action)
            for needed in options
            if needed.stage != action.stage
        }
        self.next = [0] * len(order)  # of each worker, the position in its order
        self.free_s = [0.0] * len(order)
        self.ended_s: dict[Action, float] = {}
        self.arrived_s: dict[Action, float] = {}  # the end of its copy to the neighbour that needs it

    def run(self) -> Iterator[Span]:
        waiting: dict[Action, list[int]] = {}  # workers by the action that they wait for
        ready = list(range(len(self.order)))
        while ready:
            worker = ready.pop()
            while self.next[worker] < len(self.order[worker]):
                action = self.order[worker][self.next[worker]]
                needed = next((one for one in self.needs(action) if one not in self.ended_s), None)
                if needed is not None:
                    waiting.setdefault(needed, []).append(worker)
                    break
                yield from self.begin(worker, action)
                self.next[worker] += 1
                ready += waiting.pop(action, [])
        if waiting:
            raise ScheduleError(self.stuck(waiting))

    def needs(self, action: Action) -> Iterator[Action]:
        for options in needs(action):
            if not (self.lookahead and action.kind == "recompute" and options[0].stage > action.stage):
                yield from self.known.intersection(options)

    def begin(self, worker: int, action: Action) -> Iterator[Span]:
        # A neighbour's result counts from its arrival, this stage's own from its end.
        waits = (
            (self.ended_s if needed.stage == action.stage else self.arrived_s)[needed] for needed in self.needs(action)
        )
        start_s = max([self.free_s[worker], *waits])
        end_s = start_s + self.costs[action.stage, action.kind]
        self.free_s[worker] = self.ended_s[action] = self.arrived_s[action] = end_s
        yield Span(worker=worker, action=action, start_s=start_s, end_s=end_s)
        receiver = self.receivers.get(action)
        if receiver is None or (there := self.worker_of[receiver.stage]) == worker:
            return
        copy_s = self.costs.get((receiver.stage, "copy"), 0.0)
        if copy_s > 0:
            copy = replace(receiver, kind="copy")
            self.arrived_s[action] = end_s + copy_s
            yield Span(worker=there, action=copy, start_s=end_s, end_s=end_s + copy_s)

    def stuck(self, waiting: Mapping[Action, list[int]]) -> str:
        needed_by = {worker: needed for needed, workers in waiting.items() for worker in workers}
        lines = [f"{len(needed_by)} of {len(self.order)} workers are stuck after {len(self.ended_s)} actions:"]
        for worker, needed in sorted(needed_by.items()):
            place, other = self.next[worker], self.worker_of[needed.stage]
            there = self.order[other].index(needed)
            held = f"{self.order[worker][place]}, its action {place}"
            lines.append(f"  worker {worker}: {held}, waits for {needed}, action {there} of worker {other}")
        return "\n".join(lines)


def _check_costs(order: Order, costs: Costs) -> None:
    needed = sorted({(action.stage, action.kind) for actions in order for action in actions})
    problems = [f"{kind} of stage {stage} has no cost" for stage, kind in needed if (stage, kind) not in costs]
    problems += [
        f"{kind} of stage {stage} costs {cost!r} s, which is not a length of time"
        for (stage, kind), cost in costs.items()
        if kind not in LETTERS or not (math.isfinite(cost) and cost >= 0)
    ]
    if problems:
        raise ScheduleError(f"costs that an order cannot run on: {'; '.join(problems)}")
