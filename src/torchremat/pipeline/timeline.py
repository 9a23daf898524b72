"""`Timeline`: the events of each pipeline stage in a step, their times, the idle shares, and a prediction."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from itertools import chain
from pathlib import Path
from statistics import median

from torchremat.errors import ScheduleError
from torchremat.json_data import JsonForm, JsonReader, data_of, fields_of
from torchremat.pipeline.events import EventPiece, PipelineEvent, busy_s, pieces
from torchremat.pipeline.gantt import draw
from torchremat.schedules.pipelines import COMPUTES, KINDS, Costs, Kind, Order, simulate

_COLUMNS: dict[str, tuple[Kind, ...]] = {
    "forward": ("forward",),
    "recompute": ("recompute",),
    "backward": ("backward", "input", "weight"),
    "copies": ("copy",),
}


def _rows(events: tuple[PipelineEvent, ...]) -> object:
    """Return events as lists of their fields' values."""
    return [[*fields_of(event).values()] for event in events]


def _events(reader: JsonReader, value: object, where: str) -> tuple[PipelineEvent, ...]:
    names = [one.name for one in fields(PipelineEvent)]
    rows = [([item for item, _ in reader.items(row, place)], place) for row, place in reader.items(value, where)]
    return tuple(reader.read(dict(zip(names, row, strict=True)), PipelineEvent, place) for row, place in rows)


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """The events of one step of a pipeline.

    Attributes:
        events: The events; their seconds count from any point in time before the first of them.
        stages: The number of stages.
        workers: The stages of each worker. A stage that shares its worker is idle when the worker is. Empty if each
            stage has its own worker.
        predicted: The prediction of the same step.

    Raises:
        ScheduleError: An event belongs to no existing stage, or the workers do not have each stage once.
    """

    events: tuple[PipelineEvent, ...] = field(metadata={"json": JsonForm(_rows, _events)})
    stages: int
    workers: tuple[tuple[int, ...], ...] = ()
    predicted: Timeline | None = None

    def __post_init__(self) -> None:
        problems = [
            f"{event} is of stage {event.stage}, the last is {self.stages - 1}"
            for event in self.events
            if event.stage >= self.stages
        ]
        if self.workers and sorted(chain(*self.workers)) != list(range(self.stages)):
            problems.append(f"the workers have the stages {self.workers}, expected each of the {self.stages} once")
        if self.predicted is not None and self.predicted.stages != self.stages:
            problems.append(f"{self.stages} stages were measured, {self.predicted.stages} predicted")
        if problems:
            raise ScheduleError(f"these events are not a timeline: {'; '.join(problems)}")

    @property
    def start_s(self) -> float:
        """The start of the first event."""
        return min((event.start_s for event in self.events), default=0.0)

    @property
    def step_s(self) -> float:
        """From the start of the first event to the end of the last."""
        return max((event.end_s for event in self.events), default=0.0) - self.start_s

    def events_of(self, stage: int) -> tuple[PipelineEvent, ...]:
        """Return the events of one stage in the order in which they started."""
        return tuple(sorted((event for event in self.events if event.stage == stage), key=lambda one: one.start_s))

    def seconds(self, stage: int) -> dict[Kind, float]:
        """Return the seconds of each kind of event on a stage. See NOTE [ Whose time it is ]."""
        seconds_of: dict[Kind, float] = dict.fromkeys(KINDS, 0.0)
        for piece in self.pieces_of(stage):
            seconds_of[piece.event.kind] += piece.seconds
        return seconds_of

    def pieces_of(self, stage: int) -> list[EventPiece]:
        """Return the time that belongs to the events of a stage. See NOTE [ Whose time it is ].

        A worker does one thing at a time, so the events of its other stages are cut out as well.
        """
        group = next(group for group in self.groups if stage in group)
        whole = pieces(event for one in group for event in self.events_of(one))
        return [piece for piece in whole if piece.event.stage == stage]

    def busy_s(self, stage: int) -> float:
        """Return how long a stage computed or copied, with overlaps counted once."""
        return busy_s(self.events_of(stage))

    @property
    def idle_share(self) -> tuple[float, ...]:
        """For each stage, the share of the step in which its worker neither computes nor copies; a wait is idle."""
        shares = [0.0] * self.stages
        for group in self.groups:
            busy = busy_s(event for stage in group for event in self.events_of(stage))
            for stage in group:
                shares[stage] = 1 - busy / self.step_s if self.step_s else 0.0
        return tuple(shares)

    def order(self, stage: int | None = None, *, kinds: Iterable[Kind] = COMPUTES) -> str:
        """Return the events as one line, by their start: "F0.0 F0.1 R0.1 B0.1" is all of stage 0.

        Args:
            stage: Only of this stage. Events of several stages are ordered only if one waits for another.
            kinds: Which ones; the letters of the others are C for a copy and _ for a wait.
        """
        wanted = frozenset(kinds)
        events = sorted(self.events, key=lambda one: one.start_s) if stage is None else self.events_of(stage)
        return " ".join(str(event) for event in events if event.kind in wanted)

    def plot(self, path: str | Path) -> None:
        """Draw the stages over time into an image file, with the prediction below; its ending gives the format.

        Raises:
            UnsupportedError: matplotlib is not installed, or does not know the format.
        """
        draw({"": self}, path)

    def to_json(self) -> str:
        """Return the timeline as text, which one process can send to another."""
        return json.dumps(data_of(self))

    @staticmethod
    def from_json(text: str) -> Timeline:
        """Return the timeline that `to_json` wrote.

        Raises:
            ScheduleError: The text is not a timeline.
        """
        try:
            return JsonReader("a timeline", is_complete=True).read(json.loads(text), Timeline, "timeline")
        except (ValueError, RecursionError) as error:
            raise ScheduleError(f"this text is not a timeline: {type(error).__name__}: {error}") from error

    def __str__(self) -> str:
        foretold = self.predicted
        note = "" if foretold is None else f", {_ms(foretold.step_s)} ms predicted; predictions are in brackets"
        width = 14 if foretold is None else 20
        rows = [f"step  {_ms(self.step_s)} ms{note}"]
        rows.append(f"{'stage':>5}" + "".join(f"{name + ' ms':>{width}}" for name in _COLUMNS) + f"{'idle':>{width}}")
        shares = self.idle_share
        other_shares = () if foretold is None else foretold.idle_share
        for stage in range(self.stages):
            seconds = self.seconds(stage)
            others = None if foretold is None else foretold.seconds(stage)
            cells = [
                _cell(_ms(_sum(seconds, kinds)), None if others is None else _ms(_sum(others, kinds)))
                for kinds in _COLUMNS.values()
            ]
            cells.append(_cell(f"{shares[stage]:.1%}", f"{other_shares[stage]:.1%}" if other_shares else None))
            rows.append(f"{stage:>5}" + "".join(f"{cell:>{width}}" for cell in cells))
        return "\n".join(rows)

    @property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """The stages of each worker."""
        return self.workers or tuple((stage,) for stage in range(self.stages))


