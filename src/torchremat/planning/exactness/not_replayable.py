"""The message about modules whose recompute would not repeat their forward. See `replayability`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

# Number of modules named, and of reasons; `Plan.unlike` has all.
_MOST_TOLD = 3


def told(unlike: Mapping[str, str]) -> str:
    """Return the message about modules whose recompute would not repeat their forward."""
    by_reason: dict[str, list[str]] = {}
    for name, why in unlike.items():
        by_reason.setdefault(why, []).append(f"`{name}`" if name else "the model itself")
    reasons = [f"{shortened(names)}: {why}" for why, names in by_reason.items()]
    more = f"; and {len(reasons) - _MOST_TOLD} more reasons, see `plan.unlike`" if len(reasons) > _MOST_TOLD else ""
    return (
        f"modules of the model ({len(unlike)}) would not do in a recompute what they do in their forward. They are not "
        f"recomputed as a whole: what they call may be, the rest is kept. {'; '.join(reasons[:_MOST_TOLD])}{more}. "
        "Pass what they read as an argument, and more can be recomputed."
    )


def shortened(names: Sequence[str]) -> str:
    """Return the first of some names, and the number of the others."""
    more = f" and {len(names) - _MOST_TOLD} more" if len(names) > _MOST_TOLD else ""
    return f"{', '.join(names[:_MOST_TOLD])}{more}"
