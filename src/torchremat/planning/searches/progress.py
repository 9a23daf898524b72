"""How far a search is, for whoever waits for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

from torchremat.errors import UnsupportedError

Phase = Literal["profiling", "options", "tables", "judging", "polishing", "certificate", "verifying"]


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far planning is; what the function is given that is passed as `progress` to `plan`, `verify` and others.

    Attributes:
        phase: What is under way: `"profiling"`, which runs the step; `"options"`, what of each unit can be kept;
            `"tables"`, `"judging"` and `"polishing"` of plans, which come again for each way of taking units apart and
            for each budget of a frontier; `"certificate"`, for which the step is run once more; `"verifying"`, which
            runs the step with the regions and without.
        share: How much of the options, of the search for plans, or of the steps of `verify` is done: from 0 to 1, and
            never less than before.
            A search whose time is over ends sooner. None where nobody knows, which is where the step is run.
        slowdown: Predicted seconds of a step over those of a plain one, under the best plan found so far for the budget
            under way; None before there is one.
    """

    phase: Phase
    share: float | None
    slowdown: float | None


Observer: TypeAlias = Callable[[Progress], None]


def checked(observer: Observer | Literal[False] | None) -> Observer | None:
    """Return what was given as `progress`; None if nobody is to be told.

    Raises:
        UnsupportedError: It is no function.
    """
    if observer is False:
        return None
    if observer is not None and not callable(observer):  # pyright: ignore[reportUnnecessaryComparison]: users are not type-checked
        raise UnsupportedError(
            f"progress={observer!r}: a function is needed that takes a Progress, or False for nobody. A bar is there "
            "by itself in a terminal, beyond two seconds, if rich is installed: pip install 'torchremat[cli]'."
        )
    return observer
