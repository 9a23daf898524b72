"""The message about modules that cannot be recomputed as a whole. See `replayability`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

# Number of modules named, and of reasons; `Plan.unlike` has all.
_MOST_TOLD = 3

# The reason of a module that is recomputed more than once in a step, or would be kept for longer than its backward.
RETAINED = (
    "its graph is retained for more than one backward, as for a gradient that a hook or a backward computes with "
    "`torch.autograd.grad`, and each of them would recompute it"
)

# The reason of a module that exchanges tensors with other processes, which would not do that in the same order.
UNEQUAL = "it communicates, and the processes run other operators in it, so that their recomputes would not meet"

# The reason of a module that takes the gradient of a tensor among its inputs, as one that makes forces of an energy.
GIVEN = "it takes the gradient of what it is given, and a recompute has no graph of that"

# What a module would do, by the reason; for any other one it would not repeat its forward.
_WOULD = {
    RETAINED: "be recomputed several times",
    UNEQUAL: "wait for other processes in vain",
    GIVEN: "find no graph of what they are given",
}


def told(unlike: Mapping[str, str]) -> str:
    """Return the message about modules that cannot be recomputed as a whole, with the reason of each."""
    by_reason: dict[str, list[str]] = {}
    for name, why in unlike.items():
        by_reason.setdefault(why, []).append(f"`{name}`" if name else "the model itself")
    reasons = [f"{shortened(names)}: {why}" for why, names in by_reason.items()]
    more = f"; and {len(reasons) - _MOST_TOLD} more reasons, see `plan.unlike`" if len(reasons) > _MOST_TOLD else ""
    differ = by_reason.keys() - _WOULD.keys()
    would = ["not do in a recompute what they do in their forward"] if differ else []
    would += [what for why, what in _WOULD.items() if why in by_reason]
    advice = " Pass what they read as an argument, and more can be recomputed." if differ else ""
    return (
        f"modules of the model ({len(unlike)}) would {', or '.join(would)}. They are not recomputed as a whole: what "
        f"they call may be, the rest is kept. {'; '.join(reasons[:_MOST_TOLD])}{more}.{advice}"
    )


def shortened(names: Sequence[str]) -> str:
    """Return the first of some names, and the number of the others."""
    more = f" and {len(names) - _MOST_TOLD} more" if len(names) > _MOST_TOLD else ""
    return f"{', '.join(names[:_MOST_TOLD])}{more}"
