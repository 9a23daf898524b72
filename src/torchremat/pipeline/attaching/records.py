"""What ran when, as a list."""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

Kind = Literal["forward", "recompute", "backward", "input", "weight", "wait"]


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something that a stage did with a microbatch. "input" and "weight" are the parts of a backward that is split."""

    stage: int
    microbatch: int
    kind: Kind
    start_s: float
    end_s: float


class Record:
    """The events of the steps since it was cleared; none if it is off.

    Args:
        is_on: Whether events are recorded.
    """

    def __init__(self, *, is_on: bool) -> None:
        self.is_on = is_on
        self.events: list[Event] = []

    def add(self, stage: int, microbatch: int, kind: Kind, start_s: float) -> None:
        """Record what began at `start_s` and ends now. Events of a recompute lie in those of a backward, or before."""
        if self.is_on:
            end_s = time.perf_counter()
            self.events.append(Event(stage=stage, microbatch=microbatch, kind=kind, start_s=start_s, end_s=end_s))

    @contextmanager
    def during(self, stage: int, microbatch: int, kind: Kind) -> Generator[None]:
        """Record what the block does, also if it raises."""
        start_s = time.perf_counter()
        try:
            yield
        finally:
            self.add(stage, microbatch, kind, start_s)
