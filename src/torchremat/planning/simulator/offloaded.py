"""The bytes that are in stores while a step is simulated, and therefore not held.

It follows `torchremat.regions.offload_schedule`: a tensor is released where the executor waits for its store, and held
again where the store begins to bring it back, or at its unit's backward if nothing is allocated before.

NOTE [ One parcel after the other ]
A unit's storages are put one after the other, and come back in the same order. For each storage it is known whether it
moves at all: a storage that another unit has put is not put again, and a storage that is live at that program point is
not brought back. So the peak of a transfer is simulated storage by storage: a bound for any order was up to a sixth of
a step too high, wherever no kernel happened to need more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from torchremat.planning.profiles.units import Units
from torchremat.planning.simulator.holding import LiveBytes
from torchremat.planning.simulator.offload_choices import Offloads, Parcel
from torchremat.planning.simulator.points import Lifetimes, Live, ProgramPoint, Releases


class OffloadedBytes:
    """The bytes of one simulation that are in stores, and so are not held."""

    def __init__(self, live: LiveBytes, units: Units, lifetimes: Lifetimes, offloads: Offloads) -> None:
        self._live = live
        self._units = units
        self._lifetimes = lifetimes
        self._offloads = offloads
        self._leaving: dict[int, list[int]] = {}
        self._coming: dict[int, list[int]] = {}
        for unit, choice in offloads.items():
            self._leaving.setdefault(choice.planned.leaves_after, []).append(unit)
            self._coming.setdefault(choice.planned.comes_before, []).append(unit)
        # For each unit that has left and is not back, its boundary storages that are not back.
        self._gone: dict[int, set[int]] = {}
        self._put: Counter[int] = Counter()  # by boundary storage, the number of units that have it in a store
        self._passing: dict[int, int] = {}  # by unit that has not left, intermediate bytes that stores read
        # Boundary storages that stores have begun to bring back, and units whose inside storages they have begun to.
        self._begun: set[int] = set()
        self._begun_inside: set[int] = set()

    def left(self, unit: int) -> Iterator[Live]:
        """A unit has returned: its saved tensors are put, and the payloads due to leave have left."""
        if unit in self._offloads:
            total, what = self._live.total(self._lifetimes.returning[unit]), f"storing what {self._name(unit)} saves"
            yield Live((ProgramPoint.LEFT, unit), total, self._store(unit), what, moves=True)
        for leaving in self._leaving.get(unit, ()):
            offload_size = self._offloads[leaving].offload_size
            self._live.release(offload_size.boundary)
            self._live.inside -= offload_size.inside_bytes + self._passing.pop(leaving)
            self._gone[leaving] = set(offload_size.boundary)

    def came(self, unit: int) -> Iterator[Live]:
        """The gradient has reached a unit: stores begin to bring payloads back, and the unit's own has arrived."""
        for coming in self._coming.get(unit, ()):
            if coming in self._gone:
                self._begin(coming)
        if unit in self._gone:
            total, what = self._live.total(), f"bringing {self._name(unit)} back"
            yield Live((ProgramPoint.BACKWARD, unit), total, self._bring(unit), what, moves=True)

    def lets_go(self, unit: int) -> Releases:
        """Return the bytes that stores hold for a unit alone: each is freed with the node that has saved it."""
        parcels = self._offloads[unit].offload_size.parcels if unit in self._offloads else ()
        return tuple(
            (parcel.place, parcel.held_bytes)
            for parcel in parcels
            if parcel.held_bytes and (parcel.storage is None or self._put[parcel.storage] == 1)
        )

    def dropped(self, unit: int) -> None:
        """All saved tensors of a unit are freed."""
        if unit not in self._offloads:
            return
        for parcel in self._offloads[unit].offload_size.parcels:
            if parcel.storage is not None:
                self._put[parcel.storage] -= 1
                if self._put[parcel.storage]:
                    continue
            self._live.inside -= parcel.held_bytes

    # See NOTE [ One parcel after the other ] for all of the following.

    def _store(self, unit: int) -> int:
        """Put the saved tensors of a unit, and return the peak of the put over the live bytes before."""
        peak = added = passing = 0
        for parcel in self._offloads[unit].offload_size.parcels:
            if parcel.storage is not None:
                self._put[parcel.storage] += 1
                if self._put[parcel.storage] > 1:
                    continue
            peak = max(peak, added + parcel.put_peak_bytes)
            added += parcel.held_bytes + parcel.passing_bytes
            passing += parcel.passing_bytes
        self._passing[unit] = passing
        self._live.inside += added
        return peak

    def _begin(self, unit: int) -> None:
        """Let the store begin to bring back those saved tensors of a unit that are not live."""
        self._begun_inside.add(unit)
        for parcel in self._offloads[unit].offload_size.leaving:
            if parcel.storage is None:
                self._live.inside += parcel.ahead_bytes
            elif parcel.storage in self._live.held:
                self._hold(parcel.storage)
            elif parcel.storage not in self._begun:
                self._begun.add(parcel.storage)
                self._live.inside += parcel.ahead_bytes

    def _bring(self, unit: int) -> int:
        """Bring a unit's own storages back, and return the peak meanwhile over the live bytes before."""
        peak = added = 0
        for parcel in self._offloads[unit].offload_size.leaving:
            if parcel.storage is not None and parcel.storage in self._live.held:
                self._hold(parcel.storage)
                continue
            begun_bytes = parcel.ahead_bytes if self._has_begun(unit, parcel) else 0
            peak = max(peak, added + parcel.get_peak_bytes - begun_bytes)
            added += parcel.bytes - begun_bytes
            self._live.inside -= begun_bytes
            if parcel.storage is None:
                self._live.inside += parcel.bytes
            else:
                self._begun.discard(parcel.storage)
                self._hold(parcel.storage)
        del self._gone[unit]
        return peak

    def _has_begun(self, unit: int, parcel: Parcel) -> bool:
        return unit in self._begun_inside if parcel.storage is None else parcel.storage in self._begun

    def _hold(self, storage: int) -> None:
        """Hold a boundary storage for all units that have saved it; it stays for them."""
        waiting = [gone for gone in self._gone.values() if storage in gone]
        for gone in waiting:
            gone.discard(storage)
        self._live.hold([storage] * len(waiting))

    def _name(self, unit: int) -> str:
        return self._units.units[unit].name
