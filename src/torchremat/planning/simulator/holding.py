"""What a simulated step holds: bytes by storage, graphs of units, outputs that a recompute passes on; less the stored.

Most graphs live until their backward. A graph that no backward reaches lives as long as its outputs are referenced:
after `y.detach()`, the graph of `y` dies with `y`. Until then its saved tensors are held, and so are its regions.

What is in stores is not held. It follows `torchremat.regions.offload_schedule`: a tensor is released where the executor
waits for its store, and held again where the store begins to bring it back, or at its unit's backward if nothing is
allocated before.
"""

# NOTE [ One parcel after the other ]
#
# A unit's storages are put one after the other, and come back in the same order. For each storage it is known whether
# it moves at all: a storage that another unit has put is not put again, and a storage that is live at that program
# point is not brought back. So the peak of a transfer is simulated storage by storage: a bound for any order was up to
# a sixth of a step too high, wherever no kernel happened to need more.

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate

from torchremat.planning.profiles.units import Unit, Units
from torchremat.planning.simulator.offload_choices import Offloads, Parcel
from torchremat.planning.simulator.points import Lifetimes, Live, ProgramPoint, Releases, UnitBytes
from torchremat.regions.rules import ended, last_uses
from torchremat.schedules.chain import Node, RegionNode


class LiveBytes:
    """The storages that are held, and bytes that belong to no boundary storage.

    Attributes:
        bytes: Of each storage.
        held: By storage, how often it is held.
        held_bytes: Their bytes, each storage once.
        inside: Bytes that kept units saved inside, and states that regions keep.
        alive: The storages in addition to the held ones, at the last program point asked for.
    """

    def __init__(self, storage_bytes: dict[int, int]) -> None:
        self.bytes = storage_bytes
        self.held: Counter[int] = Counter()
        self.held_bytes = 0
        self.inside = 0
        self.alive: Iterable[int] = ()

    def hold(self, storages: Iterable[int]) -> None:
        """Begin to hold storages, each once more."""
        for storage in storages:
            self.held[storage] += 1
            if self.held[storage] == 1:
                self.held_bytes += self.bytes[storage]

    def release(self, storages: Iterable[int]) -> None:
        """Undo `hold`."""
        for storage in storages:
            self.held[storage] -= 1
            if not self.held[storage]:
                del self.held[storage]
                self.held_bytes -= self.bytes[storage]

    def total(self, alive: Iterable[int] = ()) -> int:
        """Bytes held, plus those of `alive`."""
        self.alive = alive
        total = self.inside + self.held_bytes
        for storage in alive:
            if storage not in self.held:
                total += self.bytes[storage]
        return total


class Graphs:
    """The graphs of a simulation.

    Args:
        sizes: Bytes of the units.
        until: For each unit the time in the trace until which it has a graph; -1 if it leaves none.
        end: The time at which the forward has ended.
    """

    def __init__(self, sizes: Sequence[UnitBytes], until: Sequence[int], end: int) -> None:
        self._until = until
        self._end = end
        # For each unit, how many units before it have something that backward needs.
        self._needed = [0, *accumulate(size.has_backward for size in sizes)]
        self._idle: list[tuple[int, Node]] = []

    def has_any(self, node: Node) -> bool:
        """Whether a node leaves a graph; a node without a graph holds nothing."""
        return self._has_backward(node) or self._last(node) >= 0

    def waits(self, node: Node) -> bool:
        """Whether a recompute has anything to give to a node: graphs that are freed by then take nothing."""
        return self._has_backward(node) or self._last(node) >= self._end

    def note(self, node: Node) -> None:
        """Record a top-level node that has run, if no backward reaches the graph that it leaves."""
        if not self._has_backward(node) and self._last(node) >= 0:
            self._idle.append((self._last(node), node))

    def lost(self, time: int) -> list[Node]:
        """Return the recorded nodes whose graphs are freed by now, and forget them."""
        gone = [node for until, node in self._idle if until < time]
        self._idle = [one for one in self._idle if one[0] >= time]
        return gone

    def _has_backward(self, node: Node) -> bool:
        """Whether backward needs anything in a node."""
        return self._needed[node.last + 1] > self._needed[node.first]

    def _last(self, node: Node) -> int:
        return max(self._until[node.first : node.last + 1])


_NONE: set[int] = set()


class Links:
    """The outputs that a recompute passes on to its later units, and what they keep alive through their graphs.

    Args:
        units: The units.
        region: The region that is recomputed.
        traced: Whether the caller needs to know what the outputs keep.

    Attributes:
        ended: Ids of the nested regions of the recompute whose last unit has run, and of the units that have run.
    """

    def __init__(self, units: Units, region: RegionNode, *, traced: bool) -> None:
        self._traced = traced
        first = region.first
        later = units.units[first + 1 : region.last + 1]  # the first unit takes nothing that the region makes
        taken = [[storage for storage, producer in unit.links if producer >= first] for unit in later]
        self._last_use = last_uses(taken, first + 1)
        # By output: inputs that the recompute has unpacked, which are leaves of its graph, and ids of what is in it.
        self._leaves: dict[int, set[int]] = {}
        self._graphs: dict[int, set[int]] = {}
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
    def graphs(self) -> set[int]:
        """Ids of the nested regions and of the units whose graphs the outputs keep."""
        return set[int]().union(*self._graphs.values())

    def pass_on(self, unit: int, own: Unit, inner: Iterable[RegionNode]) -> None:
        """Record the outputs of a unit that has run in the regions `inner`, and forget those no longer needed."""
        if self._traced:
            self._trace(unit, own, inner)
        else:
            self._leaves.update(dict.fromkeys(own.outputs, _NONE))
        for storage in ended(self._leaves, self._last_use, unit):
            del self._leaves[storage]
            self._graphs.pop(storage, None)

    def _trace(self, unit: int, own: Unit, inner: Iterable[RegionNode]) -> None:
        """Record the outputs of a unit with what they keep."""
        # An output that no gradient flows to is in no graph.
        given = own.differentiable
        leaves = set[int]().union(*(self._leaves.get(storage, (storage,)) for storage in given))
        graphs = {id(own), *map(id, inner)}.union(*(self._graphs.get(storage, ()) for storage in given))
        self.ended.update((id(own), *(id(one) for one in inner if one.last <= unit)))
        for storage in own.outputs:
            self._leaves[storage], self._graphs[storage] = leaves, graphs


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
