"""A split whose programs fit: what a compiler makes of the two graphs is held to the limit, not their operators.

`Saver` knows operators. Of kernels it knows only the plainest, and of copies to other layouts nothing, so what it takes
for a peak is off, either way. The programs of a split tell what is there while each operator runs; told that, `Saver`
is right about this split and better about those near it. A few rounds of that come close to the limit.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping

from torchremat.planning.compiling.halves import Halves
from torchremat.schedules.joint import Split, split
from torchremat.schedules.saving import Saver

# Each has a compiler write two programs, which takes some seconds for a thousand operators.
_MOST_TRIES = 5
_MOST_LOWEST = 3
# No try is begun after this.
_CAP_S = 60.0
# Of what is made again: another try is not worth less.
_WORTH = 0.02
# Of what a step takes beside parameters and inputs: what is above the limit by less may fit all the same.
_NEAR = 0.03


def aimed(saver: Saver, limit_bytes: int, plain: Halves, make: Callable[[Split], Halves]) -> Halves:
    """Return the split of least cost that is found whose programs fit; if none does, the lowest.

    Args:
        saver: Finds splits.
        limit_bytes: What the programs may need.
        plain: The split where nothing runs twice; it is known not to fit.
        make: Makes the two graphs of a split, and has a compiler write their programs.
    """
    made = {plain.split.saved: plain}

    def tried(found: Split) -> Halves:
        if found.saved not in made:
            made[found.saved] = make(found)
        return made[found.saved]

    best: Halves | None = None
    last = plain
    until_s = time.monotonic() + _CAP_S
    while len(made) <= _MOST_TRIES and time.monotonic() < until_s:
        saver = saver.told(last.beside)
        # What of the last peak its operators do not explain.
        off = last.peak_bytes - split(saver.joint, last.split.saved).peak_bytes
        below = best.split.cost * (1 - _WORTH) if best else math.inf
        found = next((one for one in _candidates(saver, limit_bytes - off, made, below) if one.saved not in made), None)
        if found is None:
            break
        last = tried(found)
        if last.peak_bytes <= limit_bytes:
            best = last
    return best or _lowest(saver, limit_bytes, plain, tried)


def _candidates(
    saver: Saver, target_bytes: int, made: Mapping[frozenset[int], Halves], below: float
) -> Iterator[Split]:
    """Yield splits that cost less than something and may fit: first the one that should."""
    found = saver.solve(target_bytes)
    known = made.get(found.saved) if found is not None else None
    if known is not None and known.peak_bytes > target_bytes:
        found = saver.solve(2 * target_bytes - known.peak_bytes)
    if found is not None and found.cost < below:
        yield found
    near = target_bytes + _NEAR * (target_bytes - saver.joint.fixed_bytes)
    yield from (one for one in saver.nearly(target_bytes, below_cost=below) if one.peak_bytes < near)


def _lowest(saver: Saver, limit_bytes: int, plain: Halves, tried: Callable[[Split], Halves]) -> Halves:
    """Return the split whose programs need least of those that are found, or the first of them that fits.

    These do not depend on the limit, so that the smallest budget that works does, once it is asked for.
    """
    last = lowest = plain
    for _ in range(_MOST_LOWEST):
        last = tried(saver.told(last.beside).floor)
        if last.peak_bytes >= lowest.peak_bytes:
            break
        lowest = last
        if lowest.peak_bytes <= limit_bytes:
            break
    return lowest
