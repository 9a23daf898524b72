"""Cuts the recompute of a unit into parts, so that fewer of its saved tensors are in memory at once.

A recompute fills the saves of one part, see NOTE [ A recompute in parts ]. So the watched backward, in which all saves
are there from the beginning, divides at the requests for the parts, the last part first:

    recompute    the forward's events up to the last save of the part, without the frees of what the part saves
    from then    as it was watched, without the saves of the parts that are still to come

A part must end before backward asks for an earlier save, and no memory may be saved in two parts: it would be made
twice. Cuts are added one by one, each where the peak falls most.

Missing on purpose: parts of units that also hold operators.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import TypeAlias

from torchremat.errors import bug
from torchremat.planning.devices.overheads import NOMINAL
from torchremat.planning.profiles.reading import Profile
from torchremat.planning.profiles.traces import nominal_seconds
from torchremat.planning.roots import same_calls
from torchremat.planning.searches.flows import save_positions
from torchremat.planning.searches.search_budget import SearchBudget
from torchremat.planning.searches.unit_operators import UnitOperators, unit_operators
from torchremat.planning.simulator.points import OptionBytes
from torchremat.planning.simulator.simulator import Options
from torchremat.schedules.dataflow import Dataflow
from torchremat.schedules.operator_selection import evaluate

_MOST_CUTS = 3
# A further cut costs one more forward, so it has to lower the peak by this share.
_LEAST_GAIN = 0.02
# The cuts that are tried first, by the bytes that they divide.
_MOST_TRIED = 24

# The saves that begin a part, without the first save: see `Settings.cuts`.
Cuts: TypeAlias = tuple[int, ...]


def with_cuts(profile: Profile, cuts: Options) -> Profile:
    """Return a profile with more options of its units."""
    had = profile.options or ((),) * len(cuts)
    return replace(profile, options=tuple((*own, *more) for own, more in zip(had, cuts, strict=True)))


def cut_options(profiles: Sequence[Profile], search_budget: SearchBudget | None = None) -> list[Options]:
    """Return by profile and unit the ways of recomputing the unit in parts, with rising numbers of cuts.

    Where to cut is searched for once among units that run and save the same. One plan serves all calls of a root, so a
    unit is cut alike in all of them.

    Args:
        profiles: Profiles of one form. They are cut alike, where that lowers the peak of the first one most.
        search_budget: The time limit; units after that are not cut.
    """
    search_budget = SearchBudget() if search_budget is None else search_budget
    units = [
        {own.unit: _UnitInParts(own) for own in unit_operators(one, "flops") if own.has_options} for one in profiles
    ]
    known, cuts = profiles[0].units, dict[object, list[Cuts]]()
    found = [dict[int, tuple[OptionBytes, ...]]() for _ in profiles]
    for same in search_budget.parts(same_calls(known)):
        if search_budget.is_over:
            break
        first, signature = same[0], known.signature(same[0])
        is_known = all(own.keys() >= {*same} for own in units)
        if not is_known or len({own[first].form for own in units}) > 1:
            continue
        if signature not in cuts:
            cuts[signature] = [option.cuts for option in units[0][first].options()]
        alike = iter(_options([own[unit] for own in units for unit in same], cuts[signature]))
        for options in found:
            options.update(zip(same, alike, strict=False))
    return [tuple(options.get(unit, ()) for unit, _ in enumerate(known.units)) for options in found]


def cut_at(own: UnitOperators, cuts: Cuts) -> OptionBytes:
    """Return a unit in parts with cuts that it has in another profile of the same step."""
    option = _UnitInParts(own).option(cuts)
    if option is None:
        raise bug(f"unit {own.unit} has cuts {cuts}, and cannot be cut so when its step is watched again")
    return option


def _options(units: Sequence[_UnitInParts], cuts: Iterable[Cuts]) -> list[tuple[OptionBytes, ...]]:
    """Return for each of some units its options with these cuts, without those that not all of the units have."""
    having = [own for one in cuts if None not in (own := [unit.option(one) for unit in units])]
    return [tuple(option for own in having if (option := own[place]) is not None) for place in range(len(units))]


@dataclass(frozen=True, slots=True)
class _PartNeed:
    """One part: the peak of its recompute over the live bytes at its beginning, and the operators that run again."""

    peak_bytes: int
    ends: int


class _UnitInParts:
    """The ways of recomputing one unit in parts."""

    def __init__(self, own: UnitOperators) -> None:
        self._own = own
        profile, unit = own.profile, own.unit
        self._size = profile.sizes[unit]
        self._backward = profile.backwards[unit]
        self._positions = save_positions(profile, unit)
        self._dropped = profile.units.dropped(unit)
        self._whole = self._backward.live_bytes()
        self._needs: dict[range, _PartNeed] = {}

    def options(self) -> Iterator[OptionBytes]:
        """Yield options with rising numbers of cuts, each with one more where the peak falls most."""
        if not self._is_known:
            return
        cuts: Cuts = ()
        peak = self._size.truncated_peak_bytes, self._bytes_of(self._freed) + int(self._whole.max())
        least, tried = max(peak), self._tried
        while len(cuts) < _MOST_CUTS:
            more = [tuple(sorted((*cuts, cut))) for cut in tried if cut not in cuts]
            found = [(self._peak(option), option) for one in more if (option := self.option(one))]
            best = min(found, key=lambda one: one[0], default=None)
            if best is None or best[0] > (1 - _LEAST_GAIN) * least:
                return
            (least, option), cuts = best, best[1].cuts
            yield option

    @property
    def form(self) -> Dataflow:
        """The operators without the parts that depend on shapes."""
        return self._own.form

    @cached_property
    def _is_known(self) -> bool:
        """Whether all memory that a recompute makes is freed with saves that are known."""
        saves, backward = self._own.saves, self._backward
        if saves is None or self._own.is_pinned or self._size.copied_bytes or backward.remade != self._freed:
            return False
        made = {value for operator in self._own.flow.operators for value in operator.outputs}
        return all(
            save in backward.freed_at
            for save, value in enumerate(saves)
            if value in made and save in backward.asked_at and save not in self._dropped
        )

    @cached_property
    def _freed(self) -> frozenset[int]:
        """The events that free saved memory that the recompute made."""
        return frozenset(self._backward.freed_at.values())

    @cached_property
    def _tried(self) -> list[int]:
        """The saves that a cut may come before: asked for, as all later ones are, before any earlier one."""
        asked, freed = self._backward.asked_at, self._backward.freed_at
        found: list[tuple[int, int]] = []
        for cut in range(1, len(self._positions)):
            before = [save for save in range(cut) if save in asked]
            if cut not in asked or not before or min(map(asked.__getitem__, before)) <= asked[cut]:
                continue
            above = {event for save, event in freed.items() if save >= cut}
            below = {event for save, event in freed.items() if save < cut}
            if above and below and not above & below:
                found.append((min(self._bytes_of(above), self._bytes_of(below)), cut))
        return sorted(cut for _, cut in sorted(found, reverse=True)[:_MOST_TRIED])

    def _bytes_of(self, events: Iterable[int]) -> int:
        return -sum(int(self._backward.delta_bytes[event]) for event in events)

    def _peak(self, option: OptionBytes) -> int:
        late = self._bytes_of(self._freed) + option.late_peak_bytes
        return max(option.early_peak_bytes, option.recompute_peak_bytes, late)

    def option(self, cuts: Cuts) -> OptionBytes | None:
        """Return the unit with these cuts; None if it cannot be cut so."""
        if not self._is_known:
            return None
        parts = [range(*pair) for pair in pairwise((0, *cuts, len(self._positions)))][::-1]
        asked = self._backward.asked_at
        firsts = [min((at for save in part if (at := asked.get(save)) is not None), default=-1) for part in parts]
        if any(one >= other for one, other in pairwise((-1, *firsts))):
            return None  # backward asks for a part before it is done with a later one
        own, freed = self._own, self._backward.freed_at
        more = self._size.state_bytes + self._size.recast_bytes
        peaks, recomputes, live = list[int](), list[int](), 0
        for number, part in enumerate(parts):
            recomputes.append(live + self._need(part).peak_bytes + more * (number + 1 < len(parts)))
            there = {event for save, event in freed.items() if save >= part.start}
            following = firsts[number + 1] if number + 1 < len(parts) else len(self._backward.delta_bytes)
            during = self._backward.live_bytes(without=self._freed - there)
            peaks.append(self._bytes_of(there) + int(during[firsts[number] : following + 1].max()))
            live = self._bytes_of(there) + int(during[following])
        *_, last = recomputes
        ends = [self._need(part).ends for part in parts]
        costs, runs, log = own.profile.costs[own.unit], own.runs, own.profile.units.trace.operators
        region_s = max(0.0, costs.seconds_truncated - sum(own.seconds[: max(ends)]))
        nominal_s = [nominal_seconds(log, run) for run in runs]
        return OptionBytes(
            kept=frozenset(),
            kept_bytes=0,
            forward_peak_bytes=self._size.drop_peak_bytes,
            early_peak_bytes=max(*peaks[:-1], *recomputes[:-1]),
            recompute_peak_bytes=last,
            ahead_peak_bytes=self._size.truncated_peak_bytes,
            late_peak_bytes=peaks[-1] - self._bytes_of(self._freed),
            recomputes=True,
            seconds=sum(region_s + sum(own.seconds[:end]) for end in ends),
            overhead_s=region_s * len(parts),
            nominal_s=sum(NOMINAL.region_s + sum(nominal_s[:end]) for end in ends),
            flops=sum(run.flops for end in ends for run in runs[:end]),
            ordinals=(),
            operators=(),
            exchanges=any(run.exchanges for run in runs[: max(ends)]),
            cuts=cuts,
            late_from=firsts[-1],
        )

    def _need(self, part: range) -> _PartNeed:
        if part not in self._needs:
            flow, saves = self._own.flow, self._own.saves or []
            last: dict[int, int] = {}
            for save in part:
                if save not in self._dropped:
                    last[saves[save]] = max(self._positions[save], last.get(saves[save], 0))
            values = tuple(
                replace(value, needed=number in last, saved_after=last.get(number, 0), holdable=False)
                for number, value in enumerate(flow.values)
            )
            own = replace(flow, values=values)
            selection = evaluate(own, ())
            peak_bytes = self._own.replay(selection, own).recompute_peak()
            self._needs[part] = _PartNeed(peak_bytes=peak_bytes, ends=selection.ends)
        return self._needs[part]
