"""The progress of a search, for the waiting caller."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

from torchremat.errors import UnsupportedError

Phase = Literal["profiling", "options", "tables", "judging", "polishing", "certificate", "verifying"]


@dataclass(frozen=True, kw_only=True)
class Progress:
    """The progress of planning: the argument of the function passed as `progress` to `plan`, `verify` and others.

    Attributes:
        phase: The current phase: `"profiling"`, which runs the step; `"options"`, which parts of each unit can be kept;
            `"tables"`, `"judging"` and `"polishing"` of plans, which repeat for each way of splitting units and for
            each budget of a frontier; `"certificate"`, for which the step is run once more; `"verifying"`,
            which runs the step with the regions and without.
        share: The share of the options, of the search for plans, or of the steps of `verify` that is done: from 0 to
            1, and never less than before. A search that runs out of time ends sooner. None if unknown, which is while
            the step runs.
        slowdown: Predicted seconds of a step over those of a plain one, under the best plan found so far for the
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
