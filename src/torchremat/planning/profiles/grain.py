"""How far calls of a forward are split: as long as that lowers the peak of a step in which each unit is a region.

A call that is one unit is dropped as a whole, and is live as a whole in its backward. A split call keeps the tensors
that its own code saves, and the inputs of the calls inside it, and only one of these is live at a time. Calls that save
more than a threshold are split. Each threshold has a number of bytes

    need = the highest of    in the backward of a unit    what is saved in it, plus, up to there, what code
                                                          between the units has saved, and the inputs of units
                             after the forward            what code between the units has saved, and the inputs of all

    lowest      the threshold with the lowest need. It is the best of several choices, which include a region around
                each repeated block, as written by hand, however many modules are around the blocks, and whatever they
                compute
    units       the coarsest threshold that needs little more: blocks of a transformer, of a U-Net, of an encoder before
                a decoder
    split       a split unit becomes the calls inside it, split further as under the lowest threshold. So with some
                units split, a plan has the choices of the lowest
    around      the coarsest threshold that needs not much more, if that is another one: stages of an image network,
                each one unit. A plan then chooses the held operators for a whole stage, and recomputes the sums
                between blocks from them, where each block by itself would hold its input

The only call that the step makes itself is always split, since one unit leaves no choice, and so is the only call that
it makes; of several calls each may be a unit. Always split are also calls around such that the step makes as well, and
DistributedDataParallel and all calls around one: its reducer counts on one forward for each backward. Calls that cannot
be units are split too, since parts of them may be units; see `replayability`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from functools import cached_property

from torchremat.errors import StepError, first_of
from torchremat.planning.profiles.traces import Trace, around, named
from torchremat.planning.profiles.units import Grain, Units, linked

# Units need at most this many times the lowest need. A whole call has advantages: the choice covers all its operators
# at once, and the search has fewer units; and the call can still be split.
_MOST_NEED = 1.3

# The units around them need at most this share more, of the bytes that the calls save beyond the lowest.
_MOST_AROUND = 0.25


def grain_of(trace: Trace, unlike: Mapping[str, str] | None = None) -> Grain:
    """Return how far the calls of a trace should be split.

    Args:
        trace: The forward.
        unlike: Modules whose recompute would not repeat their forward, by name, with the reasons.

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
    outer = next(apart for need_bytes, apart in found if need_bytes <= most_bytes)
    return Grain(apart=units, inside=inside, around=outer, need_bytes=lowest_bytes)


def find_units(
    trace: Trace,
    split: frozenset[int] = frozenset(),
    unlike: Mapping[str, str] | None = None,
    grain: Grain | None = None,
) -> Units:
    """Return the units of a traced forward.

    Args:
        trace: The forward.
        split: Calls that would be units and should be split.
        unlike: Modules whose recompute would not repeat their forward, by name, with the reasons; see `replayability`.
        grain: How far calls are split, if known.

    Raises:
        StepError: The step calls no module of the model with grad mode on, or none that could be recomputed.
    """
    return _CallTree(trace, unlike or {}).units(grain_of(trace, unlike) if grain is None else grain, split)


def units_around(units: Units) -> Units | None:
    """Return the units of the same trace around these; None if there are no others."""
    grain = units.grain
    if grain.around == grain.apart:
        return None
    found = find_units(units.trace, unlike=units.unlike, grain=replace(grain, apart=grain.around))
    return found if len(found.units) < len(units.units) else None


def finest_units(units: Units) -> Units:
    """Return the units of the same trace, each split as far as possible.

    Each of them is one of the units, or is inside one; and each unit contains at least one.
    """
    trace, split = units.trace, splittable(units)
    owners = {inner: place for place, inside in enumerate(units.inside) for inner in inside}
    while split:
        leaves = find_units(trace, split, units.unlike, units.grain)
        owned = [{owners.get(call) for call in unit.calls} for unit in leaves.units]
        # An in-place write may merge a call with a call of another unit, or leave no unit inside a call.
        amiss = {owner for one in owned if len(one) > 1 for owner in one}
        amiss |= {*range(len(units.units))}.difference(*owned)
        if not amiss:
            return leaves
        split -= {call for call in split if owners[call] in amiss}
    return units


def splittable(units: Units) -> frozenset[int]:
    """Return the calls of units with at least two calls inside, so that splitting gives a choice."""
    calls = [unit.calls[0] for unit in units.units if len(unit.calls) == 1]
    own = _CallTree(units.trace, units.unlike)
    parts = {call: [units.trace.calls[part].name for part in own.parts(call, units.grain)] for call in calls}
    return frozenset(call for call, names in parts.items() if len(names) > 1 and not units.unlike.keys() >= {*names})


def need_bytes_of(units: Units) -> int:
    """Return the bytes of a step in which each unit is a region, without temporaries and gradients."""
    return max((need_bytes for _, need_bytes, _ in needs_of(units)), default=0)


