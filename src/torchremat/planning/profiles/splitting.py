"""How a step is watched in little memory, and which units are split in one that has to stay within some bytes.

A plan that splits a unit holds what the unit's own code saves, as the step does in which each call inside it is a
region. So what cannot be watched within the bytes is split in no plan that stays within them.

    peak(with some units split)   in the backward of each unit, that of the step with whole units, which has run, and
                                  what the traced forward says that is held there more, or less
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Collection, Sequence
from itertools import pairwise
from typing import TypeAlias

from torchremat.planning.profiles.grain import find_units, needs_of
from torchremat.planning.profiles.units import Units
from torchremat.planning.profiles.watched_step import WatchedStep
from torchremat.planning.profiles.watching import every_unit, halves
from torchremat.planning.roots import by_shard
from torchremat.schedules.chain import Tree

# The units of a step, and the tree that it runs under.
Way: TypeAlias = tuple[Units, Tree]

# A fine step with more units than this is not watched: planning with so many is infeasible.
_MOST_UNITS = 2000


def are_few(finest: Units) -> bool:
    """Return whether a step with so many units can be planned."""
    return len(finest.units) <= _MOST_UNITS


def ways_of(units: Units, finest: Units, fits: Callable[[Units], bool]) -> list[Way]:
    """Return the ways of watching a step. Each needs less memory, and more time.

    units             each a region
    units in pieces   a region around several of them
    calls in halves   of the calls inside units, each a region; around both halves of a half one more, and so on
    """
    ways = [(units, every_unit(units))]
    if len(units.units) > 3:
        ways.append((units, every_unit(units, max(2, math.isqrt(len(units.units))))))
        if not fits(units):
            del ways[0]
    if are_few(finest):
        ways.append((finest, halves(finest)))
    return [(own, by_shard(own, tree)) for own, tree in ways]


def peaks_of(step: WatchedStep) -> list[int]:
    """Return the peak of a watched step in the backward of each unit, and after the last one's forward; in bytes."""
    run, trace, watched = step.run, step.run.trace, step.watcher.watched
    over_bytes = run.before.total_bytes - trace.live_bytes_at(run.start)
    order = sorted((own.recompute, unit) for unit, own in enumerate(watched) if own.recompute >= 0)
    marks = [run.backward, *(mark for mark, _ in order), run.ends]
    peaks = [over_bytes + trace.peak_bytes_between(*two) for two in pairwise(marks)]
    after, *others = peaks
    found = dict(zip((unit for _, unit in order), others, strict=True))
    return [*(found.get(unit, 0) for unit in range(len(watched))), after]


def names_within(units: Units, finest: Units, peaks: Sequence[int], allows: Callable[[int], bool]) -> list[str]:
    """Return the modules whose calls are split in a step that may have its peak, or one that was there already.

    Those come first that the step with the lowest peak splits, then those that hold least more, then the last ones.

    Args:
        units: The whole units.
        finest: The same, all split.
        peaks: Of the step with whole units, see `peaks_of`.
        allows: Whether a run may have a peak, in bytes.
    """
    whole = _UnitNeeds(units, units)

    def is_allowed(some: Units) -> bool:
        needs = _UnitNeeds(units, some)
        needed = max(peak + more - less for peak, more, less in zip(peaks, needs.most, whole.most, strict=True))
        return needed <= max(peaks) or allows(needed)

    by_name = _calls_split(units, finest)
    if is_allowed(finest):
        return [*by_name]
    more = dict[str, int]()
    added = [split - kept for split, kept in zip(_UnitNeeds(units, finest).held, whole.held, strict=True)]
    for unit, added_bytes in zip(units.units, added, strict=False):
        name = units.trace.calls[unit.calls[0]].name
        more[name] = more.get(name, 0) + added_bytes
    last_first = [*by_name][::-1]
    names = sorted(last_first, key=lambda name: (name not in units.grain.inside, more[name]))
    counts = range(1, len(names) + 1)
    return names[: bisect_left(counts, True, key=lambda count: not is_allowed(_split(units, finest, names[:count])))]


def split_by(units: Units, finest: Units, names: Collection[str]) -> Units:
    """Return the units with the calls of some modules split; as they are if that is not among what `finest` splits."""
    by_name = _calls_split(units, finest)
    found = finest if len(names) == len(by_name) else _split(units, finest, names)
    seen = {unit.calls for some in (units, finest) for unit in some.units}
    return found if all(unit.calls in seen for unit in found.units) else units


def _split(units: Units, finest: Units, names: Collection[str]) -> Units:
    by_name = _calls_split(units, finest)
    calls = frozenset(call for name in names for call in by_name[name])
    return find_units(units.trace, calls, units.unlike, units.grain)


def _calls_split(units: Units, finest: Units) -> dict[str, list[int]]:
    """Return by module the calls that are units, and no longer are when all are split."""
    parts = {call for unit in finest.units for call in unit.calls}
    by_name = dict[str, list[int]]()
    for call in (call for unit in units.units for call in unit.calls if call not in parts):
        by_name.setdefault(units.trace.calls[call].name, []).append(call)
    return by_name


class _UnitNeeds:
    """What some units need, see `needs_of`, in the backward of each of the whole units, and after the forward.

    A recompute that is compared with its forward runs to its end: it makes the outputs of a call inside a unit again.

    Attributes:
        most: The most bytes.
        held: The bytes that are held from there on, and were not before.
    """

    def __init__(self, units: Units, some: Units) -> None:
        ends = [units.left(place) for place, _ in enumerate(units.units)]
        self.most, self.held, again = ([0] * (len(ends) + 1) for _ in range(3))
        before_bytes = 0
        for time, need_bytes, held_bytes in needs_of(some):
            place = bisect_left(ends, time)
            self.most[place] = max(self.most[place], need_bytes)
            self.held[place] += held_bytes - before_bytes
            before_bytes = held_bytes
        known = {unit.calls for unit in units.units}
        for number, unit in enumerate(some.units):
            if unit.calls not in known:
                place = bisect_left(ends, some.left(number))
                made_bytes = sum(units.trace.storage_bytes[storage] for storage in unit.outputs)
                again[place] = max(again[place], made_bytes)
        self.most = [sum(both) for both in zip(self.most, again, strict=True)]
