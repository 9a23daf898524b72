"""The outputs that a recompute passes on from unit to unit."""

from __future__ import annotations

from collections.abc import Iterable

from torchremat.planning.profiles.units import Unit, Units
from torchremat.regions.rules import ended, last_uses
from torchremat.schedules.chain import RegionNode

_NONE: set[int] = set()


class Links:
    """The outputs that a recompute passes on to its later units, and what they keep alive through their graphs.

    Args:
        units: The units.
        region: The region that is recomputed.
        traced: Whether the caller needs to know what the outputs keep.

    Attributes:
        ended: Ids of the nested regions of the recompute whose last unit has run.
    """

    def __init__(self, units: Units, region: RegionNode, *, traced: bool) -> None:
        self._traced = traced
        first = region.first
        later = units.units[first + 1 : region.last + 1]  # the first unit takes nothing that the region makes
        taken = [[storage for storage, producer in unit.links if producer >= first] for unit in later]
        self._last_use = last_uses(taken, first + 1)
        # By output: inputs that the recompute has unpacked, which are leaves of its graph, and ids of nested regions.
        self._leaves: dict[int, set[int]] = {}
        self._regions: dict[int, set[int]] = {}
        self.ended: set[int] = set()

    @property
    def storages(self) -> Iterable[int]:
        """The outputs that are still needed."""
        return self._leaves

    @property
    def leaves(self) -> set[int]:
        """Storages that the outputs keep."""
        return set[int]().union(*self._leaves.values())

    @property
    def regions(self) -> set[int]:
        """Ids of the nested regions that the outputs keep."""
        return set[int]().union(*self._regions.values())

    def pass_on(self, unit: int, own: Unit, inner: Iterable[RegionNode]) -> None:
        """Record the outputs of a unit that has run in the regions `inner`, and forget those no longer needed."""
        if self._traced:
            self._trace(unit, own, inner)
        else:
            self._leaves.update(dict.fromkeys(own.outputs, _NONE))
        for storage in ended(self._leaves, self._last_use, unit):
            del self._leaves[storage]
            self._regions.pop(storage, None)

    def _trace(self, unit: int, own: Unit, inner: Iterable[RegionNode]) -> None:
        """Record the outputs of a unit with what they keep."""
        # An output that no gradient flows to is in no graph.
        given = own.differentiable
        leaves = set[int]().union(*(self._leaves.get(storage, (storage,)) for storage in given))
        regions = {id(one) for one in inner}.union(*(self._regions.get(storage, ()) for storage in given))
        self.ended.update(id(one) for one in inner if one.last <= unit)
        for storage in own.outputs:
            self._leaves[storage], self._regions[storage] = leaves, regions