def needs_of(units: Units) -> Iterator[tuple[int, int, int]]:
    """Yield the bytes of such a step while backward is where the forward was at a time in the trace, in order.

    Yields:
        The time, the bytes, and those of them that are held from then on.
    """
    trace, bytes_of = units.trace, units.trace.storage_bytes
    # By time: storages that are held from then on (-1), and the storages saved by a unit that has ended (its number).
    events: list[tuple[int, int, Collection[int]]] = [
        (save.time, -1, save.storages) for save in (*units.saves_between(), *trace.step_saved) if save.dropped is None
    ]
    for place, unit in enumerate(units.units):
        events.append((units.entered(place), -1, (*unit.inputs, *unit.carried)))
        saves = (save for save in units.saves_in(place) if save.dropped is None)
        events.append((units.left(place), place, [storage for save in saves for storage in save.storages]))
    held, held_bytes = set[int](), 0
    for time, place, storages in sorted(events, key=lambda event: event[:2]):
        new = {storage for storage in storages if storage >= 0} - trace.fixed - held
        new_bytes = sum(bytes_of[storage] for storage in new)
        need_bytes = held_bytes + new_bytes
        if place < 0:
            held |= new
            held_bytes = need_bytes
        yield time, need_bytes, held_bytes


class _CallTree:
    """The calls of a trace, which can be split more or less."""

    def __init__(self, trace: Trace, unlike: Mapping[str, str]) -> None:
        self.trace = trace
        self.unlike = unlike
        self.roots = [index for index in trace.children(None) if trace.calls[index].grad]
        if not self.roots and trace.untraced:
            raise StepError(
                f"each module that the step calls ({first_of(sorted(map(named, trace.untraced)))}) is called in a "
                "`torchremat.loop`, inside of a transform of torch.func (vmap, jvp, jacfwd), or with a nested tensor. "
                "Let a module of the model make that call, and it can be recomputed as a whole."
            )
        if not self.roots and any(run.is_compiled for run in trace.operators.runs):
            raise StepError(
                "the step calls modules of the model in compiled code alone, which can only be kept or recomputed as a "
                "whole, so there is nothing to choose. Compile the blocks of the model in place of the step, each by "
                "`block.compile()`; with Lightning, give `fit` the plain module."
            )
        if not self.roots:
            raise StepError(
                "the step calls no module of the model with grad mode on; does it use another model than the one "
                "passed here?"
            )
        self.made: dict[int, list[int]] = {}
        for index, call in enumerate(trace.calls):
            if call.parent is not None and call.grad:
                self.made.setdefault(call.parent, []).append(index)

    @cached_property
    def forced(self) -> frozenset[str]:
        """The modules whose calls are always split."""
        calls = self.trace.calls
        opening = {calls[root].name for root in self.roots}
        inner = list(self.roots) if len(self.roots) == 1 else []  # a region around all there is saves nothing
        for call in inner:
            inner += made if len(made := self.made.get(call, [])) == 1 else []
        forced = {call.name for index, call in enumerate(calls) if self.trace.is_never_unit(index)}.union(
            self.unlike, (calls[call].name for call in inner)
        )
        # A module that opens a scope wherever it is called cannot be part of a unit, and one that reduces gradients
        # after its backward must not run its forward again.
        opening |= self.trace.replicated
        opened = (index for index, call in enumerate(calls) if call.name in opening)
        return frozenset(forced.union(outer.name for index in opened for outer in around(calls, calls[index].parent)))

    def needs(self) -> Iterator[tuple[int, frozenset[str]]]:
        """Yield for each threshold, the highest first, its need and the modules that it splits."""
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
        """Return the units of a grain, some of them split."""
        chosen = [
            inner for call in self.flat(grain.apart) for inner in (self.parts(call, grain) if call in split else [call])
        ]
        return replace(linked(self.trace, self.roots, chosen, self.unlike), grain=grain)

    def parts(self, call: int, grain: Grain) -> list[int]:
        """Return the calls that a call becomes if it is split."""
        return [inner for child in self.made.get(call, ()) for inner in self._flat(child, grain.inside)]

    def flat(self, apart: frozenset[str]) -> list[int]:
        """Return the remaining calls, in order, if the calls of some modules are split."""
        names = apart | self.forced
        return [inner for call in self.roots for inner in self._flat(call, names)]

    def _flat(self, call: int, apart: frozenset[str]) -> list[int]:
        if self.trace.calls[call].name in apart:
            flat = [unit for child in self.made.get(call, ()) for unit in self._flat(child, apart)]
            if flat:
                return flat
        return [call]

    def saved_bytes(self, call: int) -> int:
        """Return the bytes of the tensors that were both made and saved in a call."""
        trace = self.trace
        given = {seen.storage for seen in trace.calls[call].inputs}
        saves = (save for inner in trace.descendants(call) for save in trace.calls[inner].saved)
        inside = {storage for save in saves for storage in save.storages}
        return sum(trace.storage_bytes[storage] for storage in inside - given - trace.fixed if storage >= 0)
