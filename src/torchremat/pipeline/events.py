"""Events of a pipeline's step, and the owner of the time when several overlap."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import pairwise

from torchremat.errors import ScheduleError
from torchremat.schedules.pipelines import KINDS, LETTERS, Kind

# NOTE [ Whose time it is ]
#
# One worker records events that overlap: a backward waits for a tensor, and recomputes another while it does.
#
#   1. Of computations and waits, the one that began last owns the time until it ends; then the one around it
#      continues. So a recompute inside a backward is not counted as backward too, and a wait inside it is idle.
#   2. Copies run in parallel, and take no time from them.
#   3. A stage is busy while a computation owns the time or a copy runs, and idle otherwise.


@dataclass(frozen=True, kw_only=True)
class PipelineEvent:
    """An action of a stage on a microbatch.

    Attributes:
        stage: From 0.
        microbatch: From 0.
        kind: "input" and "weight" are the two passes of a split backward; a "copy" brings data to this stage; a "wait"
            is idle time with a known reason.
        start_s: Seconds; the timeline defines their origin.
        end_s: On the same clock.

    Raises:
        ScheduleError: It ends before it starts, or is otherwise invalid.
    """

    stage: int
    microbatch: int
    kind: Kind
    start_s: float
    end_s: float

    def __post_init__(self) -> None:
        problems: list[str] = []
        if self.kind not in LETTERS:
            problems.append(f"its kind is not one of {', '.join(KINDS)}")
        if self.stage < 0 or self.microbatch < 0:
            problems.append("a stage and a microbatch are at least 0")
        if not (math.isfinite(self.start_s) and math.isfinite(self.end_s) and self.start_s <= self.end_s):
            problems.append("it has to start before it ends")
        if problems:
            raise ScheduleError(
                f"{self.kind} of stage {self.stage}, microbatch {self.microbatch}, from {self.start_s} s to "
                f"{self.end_s} s is not an event: {'; '.join(problems)}"
            )

    def __str__(self) -> str:
        return f"{LETTERS[self.kind]}{self.stage}.{self.microbatch}"


@dataclass(frozen=True, kw_only=True)
class EventPiece:
    """A time span that belongs to one event."""

    event: PipelineEvent
    start_s: float
    end_s: float

    @property
    def seconds(self) -> float:
        """Its duration."""
        return self.end_s - self.start_s


def pieces(events: Iterable[PipelineEvent]) -> list[EventPiece]:
    """Return the events cut where a later one owns the time. See NOTE [ Whose time it is ]."""
    every = list(events)
    copies = [EventPiece(event=one, start_s=one.start_s, end_s=one.end_s) for one in every if one.kind == "copy"]
    return copies + _cut([one for one in every if one.kind != "copy"])


def busy_s(events: Iterable[PipelineEvent]) -> float:
    """Return the time in which a computation or a copy runs. See NOTE [ Whose time it is ]."""
    total_s, reached_s = 0.0, -math.inf
    for piece in sorted((one for one in pieces(events) if one.event.kind != "wait"), key=lambda one: one.start_s):
        total_s += max(0.0, piece.end_s - max(piece.start_s, reached_s))
        reached_s = max(reached_s, piece.end_s)
    return total_s


def _cut(events: Sequence[PipelineEvent]) -> list[EventPiece]:
    """Return each span between starts or ends as a piece of the event that began last; successive ones are joined."""
    order = sorted(range(len(events)), key=lambda index: (events[index].start_s, index))
    times = sorted({moment for event in events for moment in (event.start_s, event.end_s)})
    open_events: list[tuple[int, PipelineEvent]] = []  # the one that began last comes first
    found: list[EventPiece] = []
    begun = 0
    for start_s, end_s in pairwise(times):
        while begun < len(order) and events[order[begun]].start_s <= start_s:
            heappush(open_events, (-begun, events[order[begun]]))
            begun += 1
        while open_events and open_events[0][1].end_s <= start_s:
            heappop(open_events)
        if not open_events:
            continue
        event = open_events[0][1]
        if found and found[-1].event is event and found[-1].end_s == start_s:
            found[-1] = EventPiece(event=event, start_s=found[-1].start_s, end_s=end_s)
        else:
            found.append(EventPiece(event=event, start_s=start_s, end_s=end_s))
    return found
