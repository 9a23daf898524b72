"""Orders of pipelines as data: the sequence of actions of each worker, by stage and microbatch; and on a clock.

A stage is a part of the model, a microbatch a part of the batch, and a worker runs one stage, or several where they
are interleaved. The text of an action is a letter, its stage, and its microbatch:

- `F0.1`: the forward of microbatch 1 through stage 0.
- `R0.1`: that forward again, to recompute the tensors that backward needs.
- `B0.1`: the backward, of inputs and weights together.
- `I0.1`, `W0.1`: the two passes of a split backward, first for inputs, then for weights.
- `C0.1`: a copy of an activation or a gradient to stage 0.
- `_0.1`: a wait.

Copies and waits result from an order, as `simulate` finds; an order itself has neither.

NOTE [ An order on a clock ]
Each action takes its cost in time. It begins when its worker has finished the one before, and its requirements have
arrived:

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
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias, get_args

from torchremat.errors import ScheduleError

Kind = Literal["forward", "recompute", "backward", "input", "weight", "copy", "wait"]

KINDS: tuple[Kind, ...] = get_args(Kind)
COMPUTES: tuple[Kind, ...] = ("forward", "recompute", "backward", "input", "weight")
LETTERS: dict[Kind, str] = {
    "forward": "F",
    "recompute": "R",
    "backward": "B",
    "input": "I",
    "weight": "W",
    "copy": "C",
    "wait": "_",
}

_SHOWN = 12  # problems in one message


@dataclass(frozen=True, kw_only=True)
class Action:
    """One kind of work on one microbatch in one stage."""

    kind: Kind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{LETTERS[self.kind]}{self.stage}.{self.microbatch}"


Order: TypeAlias = Sequence[Sequence[Action]]
"""The actions of each worker."""


def clock_cycles(microbatches: int, stages: int) -> Iterator[list[tuple[int, int]]]:
    """Yield for each tick the pairs (microbatch, stage) that run forward in it.

    >>> list(clock_cycles(3, 2))
    [[(0, 0)], [(1, 0), (0, 1)], [(2, 0), (1, 1)], [(2, 1)]]

    Source: C. Kim et al., "torchgpipe: On-the-fly Pipeline Parallelism for Training Giant Models", 2020, section 3.2.
    """
    if microbatches < 1 or stages < 1:
        raise ScheduleError(f"{microbatches} microbatches through {stages} stages: expected at least 1 of both")
    for tick in range(microbatches + stages - 1):
        first, last = max(0, tick - microbatches + 1), min(tick, stages - 1)
        yield [(tick - stage, stage) for stage in range(first, last + 1)]


def recomputing(order: Order, *, chosen: Callable[[int, int], bool] = lambda stage, microbatch: True) -> Order:
    """Return the order with a recompute just before each backward.

    Args:
        order: Without recomputes of the chosen forwards.
        chosen: Called with a stage and a microbatch: whether that forward is recomputed.
    """
    return tuple(
        tuple(
            one
            for action in actions
            for one in (
                (Action(kind="recompute", stage=action.stage, microbatch=action.microbatch), action)
                if action.kind in ("backward", "input") and chosen(action.stage, action.microbatch)
                else (action,)
            )
        )
        for actions in order
    )


def most_held(actions: Sequence[Action]) -> dict[int, int]:
    """Return how many microbatches each stage of a worker holds at most, the one that runs included."""
    held, most = Counter[int](), Counter[int]()
    for action in actions:
        held[action.stage] += {"forward": 1, "backward": -1, "weight": -1}.get(action.kind, 0)
        most[action.stage] = max(most[action.stage], held[action.stage])
    return dict(most)


_Needed: TypeAlias = tuple[tuple[Kind, int], ...]
_RUN: _Needed = (("forward", 0),)
_GRADIENT: _Needed = (("backward", 1), ("input", 1))
# By kind of action, for each requirement the kinds of which one must have run, each with how many stages further on.
# Recomputes are needed where an order has them, gradients everywhere except in the last stage.
_NEEDS: dict[Kind, tuple[_Needed, ...]] = {
    "forward": ((("forward", -1),),),
    "recompute": (_RUN, _GRADIENT),
    "backward": ((("recompute", 0),), _GRADIENT, _RUN),
    "input": ((("recompute", 0),), _GRADIENT, _RUN),
    "weight": ((("input", 0),), _RUN),
}


def needs(action: Action) -> Iterator[tuple[Action, ...]]:
    """Yield for each requirement of an action the actions of which one must have run; an order may have none of them.

    >>> [" or ".join(map(str, options)) for options in needs(Action(kind="backward", stage=1, microbatch=0))]
    ['R1.0', 'B2.0 or I2.0', 'F1.0']
    """
    for kinds in _NEEDS.get(action.kind, ()):
        options = (Action(kind=one, stage=action.stage + by, microbatch=action.microbatch) for one, by in kinds)
        if found := tuple(one for one in options if one.stage >= 0):
            yield found


def check_order(order: Order) -> None:
    """Raise if the order is invalid for a pipeline, no matter how long its actions take.

    A circular wait between its workers shows only when it runs, in `simulate`.

    Raises:
        ScheduleError: All problems, in one message.
    """
    problems: list[str] = []
    worker_of: dict[int, int] = {}
    places: dict[Action, tuple[int, int]] = {}
    for worker, actions in enumerate(order):
        for place, action in enumerate(actions):
            if action.kind not in COMPUTES:
                problems.append(f"{action} of worker {worker}: an order cannot hold a {action.kind}")
            elif action.stage < 0 or action.microbatch < 0:
                problems.append(f"{action} of worker {worker}: a stage and a microbatch are at least 0")
            elif action in places:
                problems.append(f"{action} of worker {worker}: it is there twice, worker {places[action][0]} has it")
            elif worker_of.setdefault(action.stage, worker) != worker:
                owner = worker_of[action.stage]
                problems.append(f"{action} of worker {worker}: stage {action.stage} belongs to worker {owner}")
            else:
                places[action] = (worker, place)
    if not problems:
        stages = 1 + max(worker_of, default=-1)
        problems += [
            f"stage {stage} has no worker, the last is {stages - 1}"
            for stage in range(stages)
            if stage not in worker_of
        ]
        for action in places:
            problems += _missing(action, places, stages)
    if problems:
        more = [f"... and {len(problems) - _SHOWN} more"] if len(problems) > _SHOWN else []
        shown = "\n".join(f"  {problem}" for problem in problems[:_SHOWN] + more)
        raise ScheduleError(f"an order of {len(order)} workers that cannot run:\n{shown}")


def _missing(action: Action, places: dict[Action, tuple[int, int]], stages: int) -> Iterator[str]:
    """Yield the requirements of an action that the order lacks, or that come after it."""

    def at(kind: Kind) -> Action:
        return Action(kind=kind, stage=action.stage, microbatch=action.microbatch)

    if action.kind == "recompute" and at("backward") not in places and at("input") not in places:
        yield f"{action} is of no use, no worker runs {at('backward')} or {at('input')}"
    if action.kind == "backward" and at("input") in places:
        yield f"{action} is the whole backward, but {at('input')} is in the order as well"
    for options in needs(action):
        first, *others = options
        is_gradient = first.stage > action.stage
        if places.keys().isdisjoint(options):
            # Its backward lacks the gradient of a recompute as well, and the last stage has the loss.
            if first.kind == "recompute" or (is_gradient and (action.kind == "recompute" or first.stage == stages)):
                continue
            either = f" or {others[0]}, and no worker runs either" if others else ", which no worker runs"
            yield f"{action} needs {first}{either}"
        elif first.stage == action.stage and places[first] > places[action]:  # of one stage, so of one worker
            yield f"{action} needs {first}, which worker {places[first][0]} runs after it"


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
    """See NOTE [ An order on a clock ]."""

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
