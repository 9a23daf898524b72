"""The cheapest trees for the stages of one device: an integer program with a row for each load.

    minimise    sum of the costs of the chosen trees
    such that   each stage has one tree
                at each load, the bytes that all stages add are at most the limit

Loads that are below another load for each stage and tree are left out, so most devices have only a row or two.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from torchremat.errors import bug
from torchremat.planning.searches.microbatches import Share
from torchremat.schedules.linear_programs import Rows, minimize
from torchremat.stages.loads import DeviceLoad

# The solver works in floats, with a tolerance. So bytes are counted in this many parts, rounded up.
_PARTS = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """A tree for each stage of a device.

    Attributes:
        shares: By stage.
        peak_bytes: Of the device, above the bytes that are there under any plan.
        highest: The load with that peak.
    """

    shares: Mapping[int, Share]
    peak_bytes: int
    highest: DeviceLoad


class Choices:
    """The choices for a device.

    Of each stage, the first tree keeps everything.
    """

    def __init__(self, shares: Mapping[int, Sequence[Share]], loads: Sequence[DeviceLoad]) -> None:
        self._shares = shares
        self._loads = loads

    @cached_property
    def plain(self) -> Chosen:
        """The choice that keeps everything."""
        return self._choose(dict.fromkeys(self._shares, 0))

    @cached_property
    def floor(self) -> Chosen:
        """The choice with the lowest peak."""
        return self._solve(None)

    def cheapest(self, limit_bytes: int) -> Chosen | None:
        """Return the cheapest choice with a peak of at most the limit; None if none exists."""
        if self.plain.peak_bytes <= limit_bytes:
            return self.plain
        if self.floor.peak_bytes > limit_bytes:
            return None
        found = self._solve(limit_bytes)
        return found if found.peak_bytes <= limit_bytes else self.floor

    @cached_property
    def _part_bytes(self) -> int:
        return max(1, self.plain.peak_bytes // _PARTS)

    @cached_property
    def _rows(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """The bytes that each tree of each stage adds at each load, and the other bytes; in parts, rounded up."""
        rows = np.array(
            [
                [load.bytes_of(stage, one) for stage, found in self._shares.items() for one in found]
                for load in self._loads
            ],
            dtype=np.float64,
        )
        fixed = np.array([load.other_bytes for load in self._loads], dtype=np.float64)
        above = [place for place in range(len(rows)) if not _is_below_another(rows, fixed, place)]
        return np.ceil(rows[above] / self._part_bytes), np.ceil(fixed[above] / self._part_bytes)

    def _solve(self, limit_bytes: int | None) -> Chosen:
        """Return the cheapest choice within a limit; without a limit, the choice with the lowest peak."""
        rows, fixed = self._rows
        counts = [len(found) for found in self._shares.values()]
        total = sum(counts)
        one_each = np.zeros((len(counts), total + 1))
        for stage, (count, end) in enumerate(zip(counts, np.cumsum(counts).tolist(), strict=True)):
            one_each[stage, end - count : end] = 1
        # The last variable is the peak: minimised if no limit is given, else fixed at the limit.
        below = np.hstack([rows, -np.ones((len(rows), 1))])
        costs = np.array([one.cost for found in self._shares.values() for one in found])
        scale = costs.max() or 1.0
        if limit_bytes is None:
            objective, most = np.append(1e-6 * costs / scale, 1.0), np.inf
        else:
            objective, most = np.append(costs / scale, 0.0), float(limit_bytes // self._part_bytes)
        result = minimize(
            objective,
            Rows(one_each, 1, 1),
            Rows(below, highest=-fixed),
            integers=np.append(np.ones(total), 0),
            highest=np.append(np.ones(total), most),
        )
        if result.x is None:
            if limit_bytes is None:
                raise bug(f"no choice for {len(self._shares)} stages and {len(self._loads)} loads: {result.message}")
            return self.floor  # rounded up, no choice meets a limit that the lowest choice meets in bytes
        picks = dict[int, int]()
        for stage, values in zip(self._shares, np.split(result.x[:total], np.cumsum(counts)[:-1]), strict=True):
            picks[stage] = int(values.argmax())
        return self._choose(picks)

    def _choose(self, picks: Mapping[int, int]) -> Chosen:
        shares = {stage: found[picks[stage]] for stage, found in self._shares.items()}

        def bytes_at(load: DeviceLoad) -> int:
            return load.other_bytes + sum(load.bytes_of(stage, share) for stage, share in shares.items())

        highest = max(self._loads, key=bytes_at)
        return Chosen(shares=shares, peak_bytes=bytes_at(highest), highest=highest)


def _is_below_another(rows: NDArray[np.float64], fixed: NDArray[np.float64], place: int) -> bool:
    below = (rows >= rows[place]).all(axis=1) & (fixed >= fixed[place])
    equal = (rows == rows[place]).all(axis=1) & (fixed == fixed[place])
    return bool((below & ~equal).any() or equal[:place].any())
