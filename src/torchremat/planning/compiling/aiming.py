"""A split whose programs fit: what a compiler makes of the two graphs is held to the limit, not their operators.

`Saver` knows operators. Of kernels it knows only the plainest, so what it takes for a peak is off by some percent,
either way. The programs of a split tell its peak; by how much that is off moves the next target. Two targets, one
that fits and one that does not, close in on the limit.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from torchremat.planning.compiling.halves import Halves
from torchremat.schedules.joint import Split
from torchremat.schedules.saving import Saver

# Each has a compiler write two programs, which takes some seconds for a thousand operators.
_MOST_TRIES = 5
# No try is begun after this.
_CAP_S = 60.0
# Of what a step takes beside parameters and inputs: as close to the limit as it is worth to come.
_CLOSE = 0.02


def aimed(saver: Saver, limit_bytes: int, make: Callable[[Split], Halves]) -> Halves:
    """Return the split of least cost that is found whose programs fit; if none does, the lowest.

    Those of the plain split are known not to.

    Args:
        saver: Finds splits for a target.
        limit_bytes: What the programs may need.
        make: Makes the two graphs of a split, and has a compiler write their programs.
    """
    made: dict[frozenset[int], Halves] = {}

    def tried(split: Split) -> Halves:
        if split.saved not in made:
            made[split.saved] = make(split)
        return made[split.saved]

    close = _CLOSE * (limit_bytes - saver.joint.fixed_bytes)
    fits, breaks = saver.joint.fixed_bytes, saver.plain.peak_bytes
    target = min(limit_bytes, breaks - 1)
    until_s = time.monotonic() + _CAP_S
    while fits < target < breaks and len(made) < _MOST_TRIES and time.monotonic() < until_s:
        split = saver.solve(target)
        if is_lowest := split is None:
            split, target = saver.floor, saver.floor.peak_bytes
        room = limit_bytes - tried(split).peak_bytes
        fits, breaks = (target, breaks) if room >= 0 else (fits, target)
        if 0 <= room < close or split.cost == 0.0 <= room or (is_lowest and room < 0) or breaks - fits <= close:
            break
        target += room
        if not fits < target < breaks:
            target = (fits + breaks) // 2
    fitting = [one for one in made.values() if one.peak_bytes <= limit_bytes]
    return min(fitting, key=lambda one: (one.split.cost, one.peak_bytes)) if fitting else tried(saver.floor)
