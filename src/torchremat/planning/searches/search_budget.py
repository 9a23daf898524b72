"""The time limit of a search, a minute for a plan or a frontier whatever the model is, and its progress.

The options that a planner looks for when it is made count in the minute of its first plan or frontier.

A search that has used up its time ends with the best result found by then. Each part checks the clock before it begins
something long, and skips the rest: options of further units, rows of the tables, further candidates.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, TypeAlias, TypeVar

from torchremat.errors import UnsupportedError

Phase = Literal["profiling", "options", "tables", "judging", "polishing", "certificate", "verifying"]


@dataclass(frozen=True, kw_only=True)
class Progress:
    """The progress of planning: the argument of the function passed as `progress` to `plan`, `verify` and others.

    Attributes:
        phase: The current phase: `"profiling"`, which runs the step; `"options"`, which parts of each unit can be kept;
            `"tables"`, `"judging"` and `"polishing"` of plans, which repeat for each way of splitting units and for
            each budget of a frontier; `"certificate"`, if asked for, which runs the step once more; `"verifying"`,
            which runs the step with the regions and without.
        share: The share of the options, of the search for plans, or of the steps of `verify` that is done: from 0 to
            1, and never less than before. A search that runs out of time ends sooner. None if unknown, which is while
            the step runs.
        slowdown: Predicted seconds of a step over a plain step's, under the best plan found so far for the
            current budget; None before the first one.
    """

    phase: Phase
    share: float | None
    slowdown: float | None


Observer: TypeAlias = Callable[[Progress], None]


def checked(observer: Observer | Literal[False] | None) -> Observer | None:
    """Return the observer given as `progress`; None if progress is not reported.

    Raises:
        UnsupportedError: It is no function.
    """
    if observer is False:
        return None
    if observer is not None and not callable(observer):  # pyright: ignore[reportUnnecessaryComparison]: users are not type-checked
        raise UnsupportedError(
            f"progress={observer!r}: expected a function that takes a Progress, or False for none. By default a "
            "terminal shows a bar after two seconds, if rich is installed: pip install 'torchremat[cli]'."
        )
    return observer


MOST_S = 60.0

# How many units of trees are judged in addition to the trees that the search for a limit visits: fewer trees with many
# units, since each judgement takes longer then.
JUDGED_UNITS = 4000

# Message for a result whose search ran out of time.
TIME_IS_OVER = f"the search ended at its cap of {MOST_S:.0f} s with the best found by then; there may be better."

T = TypeVar("T")


class SearchBudget:
    """The time that a search has left, unlimited unless a search is running, and the share of it that is done.

    Args:
        most_s: Time limit of the outermost search.
        observer: Called with the progress of the search. An exception that it raises ends the search.

    Attributes:
        ran_out: Whether anything was skipped because time ran out.
    """

    def __init__(self, most_s: float = MOST_S, *, observer: Observer | None = None) -> None:
        self.most_s = most_s
        self.ran_out = False
        self._observer = observer
        self._ends_s = math.inf
        self._before_s = 0.0  # seconds of the next minute spent by a part that ran ahead
        self._span = (0.0, 1.0)
        self._told = 0.0
        self._slowdown: float | None = None

    @contextmanager
    def running(self, share: float = 1.0) -> Generator[None]:
        """Run a search, or a part of one that may take a share of the remaining time.

        A part without a search around it counts as a part of the next search.
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
        """Count the block as a part of the running work, between two shares of it; the block may have parts itself."""
        low, high = outer = self._span
        self._span = low + begins * (high - low), low + ends * (high - low)
        try:
            yield
        finally:
            self._span = outer

    def parts(self, items: Sequence[T]) -> Generator[T]:
        """Yield the items; the work on each counts as an equal part of the running work."""
        for place, item in enumerate(items):
            with self.part(place / len(items), (place + 1) / len(items)):
                yield item

    def tell(self, phase: Phase, share: float | None = 0.0) -> None:
        """Tell the observer the current phase, and the share of it that is done; None if unknown."""
        if self._observer is None:
            return
        if share is not None:
            low, high = self._span
            # The share never decreases, even if a part is reached early or grows while it runs.
            share = self._told = max(self._told, low + share * (high - low))
        self._observer(Progress(phase=phase, share=share, slowdown=self._slowdown))

    def found(self, slowdown: float | None) -> None:
        """Record the best plan found so far, for later reports; None when a search for another begins."""
        self._slowdown = slowdown
