"""Orders of pipelines as data: the sequence of actions of each worker, by stage and microbatch.

A stage is a part of the model, a microbatch a part of the batch, and a worker runs one stage, or several where they
are interleaved. The text of an action is a letter, its stage, and its microbatch:

- `F0.1`: the forward of microbatch 1 through stage 0.
- `R0.1`: that forward again, to recompute the tensors that backward needs.
- `B0.1`: the backward, of inputs and weights together.
- `I0.1`, `W0.1`: the two passes of a split backward, first for inputs, then for weights.
- `C0.1`: a copy of an activation or a gradient to stage 0.
- `_0.1`: a wait.

Copies and waits result from an order, as `schedules.simulation` finds; an order itself has neither.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
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

    A circular wait between its workers shows only when it runs, in `simulation.simulate`.

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
