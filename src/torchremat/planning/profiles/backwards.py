"""The watched backward of one unit: when autograd asks for which saved tensor, and when each of them is freed.

    events      recompute │ delta_bytes ...                                            │ all saved tensors are freed
    asked_at              │ 0: the recompute was for it     ▲ another one
    remade                │          ▼ frees of memory made by the recompute    ▼

A plan that holds some of a unit's saved tensors recomputes when autograd asks for the first of the others: see
`searches.replays`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from torchremat.measuring.traces import AllocationTrace, live_bytes_of
from torchremat.planning.profiles.watching import WatchedUnit
from torchremat.planning.simulator.points import Releases


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class UnitBackward:
    """The allocator's events in the backward of a unit whose recompute came first.

    Attributes:
        delta_bytes: Its events, from the end of the recompute until all saved tensors of the unit are freed.
        asked_at: For the number of a saved tensor the count of events before autograd asked for it.
        freed_at: For the number of a saved tensor the event that frees the memory that the recompute made for it;
            absent if the recompute made none, and if that memory is freed later.
        lost_at: For the number of a saved input the count of events before its node is done with it.
        remade: All events that free memory made by the recompute.
        storages: For the number of a saved tensor its storage in the trace.
        fixed: The storages among these that existed before the step.
    """

    delta_bytes: NDArray[np.int64]
    asked_at: Mapping[int, int]
    freed_at: Mapping[int, int]
    lost_at: Mapping[int, int]
    remade: frozenset[int]
    storages: tuple[int, ...]
    fixed: frozenset[int]
    _highest: dict[tuple[frozenset[int], Releases], int] = field(
        default_factory=dict[tuple[frozenset[int], Releases], int]
    )

    _recomputed: dict[tuple[tuple[tuple[int, int], ...], int], int] = field(
        default_factory=dict[tuple[tuple[tuple[int, int], ...], int], int]
    )

    def live_bytes(self, without: Iterable[int] = ()) -> NDArray[np.int64]:
        """Return the bytes that are live before each event and after the last, over those at the beginning.

        Args:
            without: Events that do not take place.
        """
        delta = self.delta_bytes.copy()
        delta[list(without)] = 0
        return live_bytes_of(delta)

    def highest_bytes(self, stays: frozenset[int], lets_go: Releases = ()) -> int:
        """Return the peak, over the beginning, if the unit is kept.

        Args:
            stays: Storages that others also reference. Storages from before the step stay in any case: the frees seen
                here were of copies.
            lets_go: Other bytes freed with saved tensors: at the end, if the free of the tensor was not seen.
        """
        key = stays, lets_go
        if key not in self._highest:
            staying = stays | self.fixed
            without = [event for save, event in self.freed_at.items() if self.storages[save] in staying]
            live = self.live_bytes(without)
            for save, size in lets_go:
                if save in self.freed_at:
                    live[self.freed_at[save] + 1 :] -= size
            self._highest[key] = int(live.max())
        return self._highest[key]

    def without_inputs(self, inputs: Mapping[int, int], first: int = 0) -> int:
        """Return the peak from an event on, over the beginning, if the unit is recomputed.

        Args:
            inputs: Bytes of inputs that nothing but its saved tensors holds, by storage: they go with the last of them.
            first: The event.
        """
        key = tuple(inputs.items()), first
        if key not in self._recomputed:
            live = self.live_bytes()
            for storage, size in inputs.items():
                lost = [self.lost_at.get(save) for save, one in enumerate(self.storages) if one == storage]
                known = [at for at in lost if at is not None]
                if known and len(known) == len(lost):
                    live[max(known) + 1 :] -= size
            self._recomputed[key] = int(live[first:].max())
        return self._recomputed[key]


class Backwards:
    """Reads backwards out of the allocator's events of a watched step.

    Args:
        trace: The events.
        delta_bytes: Their bytes, without the copies that regions make.
        position: By mark, the number of events before it.
    """

    def __init__(self, trace: AllocationTrace, delta_bytes: NDArray[np.int64], position: Sequence[int]) -> None:
        self._delta_bytes = delta_bytes
        self._intervals = trace.intervals
        self._position = position
        self._pairs = trace.pairs[np.argsort(trace.pairs[:, 1])]
        self._made = trace.pairs[np.argsort(trace.pairs[:, 0])]

    def interval(self, pointer: int, position: int) -> tuple[int, int] | None:
        """Return the events that allocated and freed the memory at an address before a position; None if it is free."""
        at_address = self._intervals.get(pointer, ())
        place = bisect_left(at_address, (position,)) - 1
        return at_address[place] if place >= 0 and at_address[place][1] >= position else None

    def graph_bytes(self, own: WatchedUnit, forward: int, saved: Container[int]) -> int:
        """Return the bytes that a unit has made, neither outputs nor saved, and that are freed with its graph.

        Args:
            own: The unit.
            forward: The mark at the end of the forward.
            saved: The events that allocated what the unit has saved.
        """
        begin, end, first = (self._position[mark] for mark in (own.begins, own.settles, forward))
        made = self._made[slice(*np.searchsorted(self._made[:, 0], (begin, end)))]
        made = made[(first <= made[:, 1]) & (made[:, 1] < len(self._delta_bytes))]
        outputs = {found[0] for pointer in own.output_pointers if (found := self.interval(pointer, end)) is not None}
        kept = (event for event in made[:, 0].tolist() if event not in saved and event not in outputs)
        return sum(int(self._delta_bytes[event]) for event in kept)

    def copied_bytes(self, own: WatchedUnit, fixed: Container[int]) -> int:
        """Return the bytes that a unit's recompute has made for saved tensors from before the step."""
        if own.recomputed < 0:
            return 0
        begin, end = self._position[own.recompute], self._position[own.recomputed]
        asked, made = own.asked_here(), 0
        for pointer in {pointer for index, pointer in asked if own.parts[index][0] in fixed}:
            at_address = self._intervals.get(pointer, ())
            places = range(bisect_left(at_address, (begin,)), bisect_left(at_address, (end,)))
            made += sum(int(self._delta_bytes[at_address[place][0]]) for place in places)
        return made

    def of(self, own: WatchedUnit, begins: int, ends: int, fixed: frozenset[int]) -> UnitBackward:
        """Return the backward of a unit between two marks; `fixed` storages existed before the step."""
        recompute, begin, end = (self._position[mark] for mark in (own.recompute, begins, ends))
        first, last = np.searchsorted(self._pairs[:, 1], (begin, end))
        allocated, freed = self._pairs[first:last].T
        remade = freed[(recompute <= allocated) & (allocated < begin)] - begin
        live = ((index, self.interval(pointer, begin)) for index, pointer in own.asked_here())
        freed_at = {
            index: one[1] - begin for index, one in live if one is not None and one[0] >= recompute and one[1] < end
        }
        storages = tuple([first for first, *_ in own.parts])
        return UnitBackward(
            delta_bytes=self._delta_bytes[begin:end],
            asked_at={index: max(0, self._position[mark] - begin) for index, (mark, _) in own.asked.items()},
            freed_at=freed_at,
            lost_at={place: self._position[one.lost] - begin for place, one in enumerate(own.saves) if one.lost >= 0},
            remade=frozenset(remade.tolist()),
            storages=storages,
            fixed=fixed.intersection(storages),
        )
