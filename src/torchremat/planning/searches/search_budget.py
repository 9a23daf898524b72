"""How long a search may go on, a minute for a plan or a frontier whatever the model is, and how far it is.

The options that a planner looks for when it is made count in the minute of its first plan or frontier.

A search that has used up its time ends with the best that it has found by then. Each part looks at the clock where it
begins something long, and leaves the rest out: options of further units, rows of the tables, further candidates.
"""

from __future__ import annotations

import math
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from torchremat.planning.searches.progress import Observer, Phase, Progress

MOST_S = 60.0

# What people are told of a result for which it did not suffice.
TIME_IS_OVER = f"the search ended at its cap of {MOST_S:.0f} s with the best found by then; there may be better."

T = TypeVar("T")


class SearchBudget:
    """The time that a search has left, without end unless one is under way, and the share of it that is done.

    Args:
        most_s: How long the outermost search may go on.
        observer: Called with how far the search is. What it raises ends the search.

    Attributes:
        ran_out: Whether anything was left out because its time was over.
    """

    def __init__(self, most_s: float = MOST_S, *, observer: Observer | None = None) -> None:
        self.most_s = most_s
        self.ran_out = False
        self._observer = observer
        self._ends_s = math.inf
        self._before_s = 0.0  # what the minute to come has lost to a part of it that ran ahead
        self._span = (0.0, 1.0)
        self._told = 0.0
        self._slowdown: float | None = None

    @contextmanager
    def running(self, share: float = 1.0) -> Generator[None]:
        """Let a search run, or a part of one that may take a share of the time that is left.

        A part that runs with no search around it is one of the search that comes next.
        """
        outer, start_s = (self._ends_s, self._span), time.perf_counter()
        is_outermost = math.isinf(self._ends_s)
        if is_outermost:
            self._span, self._told, self._slowdown = (0.0, 1.0), 0.0, None
        self._ends_s = start_s + share * min(self.most_s - self._before_s, self.left_s)
        try:
            yield
        finally:
            self.ran_out = self.ran_out or self.is_over
            self._ends_s, self._span = outer
            if is_outermost:
                self._before_s = time.perf_counter() - start_s if share < 1 else 0.0

    @property
    def left_s(self) -> float:
        """Seconds left."""
        return max(0.0, self._ends_s - time.perf_counter())

    @property
    def is_over(self) -> bool:
        """Whether no time is left."""
        return not self.left_s

    @contextmanager
    def part(self, begins: float, ends: float) -> Generator[None]:
        """Let what is done be a part of what is under way, between two shares of it; it may have parts itself."""
        low, high = outer = self._span
        self._span = low + begins * (high - low), low + ends * (high - low)
        try:
            yield
        finally:
            self._span = outer

    def parts(self, items: Sequence[T]) -> Generator[T]:
        """Yield the items; what is done with each is an equal part of what is under way."""
        for place, item in enumerate(items):
            with self.part(place / len(items), (place + 1) / len(items)):
                yield item

    def tell(self, phase: Phase, share: float | None = 0.0) -> None:
        """Tell the observer what is under way, and the share of it that is done; None if nobody knows."""
        if self._observer is None:
            return
        if share is not None:
            low, high = self._span
            # What is come to early, and what grows while it is worked on, takes nothing back.
            share = self._told = max(self._told, low + share * (high - low))
        self._observer(Progress(phase=phase, share=share, slowdown=self._slowdown))

    def found(self, slowdown: float | None) -> None:
        """Note the best plan found so far, for what is told from now on; None where another is begun."""
        self._slowdown = slowdown
