"""What is in stores during a walk through a step: which bytes the walk does not hold meanwhile.

This follows `torchremat.regions.journeys` line by line: what leaves is released where the journey lets go of it, and
held again where the store begins to bring it back, or at its unit's backward if nothing is allocated before.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from torchremat.planning.walks.cargo import Cargo, Loads
from torchremat.planning.walks.moments import Live, Moment

if TYPE_CHECKING:
    from torchremat.planning.walks.memory import Walk


class Away:
    """What of one walk is in stores, and which of the walk's bytes are not held meanwhile."""

    def __init__(self, walk: Walk, loads: Loads) -> None:
        self._walk = walk
        self._loads = loads
        self._leaving: dict[int, list[int]] = {}
        self._coming: dict[int, list[int]] = {}
        for unit, load in loads.items():
            self._leaving.setdefault(load.planned.leaves_after, []).append(unit)
            self._coming.setdefault(load.planned.comes_before, []).append(unit)
        # By unit the boundary storages that have left and are not back, and the units whose other bytes are not.
        self._gone: dict[int, set[int]] = {}
        self._inside: set[int] = set()
        self._resident: Counter[int] = Counter()
        self._passing: dict[int, int] = {}  # by unit that has not left, what stores have made of it and read
        self._begun: set[int] = set()

    def left(self, unit: int) -> Iterator[Live]:
        """A unit has returned: what it has saved is put, and what is to leave now has left."""
        walk = self._walk
        if unit in self._loads:
            cargo = self._loads[unit].cargo
            if cargo.put_peak_bytes:
                total, what = walk.total(walk.lifetimes.left[unit]), f"storing what {self._name(unit)} saves"
                yield Live((Moment.LEFT, unit), total, self._put_peak_bytes(cargo), what, moves=True)
            passing_bytes = cargo.passing_bytes
            walk.inside += cargo.resident_bytes
            for storage, resident_bytes in cargo.boundary.items():
                self._resident[storage] += 1
                if self._resident[storage] == 1:
                    walk.inside += resident_bytes
                    passing_bytes += cargo.passing[storage]
            walk.inside += passing_bytes
            self._passing[unit] = passing_bytes
        for leaving in self._leaving.get(unit, ()):
            cargo = self._loads[leaving].cargo
            walk.release(cargo.boundary)
            walk.inside -= cargo.inside_bytes + self._passing.pop(leaving)
            self._gone[leaving] = set(cargo.boundary)
            self._inside.add(leaving)

    def came(self, unit: int) -> Iterator[Live]:
        """The gradient has come to a unit: stores begin to bring back, and what the unit itself has saved is there."""
        walk = self._walk
        for coming in self._coming.get(unit, ()):
            cargo = self._loads[coming].cargo
            if cargo.comes_ahead:
                self._fetch(coming)
            elif coming in self._inside:
                self._begun.add(coming)
                walk.inside += cargo.ahead_bytes
        if unit in self._inside:
            cargo = self._loads[unit].cargo
            ahead_bytes = cargo.ahead_bytes if unit in self._begun else 0
            peak = self._get_peak_bytes(cargo) - ahead_bytes
            yield Live((Moment.BACKWARD, unit), walk.total(), peak, f"bringing {self._name(unit)} back", moves=True)
            walk.inside -= ahead_bytes
            self._fetch(unit)

    def dropped(self, unit: int) -> None:
        """All that a unit has saved is gone."""
        if unit in self._loads:
            cargo = self._loads[unit].cargo
            self._walk.inside -= cargo.resident_bytes
            for storage, resident_bytes in cargo.boundary.items():
                self._resident[storage] -= 1
                self._walk.inside -= 0 if self._resident[storage] else resident_bytes

    def _fetch(self, unit: int) -> None:
        if unit not in self._inside:
            return
        self._inside.discard(unit)
        self._walk.inside += self._loads[unit].cargo.inside_bytes
        for storage in self._gone.pop(unit):
            # It is held until all of the units that have saved it have been.
            others = [away for away in self._gone.values() if storage in away]
            for away in others:
                away.discard(storage)
            self._walk.hold([storage] * (1 + len(others)))

    def _put_peak_bytes(self, cargo: Cargo) -> int:
        # What another unit has put already is not put again. Where a store needs more than it keeps, it is not known
        # at which of the tensors, and all are counted.
        beside = {storage: size + cargo.passing[storage] for storage, size in cargo.boundary.items()}
        if cargo.put_peak_bytes > cargo.resident_bytes + cargo.passing_bytes + sum(beside.values()):
            return cargo.put_peak_bytes
        return cargo.put_peak_bytes - sum(size for storage, size in beside.items() if self._resident[storage])

    def _get_peak_bytes(self, cargo: Cargo) -> int:
        # What lives is not brought back.
        if cargo.get_peak_bytes > cargo.all_bytes:
            return cargo.get_peak_bytes
        walk = self._walk
        return cargo.get_peak_bytes - sum(walk.bytes[storage] for storage in cargo.boundary if storage in walk.held)

    def _name(self, unit: int) -> str:
        return self._walk.units.units[unit].name