def timeline_of(events: tuple[PipelineEvent, ...], order: Order) -> Timeline:
    """Return events as a timeline with the stages and the workers of an order."""
    workers = tuple(tuple(sorted({action.stage for action in actions})) for actions in order)
    stages = sum(map(len, workers))
    alone = workers == tuple((stage,) for stage in range(stages))
    return Timeline(events=events, stages=stages, workers=() if alone else workers)


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f}"


def _sum(seconds: Mapping[Kind, float], kinds: Iterable[Kind]) -> float:
    return sum(seconds[kind] for kind in kinds)


def _cell(own: str, other: str | None) -> str:
    return own if other is None else f"{own} ({other})"


def costs_of(timeline: Timeline) -> dict[tuple[int, Kind], float]:
    """Return the median seconds of each kind of event of each stage, including copies and excluding waits.

    The time of an event inside another event counts for the inner one. See NOTE [ Whose time it is ].
    """
    seconds_of: dict[tuple[int, Kind], list[float]] = {}
    for stage in range(timeline.stages):
        events = timeline.events_of(stage)
        own_s = dict.fromkeys(map(id, events), 0.0)
        for piece in timeline.pieces_of(stage):
            own_s[id(piece.event)] += piece.seconds
        for event in events:
            if event.kind != "wait":
                seconds_of.setdefault((stage, event.kind), []).append(own_s[id(event)])
    return {key: median(seconds) for key, seconds in seconds_of.items()}


def predict(timeline: Timeline, order: Order, *, lookahead: bool = False, costs: Costs | None = None) -> Timeline:
    """Return the step of an order with the times of a measured step.

    >>> from torchremat.schedules.pipelines import Action
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
