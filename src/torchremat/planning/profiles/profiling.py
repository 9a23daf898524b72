"""The profile of a step: a traced forward, and one watched step in which every unit is a region.

Such a step needs little memory, less than any plan that keeps something, and still shows everything: the allocator's
events of a unit's forward give its peak if its saved tensors stayed (leave out their frees), or if it stopped at its
last save (cut there). So one pass gives (full, truncated) x (seconds, bytes) of every unit.

    pass             shows
    1. traced        the order of calls, links, live ranges, flops
    2. watched       bytes and seconds of each unit, and other live bytes at each program point; whether the units
                     repeat their forward in a recompute, see `comparison`
    3. forward       the seconds of an unwatched forward, to which the others are scaled, see `scaling`
    4. watched       as 2, with the calls inside units instead of the units that make several
    5. watched       as 2, with the modules around units instead of them, if that is worth a look; see `grain`
    optimizer        the bytes of one `optimizer.step()`, if there is an optimizer

Where a watched step cannot tell whether units repeat their forward, a forward more tries them, see `replayability`: all
of them, before any is watched, if some do not, if memory is short, or if several processes train the model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeAlias

from torch import nn

from torchremat.measuring.exhaustion import IfItFits, let_go
from torchremat.measuring.heap import free_unused, heap_set_aside
from torchremat.measuring.runs import Subject
from torchremat.planning.devices.machines import ForwardSeconds, Machine, has_room
from torchremat.planning.exactness.not_replayable import RETAINED
from torchremat.planning.exactness.replayability import Repeats, RetainedError, UnlikeError, leave_out, tried
from torchremat.planning.layout import check_bare
from torchremat.planning.peers.peers import Peers, check_same_calls
from torchremat.planning.profiles.grain import find_units, finest_units, grain_of, units_around
from torchremat.planning.profiles.optimizers import OptimizerBytes, knows_order, measure_optimizer, state_made
from torchremat.planning.profiles.reading import Profile
from torchremat.planning.profiles.scaling import scaled
from torchremat.planning.profiles.traces import Trace
from torchremat.planning.profiles.tracing import trace
from torchremat.planning.profiles.units import Grain, Units
from torchremat.planning.profiles.watched_step import WatchedStep, watch
from torchremat.planning.profiles.watching import every_unit, halves
from torchremat.planning.roots import by_shard
from torchremat.schedules.chain import Tree

# A fine step with more units than this is not watched: planning with so many is infeasible.
_MOST_UNITS = 2000


@dataclass(frozen=True, kw_only=True)
class ProfilePair:
    """The coarse profile of a step, the fine one if units can be split, and one of the modules around the units.

    The first two make mixtures, see `granularity`; the last is used as it is.
    """

    blocks: Profile
    leaves: Profile | None
    around: Profile | None = None

    @property
    def all(self) -> tuple[Profile, ...]:
        """Those that there are."""
        return tuple(one for one in (self.blocks, self.leaves, self.around) if one is not None)

    def each(self, make: Callable[[Profile], Profile]) -> ProfilePair:
        """Return the same with another profile for each, so that none is left out."""
        leaves, around = (None if one is None else make(one) for one in (self.leaves, self.around))
        return ProfilePair(blocks=make(self.blocks), leaves=leaves, around=around)


def profile_subject(
    model: nn.Module,
    subject: Subject,
    machine: Machine,
    *,
    leaves: bool = True,
    around: bool = False,
    peers: Peers | None = None,
    repeats: Repeats | None = None,
) -> ProfilePair:
    """Profile a step; afterwards model, gradients, buffers, generators, hooks and optimizer are as before.

    Several processes run the same steps in the same order, since backward waits until it has reduced its gradients with
    those of all: an error in one is raised in each, and if memory runs out in one, all watch the step that this one can
    run.

    Args:
        model: The model.
        subject: The step, of this model. With an optimizer, the bytes of its state and of its step are measured.
        machine: Where it runs.
        leaves: Whether the calls inside units are watched as well; this takes as long as the rest.
        around: Whether the modules around units are watched as well, if worth a look and if this process alone trains
            the model.
        peers: The processes that train the model; None if this one alone does.
        repeats: Results about the model's modules from profiles of other steps; this one adds its own.

    Raises:
        StepError: The step returns no loss, calls no module of the model, or other modules each time.
        PlanError: Modules of the model are wrapped already.
        UnsupportedError: A profiler is active, the device has no allocation events, or the model checkpoints itself.
    """
    peers = peers or Peers()
    peers.each(lambda: check_bare(model))
    made = partial(state_made, subject)
    with peers.each(machine.entered), heap_set_aside(), peers.each(made), subject.undisturbed():
        profiling = _Profiling(model, subject, machine, peers, repeats or Repeats(), tries=peers.are_several)
        has_refused = False
        while True:
            try:
                found = profiling.pair(leaves=leaves, around=around)
            except UnlikeError:
                profiling = replace(profiling, tries=True)
            except RetainedError:
                has_refused = True
            else:
                if has_refused:
                    profiling.repeats.tell()
                return found


_Way: TypeAlias = tuple[Units, Tree]


@dataclass(frozen=True, eq=False)
class _Profiling:
    """The work of `profile_subject`, with its common state.

    Attributes:
        tries: Whether units are tried before they are watched. If not, watched steps compare, and may raise an
            `UnlikeError`.
        traced: The traced forward, once it has run.
        retained: The modules that watched steps have recomputed for several backwards, until they are refused.
    """

    model: nn.Module
    subject: Subject
    machine: Machine
    peers: Peers
    repeats: Repeats
    tries: bool
    traced: list[Trace] = field(default_factory=list[Trace])
    retained: set[str] = field(default_factory=set[str])

    def pair(self, *, leaves: bool, around: bool) -> ProfilePair:
        units, finest = self.units(leaves=leaves)
        outer = self.outer(units) if around else None
        ways = self.ways(units, finest)
        if not knows_order(self.subject):
            self.watched(ways)  # it shows which state to bring ahead
        place, blocks = self.watched(ways)
        seconds = self.seconds()
        blocks = replace(scaled(blocks, seconds), optimizer=self.peers.each(self.optimizer))
        parts = whole = None
        if leaves and blocks.units is not finest and len(finest.units) <= _MOST_UNITS:
            parts = self.also(finest, ways[place], seconds)
        if outer is not None and blocks.units is units:
            whole = self.also(outer, ways[place], seconds)
        return ProfilePair(blocks=blocks, leaves=parts, around=whole and replace(whole, optimizer=blocks.optimizer))

    def also(self, units: Units, way: _Way, seconds: ForwardSeconds | None) -> Profile | None:
        """Watch a step with each of some other units in a region; None if it does not fit in some process."""
        if not self.fits(units):
            return None
        # A process without room for it runs the earlier step once more, since the others wait for it.
        place, found = self.watched([(units, every_unit(units)), way])
        return None if place else scaled(found, seconds)

    def outer(self, units: Units) -> Units | None:
        """Return the units around the units, if their recompute repeats their forward."""
        found = None if self.peers.are_several else units_around(units)
        return None if found is None or not self.fits(found) or self.some_fail(found) else found

    def units(self, *, leaves: bool) -> tuple[Units, Units]:
        """Return the units, and the finest ones, whose recompute repeats their forward."""
        traced = self.trace()
        has_failed = False
        while True:
            grain = self.grain(traced)
            units = self.peers.each(lambda own=grain: find_units(traced, unlike=self.repeats.unlike, grain=own))
            check_same_calls(self.peers.all(lambda own=units: [unit.name for unit in own.units]))
            finest = finest_units(units)
            if not (self.some_fail(units) or (leaves and len(finest.units) <= _MOST_UNITS and self.some_fail(finest))):
                break
            has_failed = True
        if has_failed:
            self.repeats.tell()
        return units, finest

    def trace(self) -> Trace:
        """Return the traced forward, which runs once."""
        if not self.traced:
            aside = partial(self.subject.untouched, looks="told")
            step, record = self.subject.run, self.machine.record
            self.traced.append(self.peers.each(lambda: trace(self.model, lambda _: step(), record, aside)))
        return self.traced[0]

    def grain(self, traced: Trace) -> Grain:
        """Return how far calls are split: as in an earlier step with the same calls, and equal in each process."""
        kind = tuple(call.name for call in traced.calls)
        known = self.repeats.grains.get(kind)
        if known is None:
            found = self.peers.all(lambda: grain_of(traced, self.repeats.unlike))
            known = self.repeats.grains[kind] = max(found, key=lambda grain: grain.need_bytes)
        return known

    def are_known(self, units: Units) -> bool:
        """Return whether each of the units has been tried, or none can be."""
        return not self.machine.is_here or bool(units.trace.sharded) or self.repeats.know(units)

    def some_fail(self, units: Units) -> bool:
        """Try the units unless all have been tried, and return whether some cannot be units. See `replayability`."""
        if not self.tries or self.are_known(units):
            return False
        found, parts = list[dict[str, str]](), [range(len(units.units))]
        while parts:
            part = parts.pop()
            told = None
            if len(part) == 1 or self.fits(units, part):
                told = self.peers.all(lambda own=part: tried(self.model, self.subject, units, own))
            if told is not None and None not in told:
                found += [one for one in told if one is not None]
            elif len(part) > 1:
                middle = len(part) // 2
                parts += [part[:middle], part[middle:]]
            else:
                leave_out()
        return self.repeats.add(units, found)

    def ways(self, units: Units, finest: Units) -> list[_Way]:
        """Return the ways of watching a step. Each needs less memory, and more time.

        units             each a region
        units in pieces   a region around several of them
        calls in halves   of the calls inside units, each a region; around both halves of a half one more, and so on
        """
        ways = [(units, every_unit(units))]
        if len(units.units) > 3:
            ways.append((units, every_unit(units, max(2, math.isqrt(len(units.units))))))
            if not self.fits(units):
                del ways[0]
        if len(finest.units) <= _MOST_UNITS:
            ways.append((finest, halves(finest)))
        return [(own, by_shard(own, tree)) for own, tree in ways]

    def watched(self, ways: Sequence[_Way]) -> tuple[int, Profile]:
        """Run the watched step in the first of some ways that fits in each process; return its index as well."""
        place, found = 0, list[Profile]()

        def run() -> int:
            found.clear()
            reached, profile = self.watched_here(ways, place)
            found.append(profile)
            return reached

        while len(set(reached := self.peers.all(run))) > 1:
            place = max(reached)
            # DistributedDataParallel reallocates its buckets in the forward after its first backward: in this one.
            self.seconds()
        retained = {name for names in self.peers.all(lambda: [*self.retained]) for name in names}
        if retained:
            self.repeats.refuse(retained, RETAINED)
            self.retained.clear()
            raise RetainedError
        return reached[0], found[0]

    def watched_here(self, ways: Sequence[_Way], place: int) -> tuple[int, Profile]:
        """Run the watched step in the first of some ways, from an index on, that fits here."""
        *others, last = enumerate(ways[place:], place)
        for reached, (units, tree) in others:
            with IfItFits():
                return reached, self.measured(units, tree)
            free_unused()
        return last[0], self.measured(*last[1])

    def measured(self, units: Units, tree: Tree) -> Profile:
        """Run the watched step under a tree; if the units have not been tried, compare.

        Raises:
            UnlikeError: They do not all repeat their forward, or that cannot be told here.
        """
        if self.tries or self.are_known(units):
            return self.completed(watch(self.model, self.subject, units, tree, self.machine))
        try:
            found = self.compared(units, tree)
        except Exception as error:  # noqa: BLE001  if it is not about a recompute, the next run raises it again
            let_go(error)
            found = None
        if found is None:
            free_unused()
            raise UnlikeError
        self.repeats.add(units, [{}])
        return found

    def compared(self, units: Units, tree: Tree) -> Profile | None:
        """Run the watched step and compare; None if a unit does not repeat its forward, or that cannot be told."""
        if len(tree) < len(units.units):
            return None  # a region around several units shows what these return, not what they save
        step = watch(self.model, self.subject, units, tree, self.machine, compares=True)
        assert step.watcher.comparison is not None
        unasked = step.watcher.comparison.unasked(len(units.units))
        if unasked and tried(self.model, self.subject, units, unasked) != {}:
            return None
        return self.completed(step)

    def completed(self, step: WatchedStep) -> Profile:
        """Return the profile of a step, and note which of its units were recomputed for several backwards."""
        self.retained.update(step.watcher.retained)
        return replace(step.profile(), overheads=self.machine.overheads(), generator_bytes=self.machine.generator_bytes)

    def seconds(self) -> ForwardSeconds | None:
        """Run an unwatched forward, and return its seconds, if they are meaningful."""
        return self.peers.each(lambda: self.machine.forward_seconds(self.subject))

    def optimizer(self) -> OptimizerBytes | None:
        """Measure the optimizer, if there is one."""
        own = self.subject.optimizer
        return None if own is None else measure_optimizer(self.subject, own, self.machine)

    def fits(self, units: Units, part: range | None = None) -> bool:
        """Whether a step in which each unit, or each of a part of them, is a region fits in each process."""
        held = {storage for unit in part or range(len(units.units)) for storage in units.units[unit].inputs}
        needed_bytes = 2 * sum(units.trace.storage_bytes[storage] for storage in held)
        return self.peers.everywhere(lambda: has_room(self.machine, needed_bytes))
