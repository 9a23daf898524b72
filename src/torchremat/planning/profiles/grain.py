"""How far the calls of a forward are taken apart: as far as a step in which each unit is a region needs less for it.

A call that is one unit is dropped as a whole, and is there as a whole in its backward. One that is taken apart keeps
what its own code saves, and the inputs of the calls inside of it, and of these one is there at a time. So with each
threshold, above which calls are taken apart by what is saved in them, goes a number of bytes

    need = the highest of    in the backward of a unit    what is saved in it, and beside it, up to there, what code
                                                          between the units has saved, and the inputs of units
                             after the forward            what code between the units has saved, and the inputs of all

    lowest      the threshold with the lowest need. To have each repeated block in a region by hand is one of the
                choices that it is the best of, however many modules are around the blocks, and whatever they compute
    units       the coarsest that needs little more: blocks of a transformer, of a U-Net, of an encoder before a decoder
    split       a unit that is taken apart becomes the calls that it makes, and those what the lowest has them be. So
                with some units split, a plan has what the lowest has
    around      the coarsest that needs not much more, if that is another one: stages of a network for pictures, each
                one unit. What a plan holds of operators it then chooses for a stage at once, and recomputes the sums
                between blocks from it, where each block by itself would hold its input

The calls that the step makes itself are taken apart in any case, as one unit is no choice: so is the only call that one
of them makes, and what one of them lies in. Calls that cannot be units are as well, since parts of them may be; see
`repeating`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from functools import cached_property

from torchremat.errors import StepError
from torchremat.planning.profiles.traces import Trace
from torchremat.planning.profiles.units import Grain, Units, linked

# Units need at most so many times what the lowest needs. To leave a call whole is worth something, as all of its
# operators are chosen among at once then, and the search has fewer units; and it can still be split.
_MOST_NEED = 1.3

# What is around them needs at most this share more, of all that the calls save beyond the lowest.
_MOST_AROUND = 0.25


def grain_of(trace: Trace, unlike: Mapping[str, str] | None = None) -> Grain:
    """Return how far the calls of a trace are to be taken apart.

    Args:
        trace: The forward.
        unlike: Modules whose recompute would not be their forward, by name, with the reasons.

    Raises:
        StepError: The step calls no module of the model with grad mode on.
    """
    calls = _CallTree(trace, unlike or {})
    found = list(calls.needs())
    if not found:
        return Grain()
    lowest_bytes, inside = min(found, key=lambda one: one[0])
    saved_bytes = sum(calls.saved_bytes(root) for root in calls.roots)
    most_bytes = max(_MOST_NEED * lowest_bytes, lowest_bytes + _MOST_AROUND * (saved_bytes - lowest_bytes))
    units = next(apart for need_bytes, apart in found if need_bytes <= _MOST_NEED * lowest_bytes)
    around = next(apart for need_bytes, apart in found if need_bytes <= most_bytes)
    return Grain(apart=units, inside=inside, around=around, need_bytes=lowest_bytes)


def find_units(
    trace: Trace,
    split: frozenset[int] = frozenset(),
    unlike: Mapping[str, str] | None = None,
    grain: Grain | None = None,
) -> Units:
    """Return the units of a traced forward.

    Args:
        trace: The forward.
        split: Calls that would be units and are to be taken apart.
        unlike: Modules whose recompute would not be their forward, by name, with the reasons; see `repeating`.
        grain: How far calls are taken apart, if that is known.

    Raises:
        StepError: The step calls no module of the model with grad mode on, or none that could be recomputed.
    """
    return _CallTree(trace, unlike or {}).units(grain_of(trace, unlike) if grain is None else grain, split)


def units_around(units: Units) -> Units | None:
    """Return the units of the same trace that lie around these; None if there are no others."""
    grain = units.grain
    if grain.around == grain.apart:
        return None
    found = find_units(units.trace, unlike=units.unlike, grain=replace(grain, apart=grain.around))
    return found if len(found.units) < len(units.units) else None


def finest_units(units: Units) -> Units:
    """Return the units of the same trace with all taken apart that can be.

    Each of them is one of the units, or lies in one; and in each unit there are some.
    """
    trace, split = units.trace, splittable(units)
    owners = {
        inner: place
        for place, unit in enumerate(units.units)
        for call in unit.calls
        for inner in trace.descendants(call)
    }
    while split:
        leaves = find_units(trace, split, units.unlike, units.grain)
        owned = [{owners.get(call) for call in unit.calls} for unit in leaves.units]
        # What is written in place may glue a call to one of another unit, or leave no unit inside of a call.
        amiss = {owner for one in owned if len(one) > 1 for owner in one}
        amiss |= {*range(len(units.units))}.difference(*owned)
        if not amiss:
            return leaves
        split -= {call for call in split if owners[call] in amiss}
    return units


def splittable(units: Units) -> frozenset[int]:
    """Return the calls of units that have at least two calls inside, so that there is something to choose among."""
    calls = [unit.calls[0] for unit in units.units if len(unit.calls) == 1]
    own = _CallTree(units.trace, units.unlike)
    parts = {call: [units.trace.calls[part].name for part in own.parts(call, units.grain)] for call in calls}
    return frozenset(call for call, names in parts.items() if len(names) > 1 and not units.unlike.keys() >= {*names})


def need_bytes_of(units: Units) -> int:
    """Return what a step in which each unit is a region needs, temporaries and gradients left aside."""
    trace, bytes_of = units.trace, units.trace.storage_bytes
    inside = {inner for unit in units.units for call in unit.calls for inner in trace.descendants(call)}
    between = [save for index, call in enumerate(trace.calls) if index not in inside for save in call.saved]
    # By time: storages that are held from then on (-1), and those that a unit which has ended saves (its number).
    events: list[tuple[int, int, Collection[int]]] = [
        (save.time, -1, save.storages) for save in (*between, *trace.step_saved) if save.dropped is None
    ]
    for place, unit in enumerate(units.units):
        events.append((units.entered(place), -1, (*unit.inputs, *unit.carried)))
        saves = (save for save in units.saves_in(place) if save.dropped is None)
        events.append((units.left(place), place, [storage for save in saves for storage in save.storages]))
    held, held_bytes, most_bytes = set[int](), 0, 0
    for _, place, storages in sorted(events, key=lambda event: event[:2]):
        new = {storage for storage in storages if storage >= 0} - trace.fixed - held
        new_bytes = sum(bytes_of[storage] for storage in new)
        most_bytes = max(most_bytes, held_bytes + new_bytes)
        if place < 0:
            held |= new
            held_bytes += new_bytes
    return most_bytes


class _CallTree:
    """The calls of a trace, to be taken apart more or less."""

    def __init__(self, trace: Trace, unlike: Mapping[str, str]) -> None:
        self.trace = trace
        self.unlike = unlike
        self.roots = [index for index in trace.children(None) if trace.calls[index].grad]
        if not self.roots:
            raise StepError(
                "the step calls no module of the model with grad mode on; is it given another model than the one it "
                "uses?"
            )
        self.made: dict[int, list[int]] = {}
        for index, call in enumerate(trace.calls):
            if call.parent is not None and call.grad:
                self.made.setdefault(call.parent, []).append(index)

    @cached_property
    def forced(self) -> frozenset[str]:
        """The modules whose calls are taken apart in any case."""
        calls = self.trace.calls
        opening = {calls[root].name for root in self.roots}
        inner = list(self.roots)
        for call in inner:
            inner += made if len(made := self.made.get(call, [])) == 1 else []
        forced = {call.name for call in calls if call.is_overwritten or call.is_transforming}.union(
            self.unlike, (calls[call].name for call in inner)
        )
        # What opens a scope wherever it is called cannot be part of a unit.
        for index, call in enumerate(calls):
            outer = index if call.name in opening else None
            while outer is not None:
                forced.add(calls[outer].name)
                outer = calls[outer].parent
        return frozenset(forced)

    def needs(self) -> Iterator[tuple[int, frozenset[str]]]:
        """Yield which modules are taken apart by each threshold, the highest first, after what is needed then."""
        saved: dict[str, int] = {}
        for call in (inner for root in self.roots for inner in self.trace.descendants(root) if inner in self.made):
            name = self.trace.calls[call].name
            saved[name] = max(saved.get(name, 0), self.saved_bytes(call))
        last: list[int] = []
        for threshold in sorted({-1, *saved.values()}, reverse=True):
            apart = frozenset(name for name, size in saved.items() if size > threshold)
            chosen = self.flat(apart)
            if chosen == last:
                continue
            last = chosen
            try:
                units = linked(self.trace, self.roots, chosen, self.unlike)
            except StepError:
                continue  # no call is left that could be a unit
            yield need_bytes_of(units), apart

    def units(self, grain: Grain, split: frozenset[int]) -> Units:
        """Return the units of a grain, some of them taken apart."""
        chosen = [
            inner for call in self.flat(grain.apart) for inner in (self.parts(call, grain) if call in split else [call])
        ]
        return replace(linked(self.trace, self.roots, chosen, self.unlike), grain=grain)

    def parts(self, call: int, grain: Grain) -> list[int]:
        """Return what a call becomes if it is taken apart."""
        return [inner for child in self.made.get(call, ()) for inner in self._flat(child, grain.inside)]

    def flat(self, apart: frozenset[str]) -> list[int]:
        """Return the calls that are left, in order, if those of some modules are taken apart."""
        names = apart | self.forced
        return [inner for call in self.roots for inner in self._flat(call, names)]

    def _flat(self, call: int, apart: frozenset[str]) -> list[int]:
        if self.trace.calls[call].name in apart:
            flat = [unit for child in self.made.get(call, ()) for unit in self._flat(child, apart)]
            if flat:
                return flat
        return [call]

    def saved_bytes(self, call: int) -> int:
        """Return the bytes of what is saved in a call and was made in it."""
        trace = self.trace
        given = {seen.storage for seen in trace.calls[call].inputs}
        saves = (save for inner in trace.descendants(call) for save in trace.calls[inner].saved)
        inside = {storage for save in saves for storage in save.storages}
        return sum(trace.storage_bytes[storage] for storage in inside - given - trace.fixed if storage >= 0)
