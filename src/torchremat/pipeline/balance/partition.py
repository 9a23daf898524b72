"""A row of costs, cut into blocks so that the most costly block costs as little as possible, and the result as data.

Missing on purpose: blocks without layers, and layers in another order.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from itertools import accumulate, pairwise
from math import lcm
from typing import Literal, overload

import numpy as np
from numpy.typing import NDArray

from torchremat.tensors.sizes import format_bytes

# NOTE [ The partition that is picked ]
#
# Costs are c_0..c_n-1, all at least 0, and p blocks are wanted, none of them empty.
#
#   1. The limit L is the least cost of the most costly block. Filling blocks from the left up to some limit gives the
#      fewest blocks that it allows; if these are at most p, then p blocks are possible as well, since cutting a block
#      makes none more costly and the row has at least p layers. So L is found by bisection.
#   2. Of all partitions within L the one with the least sum of squared counts is taken: equal costs get equal counts.
#   3. Of those left, the one whose first block is longest, then whose second is, and so on.
#
# Costs are made integers first. In floats three times 0.1 is more than 0.3, and the choice between two equal partitions
# would depend on their position in the row.
#
#   h(k, i)  the least sum of squares of k blocks over i..n-1 = min over ends j: (j - i)^2 + h(k - 1, j)
#
# where j reaches as far as i..j-1 costs at most L.

_UNREACHABLE = np.iinfo(np.int64).max // 2


def partition(costs: Sequence[float], blocks: int) -> tuple[int, ...]:
    """Return how many costs each block has, so that the most costly block costs as little as it can.

    Of several such partitions it is the most even one in counts, with longer blocks first.
    See NOTE [ The partition that is picked ].

    Args:
        costs: Finite, none negative.
        blocks: 1 to the number of costs.

    >>> partition([1, 2, 3, 4, 5, 6], 2)
    (4, 2)
    """
    sums = [0, *accumulate(_integers(costs))]
    limit = _limit(sums, blocks)
    reach = [bisect_right(sums, before + limit, lo=start) - 1 for start, before in enumerate(sums)]
    least = _least_squares(reach, blocks)
    counts: list[int] = []
    start = 0
    for left in reversed(range(blocks)):
        ends = np.arange(start + 1, reach[start] + 1)
        squares = (ends - start) ** 2 + least[left][ends]
        # The last of the cheapest ends: longer blocks first.
        end = int(ends[len(ends) - 1 - int(np.argmin(squares[::-1]))])
        counts.append(end - start)
        start = end
    return tuple(counts)


def _integers(costs: Sequence[float]) -> list[int]:
    """Return integers in the proportions of the costs, exactly."""
    exact = [Fraction(cost) for cost in costs]
    scale = lcm(*(one.denominator for one in exact))
    return [one.numerator * (scale // one.denominator) for one in exact]


def _limit(sums: Sequence[int], blocks: int) -> int:
    """Return the least cost that the most costly of so many blocks can have."""
    low = max(max(after - before for before, after in pairwise(sums)), -(-sums[-1] // blocks))
    high = sums[-1]
    while low < high:
        middle = (low + high) // 2
        if _fits(sums, blocks, middle):
            high = middle
        else:
            low = middle + 1
    return low


def _fits(sums: Sequence[int], blocks: int, limit: int) -> bool:
    start = 0
    for _ in range(blocks):
        start = bisect_right(sums, sums[start] + limit, lo=start) - 1
        if start == len(sums) - 1:
            return True
    return False


def _least_squares(reach: Sequence[int], blocks: int) -> list[NDArray[np.int64]]:
    """Return h(k, i) by k, for k from 0 to blocks - 1."""
    layers = len(reach) - 1
    squares = np.arange(layers + 1, dtype=np.int64) ** 2
    rows = [np.full(layers + 1, _UNREACHABLE)]
    rows[0][layers] = 0
    for k in range(1, blocks):
        row = np.full(layers + 1, _UNREACHABLE)
        # Only from here on are enough layers on either side.
        for start in range(blocks - k, layers - k + 1):
            end = reach[start]
            row[start] = np.min(rows[-1][start + 1 : end + 1] + squares[1 : end - start + 1])
        rows.append(row)
    return rows


Unit = Literal["s", "B", ""]


@dataclass(frozen=True, kw_only=True, eq=False)
class Balance(Sequence[int]):
    """How many layers each stage has. It is a sequence of these counts, and equal to a list of them.

    Attributes:
        counts: Layers of each stage, each at least 1.
        costs: Of each layer.
        unit: The unit of the costs: seconds, bytes, or the caller's own numbers.
        names: Of the layers.
    """

    counts: tuple[int, ...]
    costs: tuple[float, ...] = field(repr=False)
    unit: Unit = ""
    names: tuple[str, ...] = field(repr=False)

    @cached_property
    def stages(self) -> tuple[range, ...]:
        """The places of each stage's layers."""
        return tuple(range(start, end) for start, end in pairwise([0, *accumulate(self.counts)]))

    @property
    def stage_costs(self) -> tuple[float, ...]:
        """The cost of each stage."""
        return tuple(sum(self.costs[place] for place in stage) for stage in self.stages)

    @property
    def shares(self) -> tuple[float, ...]:
        """Each stage's part of all costs, from 0 to 1; 0 for all if nothing costs anything."""
        whole = sum(self.costs)
        return tuple(cost / whole if whole else 0.0 for cost in self.stage_costs)

    @property
    def bottleneck(self) -> int:
        """The number of the stage with the highest cost; the first of several."""
        costs = self.stage_costs
        return costs.index(max(costs))

    @overload
    def __getitem__(self, index: int) -> int: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[int, ...]: ...

    def __getitem__(self, index: int | slice) -> int | tuple[int, ...]:
        return self.counts[index]

    def __len__(self) -> int:
        return len(self.counts)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Sequence) and not isinstance(other, str | bytes):
            return self.counts == tuple(other)
        return NotImplemented

    def __hash__(self) -> int:
        return hash(self.counts)

    def __str__(self) -> str:
        rows = [("stage", "layers", "count", "cost", "share")]
        for number, (stage, cost, share) in enumerate(zip(self.stages, self.stage_costs, self.shares, strict=True)):
            first, last = self.names[stage[0]], self.names[stage[-1]]
            layers = first if len(stage) == 1 else f"{first} .. {last}"
            rows.append((str(number), layers, str(len(stage)), formatted(cost, self.unit), f"{share:.1%}"))
        widths = [max(len(row[column]) for row in rows) for column in range(5)]
        lines: list[str] = []
        for number, layers, count, cost, share in rows:
            cells = (number.rjust(widths[0]), layers.ljust(widths[1]), count.rjust(widths[2]))
            lines.append("  ".join((*cells, cost.rjust(widths[3]), share.rjust(widths[4]))))
        most = self.bottleneck
        if self.shares[most]:
            above = self.shares[most] * len(self)
            lines.append(f"stage {most} costs most: {above:.2f} x an even share of {1 / len(self):.1%}")
        return "\n".join(lines)


def formatted(cost: float, unit: Unit) -> str:
    """Return a cost with its unit.

    >>> formatted(0.0125, "s"), formatted(2048, "B"), formatted(3, "")
    ('12.50 ms', '2.00 KiB', '3')
    """
    match unit:
        case "s":
            return f"{cost:.2f} s" if cost >= 1 else f"{cost * 1e3:.2f} ms" if cost >= 1e-3 else f"{cost * 1e6:.2f} us"
        case "B":
            return format_bytes(round(cost))
        case "":
            return f"{cost:g}"
