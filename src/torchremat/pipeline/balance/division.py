"""The result of balancing: how many layers each stage has, and their costs. Pure data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Literal, overload

from torchremat.tensors.sizes import format_bytes

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
