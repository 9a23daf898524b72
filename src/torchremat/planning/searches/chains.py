"""A profile as a chain of scalars, for the solvers. A stage is a unit, or a step of a loop; see `loops`.

Scalars lose the facts that depend on storages (shared inputs, skips, live ranges), so the exact interpreter judges each
tree that a solver returns, never the chain. The tables of its schedules serve all limits that a search asks for.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple, get_args

from torchremat.errors import UnsupportedError
from torchremat.planning.profiles.reading import Profile
from torchremat.planning.searches.loops import FoundLoop
from torchremat.planning.searches.search_budget import SearchBudget
from torchremat.planning.simulator.points import OptionBytes, ProgramPoint
from torchremat.planning.simulator.prediction import Prediction, extra_at
from torchremat.schedules.chain import Chain, Option, Stage
from torchremat.schedules.persistent import Persistent

Cost = Literal["seconds", "flops"]


# A search for flops breaks ties by the seconds that plans would take on a generic device, so the plan is the same
# everywhere: the seconds of a forward weigh as much as this share of its flops.
_SECONDS_SHARE = 1e-3


def check_cost(cost: object) -> None:
    """Raise an UnsupportedError if a cost is not valid."""
    if cost not in get_args(Cost):
        raise UnsupportedError(f"cost={cost!r}: allowed are 'seconds' and 'flops'.")


# How many times dearer a unit is to recompute that must not be: see NOTE [ Exchanges in a plan ].
_NEVER = 1e9


class RunCost(NamedTuple):
    """What runs again: its seconds here, those on a generic device, and its flops."""

    seconds: float
    nominal_s: float
    flops: float


def amount(profile: Profile, cost: Cost, work: RunCost | OptionBytes | Prediction) -> float:
    """Return the quantity to minimise: seconds, or flops with a small weight of the nominal seconds."""
    if cost == "seconds":
        return work.seconds
    share = _SECONDS_SHARE * profile.units.trace.flops / max(profile.nominal_forward_s, 1e-9)
    return work.flops + work.nominal_s * share


def chain_of(profile: Profile, cost: Cost, loops: Sequence[FoundLoop] = ()) -> Chain:
    """Return the chain of a profile; its bytes are relative to the start of the step."""
    seen: set[int] = set()
    last = len(profile.units.units) - 1
    units = [_stage(profile, unit, cost, seen) for unit in range(last + 1)]
    stages, borders, unit = list[Stage](), set[int](), 0
    for loop in loops:
        stages += units[unit : loop.first]
        borders.add(len(stages))
        stages += [_step_stage(profile, loop, units)] * loop.steps
        borders.add(len(stages))
        unit = loop.stop
    stages += units[unit:]
    tails = [
        profile.extra_bytes[key] + profile.after_bytes[key]
        for key in ((ProgramPoint.LEFT, last), (ProgramPoint.END, 0))
    ]
    return Chain(stages=tuple(stages), tail_bytes=max(0, *tails), borders=frozenset(borders))


def _step_stage(profile: Profile, loop: FoundLoop, stages: Sequence[Stage]) -> Stage:
    """Return the stage that stands for each step of a loop, from its units' stages and from the step in the middle."""
    step, units, sizes = loop.step(loop.steps // 2), profile.units.units, profile.sizes
    linked, external = _taken(profile, loop, step)
    state, _ = _taken(profile, loop, loop.step(loop.steps // 2 + 1))  # passed on to the next step
    own = [stages[unit] for unit in step]
    needs = [set[int]().union(state, *(units[later].inputs for later in step if later >= unit)) for unit in step]
    made, saved, inside_bytes = set[int](), set[int](), 0  # by the units of the step so far
    dropping, keeping = list[int](), list[int]()  # bytes above those at the step's entry, without those of its inputs
    for unit, needed in zip(step, needs, strict=True):
        dropping.append(_bytes_of(profile, made & needed))
        keeping.append(inside_bytes + _bytes_of(profile, saved | made & needed))
        made |= {*units[unit].outputs} - linked - external
        saved |= {*sizes[unit].saved, *sizes[unit].left} - linked - external
        inside_bytes += sizes[unit].inside_bytes
    full = [size + sizes[unit].full_peak_bytes for size, unit in zip(keeping, step, strict=True)]
    taken_by_backward = set[int]().union(*(sizes[unit].saved for unit in step))
    default = Option(
        saved_bytes=inside_bytes + _bytes_of(profile, saved - state),  # the next step counts the state
        saves_input=bool(linked & taken_by_backward),
        saves_external=bool(external & taken_by_backward),
        cost=0.0,
        forward_peak_bytes=max(full),
        truncated_peak_bytes=max([*full[:-1], keeping[-1] + sizes[step[-1]].truncated_peak_bytes]),
        backward_peak_bytes=max(stage.options[0].backward_peak_bytes for stage in own),
    )
    everywhere = stages[loop.first : loop.stop]
    return Stage(
        forward=sum(stage.forward for stage in own),
        truncated=sum(stage.forward for stage in own[:-1]) + own[-1].truncated,
        linked_bytes=_bytes_of(profile, linked),
        external_bytes=_bytes_of(profile, external),
        output_bytes=_bytes_of(profile, state),
        drop_peak_bytes=max(size + stage.drop_peak_bytes for size, stage in zip(dropping, own, strict=True)),
        options=(default, *(own[0].options[1:] if loop.period == 1 else ())),
        # What is live beside the plan grows from step to step; it is the most where the slots are the fewest.
        forward_base_bytes=max(stage.forward_base_bytes for stage in everywhere),
        backward_base_bytes=max(stage.backward_base_bytes for stage in everywhere),
    )


def _taken(profile: Profile, loop: FoundLoop, step: range) -> tuple[set[int], set[int]]:
    """Return the inputs of a step that are made by earlier steps of its loop, and the others that no earlier took."""
    units, died = profile.units.units, profile.units.trace.died
    linked, others = set[int](), set[int]()
    for unit in step:
        links = dict(units[unit].links)
        for storage in units[unit].inputs:
            producer = links.get(storage, -1)
            if storage in died and producer < step.start:
                (linked if producer >= loop.first else others).add(storage)
    before = set[int]().union(*(units[unit].inputs for unit in range(loop.first, step.start)))
    return linked, others - before


def _bytes_of(profile: Profile, storages: Iterable[int]) -> int:
    """Return the bytes of storages; one that lives to the end whatever the plan is costs nothing to hold."""
    trace = profile.units.trace
    return sum(trace.storage_bytes[storage] for storage in storages if storage in trace.died)


def _stage(profile: Profile, unit: int, cost: Cost, seen: set[int]) -> Stage:
    own, size, costs = profile.units.units[unit], profile.sizes[unit], profile.costs[unit]
    trace = profile.units.trace
    links = dict(own.links)
    nominal_s, nominal_truncated_s = profile.nominal_s[unit]
    options = profile.options[unit] if profile.options else ()
    # A storage that lives to the end whatever the plan is costs nothing to hold.
    counting = [storage for storage in own.inputs if storage in trace.died]
    linked = {storage for storage in counting if links.get(storage) == unit - 1}
    external = set(counting) - linked - seen
    # A storage that several units take is charged to the first that may hold it.
    seen |= external
    own_saves = size.saved - set(own.inputs)
    default = Option(
        saved_bytes=size.inside_bytes + _bytes_of(profile, (*own_saves, *size.left)),
        saves_input=bool(linked & size.saved),
        saves_external=bool(external & size.saved),
        cost=0.0,
        forward_peak_bytes=size.full_peak_bytes,
        truncated_peak_bytes=size.truncated_peak_bytes,
        backward_peak_bytes=max(
            0, profile.after_bytes.get((ProgramPoint.BACKWARD, unit), 0), _released_peak(profile, unit)
        ),
    )
    times = _NEVER if unit in profile.units.pinned else 1.0
    truncated = RunCost(costs.seconds_truncated, nominal_truncated_s, costs.flops_truncated)
    return Stage(
        forward=times * amount(profile, cost, RunCost(costs.seconds_inside, nominal_s, costs.flops)),
        truncated=times * amount(profile, cost, truncated),
        linked_bytes=_bytes_of(profile, linked),
        external_bytes=_bytes_of(profile, external),
        output_bytes=sum(trace.storage_bytes[storage] for storage in own.outputs),
        drop_peak_bytes=size.drop_peak_bytes,
        options=(default, *(_option(profile, unit, one, default, cost) for one in options)),
        forward_base_bytes=extra_at(profile, (ProgramPoint.FORWARD, unit)),
        backward_base_bytes=extra_at(profile, (ProgramPoint.BACKWARD, unit)),
    )


def _option(profile: Profile, unit: int, one: OptionBytes, default: Option, cost: Cost) -> Option:
    """Return an option as scalars: a region of one unit that holds its inputs and some tensors that the unit makes."""
    size = profile.sizes[unit]
    saved_bytes = one.kept_bytes + _bytes_of(profile, one.kept)
    recomputed_bytes = max(0, default.saved_bytes - saved_bytes)
    return Option(
        saved_bytes=saved_bytes,
        saves_input=True,
        saves_external=True,
        cost=amount(profile, cost, one),
        forward_peak_bytes=size.dropping_bytes(1, one),
        truncated_peak_bytes=0 if one.nests else max(0, one.recompute_peak_bytes),
        backward_peak_bytes=max(
            one.early_peak_bytes,
            one.recompute_peak_bytes,
            recomputed_bytes + max(0, one.late_peak_bytes, _released_peak(profile, unit)),
        ),
        nests=one.nests,
        is_region=one.nests,
    )


def _released_peak(profile: Profile, unit: int) -> int:
    """Return the peak of the code between a unit and the previous one, when the unit's own tensors are freed."""
    during, after = (ProgramPoint.BACKWARD, unit), (ProgramPoint.RELEASED, unit)
    if during not in profile.after_bytes:
        return 0
    released = profile.extra_bytes[after] + profile.after_bytes[after] - profile.extra_bytes[during]
    return released - profile.sizes[unit].inside_bytes


# The share of the remaining time for a table.
_TABLE_SHARE = 0.5

# The highest limit of a table for a chain with loops, over that of the next finer one.
_FINER = 2


class ChainTables:
    """The optimal persistent schedules of a chain: in one table, but of a chain with loops in several.

    A long loop fits into a small part of what it needs plainly, in which the slots of a table for all limits are too
    coarse: it has tables for limits of a half each of the one before.

    Args:
        chain: The chain.
        highest_bytes: The highest limit.
        search_budget: The time limit.
    """

    def __init__(self, chain: Chain, highest_bytes: int, search_budget: SearchBudget) -> None:
        self._chain = chain
        self._highest_bytes = highest_bytes
        self._search_budget = search_budget
        self._tables: dict[int, Persistent] = {}  # by the highest limit of each
        # The most bytes that one stage needs in its backward.
        self._stage_bytes = max(stage.backward_base_bytes + stage.options[0].saved_bytes for stage in chain.stages)

    @property
    def whole(self) -> Persistent:
        """The table for all limits."""
        return self.within(self._highest_bytes)

    @property
    def lowest(self) -> Persistent:
        """The table of the lowest limits for which it has trees."""
        limit = max(1, self._stage_bytes)  # it grows by a factor
        found = self.within(limit)
        while found.lowest_slots > found.most_slots and limit < self._highest_bytes:
            limit *= _FINER
            found = self.within(limit)
        return found

    def within(self, limit_bytes: int) -> Persistent:
        """Return the table for limits up to one."""
        most_bytes, least_bytes = self._highest_bytes, max(limit_bytes, self._stage_bytes)
        while self._chain.borders and most_bytes // _FINER > least_bytes:
            most_bytes //= _FINER
        if most_bytes not in self._tables:
            self._search_budget.tell("tables")
            most_s = _TABLE_SHARE * self._search_budget.left_s
            found = Persistent(self._chain, most_bytes, most_seconds=most_s)
            self._search_budget.ran_out = self._search_budget.ran_out or not found.is_whole
            self._tables[most_bytes] = found
        return self._tables[most_bytes]
