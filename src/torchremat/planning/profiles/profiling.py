"""The profile of a step: a traced forward, and one watched step in which every unit is a region.

Such a step needs little memory, less than any plan that keeps something, and still shows everything: the allocator's
events of a unit's forward give its peak if its saved tensors stayed (leave out their frees), or if it stopped at its
last save (cut there). So one pass gives (full, truncated) x (seconds, bytes) of every unit.

    pass             shows
    1. traced        the order of calls, links, live ranges, flops
    2. watched       bytes and seconds of each unit, and other live bytes at each program point; whether the units
                     repeat their forward in a recompute, see `comparison`
    3. forward       the seconds of an unwatched forward, to which the others are scaled, see `scaling`
    4. watched       as 2, with the calls inside units instead of the units that make several, see `splitting`
    5. watched       as 2, with the modules around units instead of them, if that is worth a look; see `grain`
    optimizer        the bytes of one `optimizer.step()`, if there is an optimizer

A step that takes gradients itself is not watched: its runs tell what it needs, see `step_runs`.

Where a watched step cannot tell whether units repeat their forward, a forward more tries them, see `replayability`: all
of them, before any is watched, if some do not, if memory is short, or if several processes train the model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar, cast

from torch import nn

from torchremat.errors import bug
from torchremat.measuring.communication import has_first_buckets
from torchremat.measuring.exhaustion import IfItFits, let_go
from torchremat.measuring.heap import free_unused, heap_set_aside
from torchremat.measuring.runs import Subject
from torchremat.planning.devices.machines import ForwardSeconds, Machine, has_room
from torchremat.planning.exactness.not_replayable import RETAINED, UNEQUAL
from torchremat.planning.exactness.replayability import Repeats, RetainedError, UnlikeError, leave_out, tried
from torchremat.planning.layout import check_bare
from torchremat.planning.peers.peers import Peers, check_same_calls
from torchremat.planning.profiles.grain import find_units, finest_units, grain_of, need_bytes_of, units_around
from torchremat.planning.profiles.optimizers import OptimizerBytes, knows_order, measure_optimizer, state_made
from torchremat.planning.profiles.profile_pair import ProfilePair
from torchremat.planning.profiles.reading import Profile
from torchremat.planning.profiles.run_profile import as_profiled, profile_by_runs
from torchremat.planning.profiles.scaling import scaled
from torchremat.planning.profiles.splitting import Way, are_few, names_within, peaks_of, split_by, ways_of
from torchremat.planning.profiles.traces import Trace
from torchremat.planning.profiles.tracing import trace
from torchremat.planning.profiles.units import Grain, Units
from torchremat.planning.profiles.watched_step import WatchedStep, watch
from torchremat.planning.profiles.watching import every_unit
from torchremat.regions.settings import Check
from torchremat.schedules.chain import Tree

T = TypeVar("T")


def profile_subject(
    model: nn.Module,
    subject: Subject,
    machine: Machine,
    *,
    leaves: bool = True,
    allows: Callable[[int], bool] | None = None,
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
        allows: Whether a run may have a peak, in bytes: units are split where it allows that. If given, the modules
            around units are watched as well where it allows that, if worth a look and if this process alone trains the
            model.
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
        profiling = _Profiling(model, subject, machine, peers, repeats or Repeats())
        has_refused = False
        while True:
            try:
                found = profiling.pair(leaves=leaves, allows=allows)
            except UnlikeError:
                profiling = replace(profiling, must_try=True)
            except _JoinedError:
                profiling.repeats.merge(peers.all(lambda own=profiling.repeats: own))
            except RetainedError:
                has_refused = True
            else:
                if has_refused:
                    profiling.repeats.tell()
                return found


class _JoinedError(Exception):
    """Processes have joined that had units of their own until now."""


@dataclass(frozen=True, eq=False)
class _Profiling:
    """The work of `profile_subject`, with its common state.

    Attributes:
        must_try: Whether units are tried before they are watched, also in one process.
        traced: The traced forward, once it has run.
        retained: The modules that watched steps have recomputed for several backwards, until they are refused.
        peaks: Those of the last watched step, see `peaks_of`.
    """

    model: nn.Module
    subject: Subject
    machine: Machine
    peers: Peers
    repeats: Repeats
    must_try: bool = False
    traced: list[Trace] = field(default_factory=list[Trace])
    retained: set[str] = field(default_factory=set[str])
    peaks: list[int] = field(default_factory=list[int])

    @property
    def tries(self) -> bool:
        """Whether units are tried before they are watched. If not, watched steps compare, and may raise an error."""
        return self.must_try or self.peers.are_several or self.takes_gradients

    @property
    def takes_gradients(self) -> bool:
        """Whether the step takes gradients itself: then it is not watched, and its runs tell what it needs."""
        return any(one.takes_gradients for one in self.traced)

    def pair(self, *, leaves: bool, allows: Callable[[int], bool] | None) -> ProfilePair:
        units, finest = self.units(leaves=leaves)
        if self.takes_gradients:
            return self.by_runs(units, finest)
        outer = None if allows is None else self.outer(units, allows)
        ways = ways_of(units, finest, self.fits)
        if not knows_order(self.subject):
            self.watched(ways)  # it shows which state to bring ahead
        if self.peers.are_several and has_first_buckets(self.subject.models):
            self.watched(ways)
            self.seconds()  # its forward makes them
        place, blocks = self.watched(ways)
        seconds = self.seconds()
        blocks = replace(scaled(blocks, seconds), optimizer=self.meet(self.optimizer))
        parts = whole = None
        if leaves and blocks.units is not finest and are_few(finest):
            finer = finest if allows is None or blocks.units is not units else self.finer(units, finest, allows)
            parts = None if finer is units else self.also(finer, ways[place], seconds)
        if outer is not None and blocks.units is units:
            whole = self.also(outer, ways[place], seconds)
        return ProfilePair(blocks=blocks, leaves=parts, around=whole and replace(whole, optimizer=blocks.optimizer))

    def by_runs(self, units: Units, finest: Units) -> ProfilePair:
        """Return the profiles of a step that takes gradients itself."""
        profiled = partial(profile_by_runs, self.model, self.subject, machine=self.machine, peers=self.peers)
        # Its runs show who communicates in the backward, and make the last buckets of gradients.
        blocks = replace(self.meet(partial(profiled, units)), optimizer=self.meet(self.optimizer))

        def beside(others: Units | None) -> Profile | None:
            if others is None or others is units or not are_few(others) or self.some_fail(others):
                return None
            return profiled(others, beside=blocks)

        around = None if self.peers.are_several else units_around(units)
        pair = ProfilePair(blocks=blocks, leaves=beside(finest), around=beside(around))
        for own in pair.all:
            if own.runs is not None and own.runs.runner is not None:
                own.runs.runner.let(partial(as_profiled, self.subject, self.machine))
        return pair

    def also(self, units: Units, way: Way, seconds: ForwardSeconds | None) -> Profile | None:
        """Watch a step with each of some other units in a region; None if it does not fit in some process."""
        if not self.fits(units):
            return None
        # A process without room for it runs the earlier step once more, since the others wait for it.
        place, found = self.watched([(units, every_unit(units)), way])
        return None if place else scaled(found, seconds)

    def finer(self, units: Units, finest: Units, allows: Callable[[int], bool]) -> Units:
        """Return the units split in as many modules as a watched step may; the same in each process."""
        told = self.peers.all(lambda: names_within(units, finest, self.peaks, allows))
        found = split_by(units, finest, min(told, key=len))
        return found if found is units or found is finest else self.beside_others(found)

    def outer(self, units: Units, allows: Callable[[int], bool]) -> Units | None:
        """Return the units around the units, if their recompute repeats their forward and its bytes are allowed."""
        found = None if self.peers.are_several else units_around(units)
        if found is None or not allows(self.subject.before(self.machine.device).total_bytes + need_bytes_of(found)):
            return None
        return found if self.fits(found) and not self.some_fail(found) else None

    def units(self, *, leaves: bool) -> tuple[Units, Units]:
        """Return the units, and the finest ones, whose recompute repeats their forward."""
        traced = self.trace()
        has_failed = False
        while True:
            grain = self.grain(traced)
            units = self.peers.each(lambda own=grain: find_units(traced, unlike=self.repeats.unlike, grain=own))
            check_same_calls(self.peers.all(lambda own=units: [unit.name for unit in own.units]))
            finest = finest_units(units)
            has_parts = finest is not units
            units = self.beside_others(units)
            finest = self.beside_others(finest) if has_parts else units
            failing = self.some_wait(units) or self.some_wait(finest) or self.some_fail(units)
            if not (failing or (leaves and are_few(finest) and self.some_fail(finest))):
                break
            has_failed = True
        if has_failed:
            self.repeats.tell()
        return units, finest

    def beside_others(self, units: Units) -> Units:
        """Return some units with what is known of them in other processes."""
        if not self.peers.are_several:
            return units
        places = range(len(units.units))
        told = self.peers.all(lambda: (units.exchanging, [units.ran(unit) for unit in places]))
        ran = list(zip(*(own for _, own in told), strict=True))
        return replace(
            units,
            elsewhere=frozenset(unit for own, _ in told for unit in own),
            unequal=frozenset(unit for unit in places if len({*ran[unit]}) > 1),
        )

    def some_wait(self, units: Units) -> bool:
        """Refuse units in which processes communicate and do not run the same; return whether there are any."""
        found = units.exchanging & units.unequal
        if found:
            self.repeats.refuse({name for unit in found for name, _ in units.units[unit].keys}, UNEQUAL)
        return bool(found)

    def meet(self, work: Callable[[], T]) -> T:
        """Run some work that shows who communicates, see `Peers.meet`; all begin anew with whoever has joined.

        Raises:
            _JoinedError: Others have joined, as where processes communicate in the backward alone.
        """
        before = self.peers.ranks
        found = self.peers.meet(work)
        if self.peers.ranks != before:
            raise _JoinedError
        return found

    def trace(self) -> Trace:
        """Return the traced forward, which runs once, or twice where processes communicate.

        What torch runs for the first collectives of a process alone, an operator here and there, is in the first.
        """
        if not self.traced:
            aside = partial(self.subject.untouched, looks="told")
            step, record = self.subject.run, self.machine.record

            def traced() -> Trace:
                return self.peers.meet(lambda: trace(self.model, lambda _: step(), record, aside))

            self.traced.append(traced())
            if any(self.peers.all(lambda: self.traced[0].communicates)):
                self.traced[0] = traced()
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
            told = self.tried(units, part) if len(part) == 1 or self.fits(units, part) else None
            if told is not None:
                found += told
            elif len(part) > 1:
                middle = len(part) // 2
                parts += [part[:middle], part[middle:]]
            else:
                leave_out()
        return self.repeats.add(units, found)

    def tried(self, units: Units, part: Sequence[int]) -> list[dict[str, str]] | None:
        """Return what each process finds in a trial of a part of the units, see `tried`; None if memory ran out."""
        checks: tuple[Check, Check] = ("values", "metadata")
        for check in checks:
            told = self.peers.all(lambda own=check: tried(self.model, self.subject, units, part, own))
            if "not comparable" not in told:
                found = [one for one in told if one != "no memory"]
                return cast("list[dict[str, str]]", found) if len(found) == len(told) else None
        raise bug("units were neither tried by values nor by metadata")

    def watched(self, ways: Sequence[Way]) -> tuple[int, Profile]:
        """Run the watched step in the first of some ways that fits in each process; return its index as well."""
        place = 0
        while True:
            reached, found = self.meet(lambda own=place: self.watched_here(ways, own))
            told = self.peers.all(lambda own=reached: own)
            if len(set(told)) == 1:
                break
            place = max(told)
            # DistributedDataParallel reallocates its buckets in the forward after its first backward: in this one.
            self.seconds()
        retained = {name for names in self.peers.all(lambda: [*self.retained]) for name in names}
        if retained:
            self.repeats.refuse(retained, RETAINED)
            self.retained.clear()
            raise RetainedError
        return reached, found

    def watched_here(self, ways: Sequence[Way], place: int) -> tuple[int, Profile]:
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
            return self.completed(self.subject.train(watch(self.model, self.subject, units, tree, self.machine)))
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
        step = self.subject.train(watch(self.model, self.subject, units, tree, self.machine, compares=True))
        assert step.watcher.comparison is not None
        unasked = step.watcher.comparison.unasked(len(units.units))
        if unasked and self.tried(units, unasked) != [{}]:
            return None
        return self.completed(step)

    def completed(self, step: WatchedStep) -> Profile:
        """Return the profile of a step; note its peaks, and which units were recomputed for several backwards."""
        self.retained.update(step.watcher.retained)
        self.peaks[:] = peaks_of(step)
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
