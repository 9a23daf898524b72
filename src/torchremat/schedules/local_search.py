"""Local search over splits of a joint list, one value at a time: more recompute for a lower peak, or less with room.

Each change is tried by splitting the list, so its effect on the peak is exact. Values are tried in the order of their
operator's cost per byte made.

Missing on purpose: changes of two values at once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from torchremat.schedules.joint import Joint, Split, is_possible, split

_MOST_RAISED = 60
# Values that are tried before one is chosen, and the most that are tried in all.
_MOST_AT_ONCE = 30
_MOST_LOWERED = 150


def raised(joint: Joint, best: Split, limit_bytes: int) -> Split:
    """Save more while the peak is at most `limit_bytes`: the values with the highest recompute cost per byte first."""
    readable = {value for operator in joint.operators for value in operator.inputs}
    again = (index for index in set(best.forward) & set(best.backward) if joint.operators[index].cost > 0)
    for index in _by_worth(joint, again)[::-1][:_MOST_RAISED]:
        if index not in best.backward:
            continue
        wanted = readable.intersection(joint.operators[index].outputs)
        found = split(joint, {*best.saved, *wanted})
        if found.peak_bytes <= limit_bytes and found.cost < best.cost:
            best = found
    return best


def lowered(joint: Joint, high: Split, limit_bytes: int, *, below_cost: float) -> Split | None:
    """Save less until the peak is at most `limit_bytes`: each time drop the value that lowers it most for its cost.

    Returns:
        None if the peak does not get there, or not at a cost below `below_cost`.
    """
    tried = 0
    while high.peak_bytes > limit_bytes:
        steps: list[tuple[float, Split]] = []
        makers = {joint.maker[value] for value in high.saved if joint.size_bytes[value]}
        for index in _by_worth(joint, makers)[:_MOST_AT_ONCE]:
            found = split(joint, high.saved.difference(joint.operators[index].outputs))
            tried += 1
            if is_possible(found) and found.peak_bytes < high.peak_bytes and found.cost < below_cost:
                less = high.peak_bytes - max(found.peak_bytes, limit_bytes)
                steps.append((less / max(found.cost - high.cost, 1e-300), found))
        if not steps or tried > _MOST_LOWERED:
            return None
        _, high = max(steps, key=lambda step: step[0])
    return high


def _by_worth(joint: Joint, indices: Iterable[int]) -> list[int]:
    """Operators by cost per byte made, without the ones that must not run again."""
    operators, sizes = joint.operators, joint.size_bytes
    found = [index for index in indices if math.isfinite(operators[index].cost)]
    return sorted(
        found, key=lambda index: operators[index].cost / max(1, sum(sizes[one] for one in operators[index].outputs))
    )
