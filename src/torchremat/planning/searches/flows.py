"""The operators of a step's forward as a dataflow: all of it, or one unit.

    value                               needed          holdable
    parameter, leaf that requires grad  as it is        yes, it exists anyway; no if FSDP2 has sharded it
    input of the unit                   as it is        yes, a region holds it
    other tensor from outside           as it is        no: no region can hand it back
    made by an operator                 as it is        unless it is written to later
    received by a collective            as it is        likewise, and if the unit has made its memory
    output of the unit                  as it is        yes, at 0 bytes: its next consumer holds it

Seconds come from operators that ran once each, so operators of one signature share their median, and all of them are
scaled to the seconds of the units measured without watching: those that a recompute reaches to its own.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from operator import attrgetter
from statistics import median

from torchremat.measuring.step_record import Run, SavedValue
from torchremat.planning.profiles.reading import Profile
from torchremat.planning.roots import has_shards
from torchremat.schedules.dataflow import Dataflow, Operator, Value


def flow_of(profile: Profile, unit: int | None = None) -> Dataflow:
    """Return the operators of a forward as a dataflow, with flops as costs; those of compiled code are infinite.

    Values are numbered as in `profile.units.trace.operators`, if the dataflow is that of the whole forward.

    Without a unit it is the whole forward, including code between the units.
    """
    log = profile.units.trace.operators
    runs = log.runs if unit is None else runs_of(profile, unit)
    numbers = list(range(len(log.values))) if unit is None else values_of(profile, unit)
    place = {value: index for index, value in enumerate(numbers)}
    made = {value for run in runs for value in run.makes}
    older = {log.values[value].storage for value in numbers if value not in made}
    return Dataflow(
        operators=tuple(
            Operator(
                name=run.name,
                inputs=tuple(place[value] for value in run.reads),
                outputs=tuple(place[value] for value in run.makes),
                cost=math.inf if run.is_compiled else float(run.flops),
                replaceable=run.op_info.is_kept
                and (bool(run.makes) or run.op_info.receives)
                and (not run.op_info.receives or older.isdisjoint(log.values[value].storage for value in run.makes)),
            )
            for run in runs
        ),
        values=tuple(_values(profile, unit, numbers, made)),
    )


def runs_of(profile: Profile, unit: int) -> list[Run]:
    """Return the operators of a unit as the forward has run them."""
    operators = profile.units.operators(unit)
    return profile.units.trace.operators.runs[operators.start : operators.stop]


def values_of(profile: Profile, unit: int) -> list[int]:
    """Return the values that a unit's operators read, make or save, in the order of its dataflow."""
    runs = runs_of(profile, unit)
    saved = (save.value for save in _saves_in(profile, unit))
    return list(dict.fromkeys([*(value for run in runs for value in (*run.reads, *run.makes)), *saved]))


def saves_of(profile: Profile, unit: int) -> list[int] | None:
    """Return the values that autograd saves in a unit, in the order of the saves; None if not all of them are known."""
    place = {value: index for index, value in enumerate(values_of(profile, unit))}
    if any(save.others for save in profile.units.saves_in(unit)):
        return None  # one save consists of several values
    saves = [place[save.value] for save in _saves_in(profile, unit)]
    return saves if len(saves) == len(profile.units.saved(unit)) else None


def save_positions(profile: Profile, unit: int) -> list[int]:
    """Return for each save of `saves_of` how many of the unit's operators have begun before it."""
    start = profile.units.operators(unit).start
    return [save.position - start for save in _saves_in(profile, unit)]


def _saves_in(profile: Profile, unit: int) -> list[SavedValue]:
    """Return what autograd saves in a unit, in order."""
    ran, calls = profile.units.operators(unit), set(profile.units.inside[unit])
    saves, position = profile.units.trace.operators.saves, attrgetter("position")
    around = saves[bisect_left(saves, ran.start, key=position) : bisect_right(saves, ran.stop, key=position)]
    return [save for save in around if save.call in calls]


def _values(profile: Profile, unit: int | None, numbers: Iterable[int], made: set[int]) -> Iterable[Value]:
    log, units = profile.units.trace.operators, profile.units.units
    saves, start = (log.saves, 0) if unit is None else (_saves_in(profile, unit), profile.units.operators(unit).start)
    saved = {save.value: save.position - start for save in saves if not save.is_dropped}
    inputs, outputs = (set[int](), set[int]()) if unit is None else (set(units[unit].inputs), set(units[unit].outputs))
    leaves_stay = unit is None or not has_shards(profile.units, unit)
    for number in numbers:
        value = log.values[number]
        is_found = unit is None or not value.is_part
        if number in made:
            holdable = is_found and not value.is_overwritten
            size = 0 if value.storage in outputs else value.size_bytes
        else:
            # See NOTE [ Memory that is not the allocator's ].
            holdable = (value.is_leaf and leaves_stay) or (is_found and value.storage in inputs)
            size = 0 if value.is_foreign else value.size_bytes
        yield Value(size_bytes=size, needed=number in saved, holdable=holdable, saved_after=saved.get(number, 0))


def seconds_of(profile: Profile) -> list[float]:
    """Return the seconds of each operator, scaled to the measured time of its unit, or of the forward elsewhere."""
    pooled_s = pooled_seconds(profile.units.trace.operators.runs)
    found = _scaled(pooled_s, profile.forward_seconds)
    for unit in range(len(profile.costs)):
        operators = profile.units.operators(unit)
        found[operators.start : operators.stop] = unit_seconds(profile, unit, pooled_s)
    return found


def unit_seconds(profile: Profile, unit: int, pooled_s: list[float]) -> list[float]:
    """Return the seconds of the operators of a unit, scaled to the measured time of its forward.

    Those up to its last save are scaled to the time up to there, and the others to the rest: code of the user's that
    runs behind the last save, or waits there, is no part of a recompute, nor of what a schedule could save by it.
    """
    operators, costs = profile.units.operators(unit), profile.costs[unit]
    _, ends = profile.reached[unit]
    own_s = pooled_s[operators.start : operators.stop]
    head = sum(index < ends for index in operators)
    head_s = min(max(0.0, costs.seconds_truncated - costs.region_s), costs.seconds)
    return [*_scaled(own_s[:head], head_s), *_scaled(own_s[head:], costs.seconds - head_s)]


def _scaled(seconds: list[float], total_s: float) -> list[float]:
    factor = total_s / max(sum(seconds), 1e-12)
    return [one * factor for one in seconds]


def pooled_seconds(runs: list[Run]) -> list[float]:
    """Return the seconds of each operator: the median over all operators with its signature."""
    pools: dict[tuple[object, ...], list[float]] = {}
    for run in runs:
        pools.setdefault(run.signature, []).append(run.seconds)
    medians = {signature: median(seconds) for signature, seconds in pools.items()}
    return [medians[run.signature] for run in runs]
