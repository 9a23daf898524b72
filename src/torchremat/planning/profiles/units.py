"""The units of a trace: calls that a plan makes one choice for, in call order.

`grain` selects the calls; this module adds the facts that a plan needs about them.

    replayability     a call whose recompute would not repeat its forward is no unit; see `replayability`
    mutation          a call that writes to its input in place cannot start a region, for the recompute would find the
                      input changed: it is merged with the call that produced the input into one unit; if that is not
                      the previous call, or if a later call writes to an input, the call is no unit at all; neither is
                      a call whose parameters are written in it or later, like `nn.Embedding(max_norm=...)`
    torch.func        a call in which a reverse-mode transform runs (`grad`, `vjp`) is no unit, since no region can
                      contain it
    loops             a call in which a `torchremat.loop` runs is no unit, since the loop manages its own memory; nor is
                      any call of a module that a loop calls, since code that counts calls would count the loop's
    barrier           regions do not span two calls of a root, since each opens a scope of its own: also where a root
                      is called inside another one, as in a step that calls both the model and a part of it
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, groupby
from zlib import crc32

from torchremat.errors import StepError
from torchremat.measuring.step_record import Run
from torchremat.planning.exactness.not_replayable import told
from torchremat.planning.profiles.traces import SavedStorage, Trace, TracedCall, named
from torchremat.regions.rules import external_inputs

# NOTE [ Exchanges in a plan ]
#
# A collective that runs again in a recompute runs on all processes, in one order, or not at all. All of them have one
# plan, and backward asks for regions in the order of the graph, so by itself a recompute does the same on all of them.
# It is in doubt, and the unit is pinned, where an exchange shares its unit with
#
#   values in Python     an operator whose sizes depend on values, or a number that is read from a tensor: routing
#   sizes in arguments   a collective that is told how much goes to, and comes from, each process
#   two processes        sends and receives, which processes call in different orders
#
# Where the processes run other operators in it, it is no unit at all, but the calls inside of it may be; without an
# exchange, it is recomputed or kept as a whole, since numbers of operators mean others elsewhere.
#
# A pinned unit exchanges only in the forward: it is kept as a whole, or its own region holds what it has received, all
# of it that its recompute passes. Any other unit holds what it has received where exchanging it again costs more than
# its bytes, like the output of any operator.


@dataclass(frozen=True, kw_only=True)
class Grain:
    """How far calls are split; see `grain`.

    Attributes:
        apart: The modules whose calls are split.
        inside: The modules whose calls are also split inside a split unit, in addition to the unit's own.
        around: The modules whose calls are split if units are as coarse as is worth a look.
        need_bytes: The lowest need.
    """

    apart: frozenset[str] = frozenset()
    inside: frozenset[str] = frozenset()
    around: frozenset[str] = frozenset()
    need_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class Unit:
    """Consecutive calls that are planned as one; usually one call.

    Attributes:
        calls: Indices into the trace.
        keys: For each call its module's name and the number of earlier calls of it in the same scope.
        scope: The call of a root that opens the scope it is called in, as an index into the trace.
        inputs: Storages of its inputs that are neither parameters nor buffers nor made inside.
        links: The inputs that a region with the previous units in it can recompute: outputs of an earlier unit, by
            identity and version, as (storage, unit).
        differentiable: Its inputs that require grad, and so are leaves of the graph of a recompute.
        outputs: Storages of its outputs.
        carried: Storages in objects among its arguments, which a region around it keeps alive.
    """

    calls: tuple[int, ...]
    keys: tuple[tuple[str, int], ...]
    scope: int
    inputs: tuple[int, ...]
    links: tuple[tuple[int, int], ...]
    differentiable: frozenset[int]
    outputs: tuple[int, ...]
    carried: tuple[int, ...]

    @cached_property
    def name(self) -> str:
        """The names of its modules."""
        return " + ".join(name for name, _ in self.keys)


@dataclass(frozen=True, kw_only=True)
class Units:
    """The units of a trace.

    Attributes:
        trace: The trace.
        roots: The calls that the units were found in.
        units: In the order of the calls.
        others: Calls between the units that cannot be units, with their keys: code that counts calls has to count them.
        opened: Calls that were split, with their keys; code that counts calls has to count them too.
        unlike: The modules that are no units since their recompute would not repeat their forward, with the reasons.
        grain: How far calls were split, and how far they would be if units were split.
        unequal: The units in which the processes that plan together run other operators, or in which another one has
            larger tensors than this one.
        elsewhere: The units in which any of these processes communicates.
    """

    trace: Trace
    roots: tuple[int, ...]
    units: tuple[Unit, ...]
    others: tuple[tuple[int, tuple[str, int]], ...]
    opened: tuple[tuple[int, tuple[str, int]], ...] = ()
    unlike: Mapping[str, str] = field(default_factory=dict[str, str])
    grain: Grain = field(default_factory=Grain)
    unequal: frozenset[int] = frozenset()
    elsewhere: frozenset[int] = frozenset()

    @cached_property
    def rows(self) -> tuple[range, ...]:
        """The consecutive units that one scope sees: no region spans two of these rows."""
        rows: list[range] = []
        for _, group in groupby(range(len(self.units)), key=lambda unit: self.units[unit].scope):
            first, *others = group
            rows.append(range(first, (others or [first])[-1] + 1))
        return tuple(rows)

    def operators(self, unit: int) -> range:
        """Return the operators of a unit, including those of code between its calls."""
        first, *others = self.units[unit].calls
        return range(self.trace.calls[first].operators.start, self.trace.calls[(others or [first])[-1]].operators.stop)

    @cached_property
    def exchanging(self) -> frozenset[int]:
        """The units in which processes communicate."""
        own = (unit for unit, _ in enumerate(self.units) if any(run.exchanges for run in self._runs(unit)))
        return self.elsewhere.union(own)

    @cached_property
    def pinned(self) -> frozenset[int]:
        """The units that exchange only in the forward. See NOTE [ Exchanges in a plan ]."""
        return frozenset(
            unit for unit in self.exchanging if any(run.varies or run.op_info.is_paired for run in self._runs(unit))
        )

    def ran(self, unit: int) -> int:
        """Return a number that equal operators of a unit share, in any process."""
        return crc32(" ".join(run.name for run in self._runs(unit)).encode())

    def _runs(self, unit: int) -> list[Run]:
        own = self.operators(unit)
        return self.trace.operators.runs[own.start : own.stop]

    def entered(self, unit: int) -> int:
        """Return the time in the trace at which a unit begins."""
        return self.trace.calls[self.units[unit].calls[0]].entered

    def left(self, unit: int) -> int:
        """Return the time in the trace at which a unit ends."""
        return self.trace.calls[self.units[unit].calls[-1]].left

    @cached_property
    def inside(self) -> tuple[tuple[int, ...], ...]:
        """For each unit its calls, and all calls inside of them, in order."""
        return tuple(
            tuple(inner for call in unit.calls for inner in self.trace.descendants(call)) for unit in self.units
        )

    def external(self, first: int, unit: int) -> list[int]:
        """Return the storages that a region from unit `first` begins to hold at a unit of the same row.

        These storages do not depend on where the region ends, so they are computed once for many trees.
        """
        found, held = self._external.get(first) or self._external.setdefault(first, ([], set()))
        for own in self.units[first + len(found) : unit + 1]:
            made = [storage for storage, producer in own.links if producer >= first]
            found.append(external_inputs(own.inputs, held.union(made)))
            held.update(found[-1])
        return found[unit - first]

    @cached_property
    def _external(self) -> dict[int, tuple[list[list[int]], set[int]]]:
        return {}

    def flops(self, unit: int) -> int:
        """Return the flops of one forward of a unit."""
        return sum(self.trace.calls[call].flops for call in self.units[unit].calls)

    def flops_truncated(self, unit: int) -> int:
        """Return the flops of one forward of a unit up to its last save."""
        calls = [self.trace.calls[call] for call in self.units[unit].calls]
        inside = [self.trace.descendants(call) for call in self.units[unit].calls]
        saving = [i for i, those in enumerate(inside) if any(self.trace.calls[inner].saved for inner in those)]
        if not saving:
            return 0
        return sum(call.flops for call in calls[: saving[-1]]) + calls[saving[-1]].flops_saved

    def saved(self, unit: int) -> list[int]:
        """Return the storages of all saves in a unit, in order, parameters included."""
        return [one.storage for one in self.saves_in(unit)]

    def saves_in(self, unit: int) -> list[SavedStorage]:
        """Return all saves in a unit, in order."""
        return self._saves[unit]

    @cached_property
    def _saves(self) -> list[list[SavedStorage]]:
        calls = self.trace.calls
        saves = ([one for call in inside for one in calls[call].saved] for inside in self.inside)
        return [sorted(own, key=lambda one: one.time) for own in saves]

    def saves_between(self) -> list[SavedStorage]:
        """Return the saves in calls around the units and between them, by call."""
        inside = set(chain.from_iterable(self.inside))
        return [one for index, call in enumerate(self.trace.calls) if index not in inside for one in call.saved]

    def dropped(self, unit: int) -> frozenset[int]:
        """Return the saves whose graphs are freed when the unit has ended, by their place in order."""
        end, saves = self.left(unit), enumerate(self.saves_in(unit))
        return frozenset(place for place, one in saves if one.dropped is not None and one.dropped < end)

    def graph_until(self, unit: int) -> int:
        """Return the time in the trace until which a unit has a graph that saves something; -1 if it leaves none."""
        end = self.left(unit)
        until = (self.trace.end if one.dropped is None else one.dropped for one in self.saves_in(unit))
        return max((time for time in until if time >= end), default=-1)

    def signature(self, unit: int) -> tuple[object, ...]:
        """Return the key shared by units of equal cost and equal saves: calls, operators, flops, saved bytes.

        Types and shapes alone do not suffice: blocks of one type may have other activations, or frozen weights.
        """
        trace = self.trace
        calls = [trace.calls[call] for call in self.units[unit].calls]
        names = tuple(trace.operators.runs[index].name for call in calls for index in call.operators)
        places: dict[int, int] = {}
        stored = [one for save in self.saves_in(unit) for one in save.storages]
        saved = [(places.setdefault(one, len(places)), trace.storage_bytes.get(one, 0)) for one in stored]
        return tuple((call.signature, call.flops) for call in calls), names, tuple(saved)

    def outlives(self, storage: int, unit: int) -> bool:
        """Return whether a storage that only Python code holds is alive when a unit has ended, for the code behind."""
        return storage >= 0 and self.trace.died.get(storage, self.trace.end) >= self.left(unit)


def linked(trace: Trace, roots: Sequence[int], chosen: Sequence[int], unlike: Mapping[str, str]) -> Units:
    """Return the units that some calls make.

    Args:
        trace: The forward.
        roots: The calls that contain them, or are them.
        chosen: The calls, in order; none is inside another.
        unlike: Modules whose recompute would not repeat their forward, by name, with the reasons; see `replayability`.

    Raises:
        StepError: None of them can be recomputed.
    """
    return _Linker(trace, roots, chosen, unlike).units()


def not_called(units: Units, unit: int) -> StepError:
    """Return the error for a step that has not called a unit of the traced one."""
    return StepError(
        f"{named(units.units[unit].name)} was called in one run of the step and not in the next; a plan needs the same "
        "calls in the same order."
    )


class _Linker:
    """Makes units of the chosen calls: merges those that mutate, links the rest."""

    def __init__(self, trace: Trace, roots: Sequence[int], chosen: Sequence[int], unlike: Mapping[str, str]) -> None:
        self.trace = trace
        self.roots = roots
        self.opening = frozenset(trace.calls[root].name for root in roots)
        self.chosen = chosen
        self.is_chosen = frozenset(chosen)
        self.unlike = unlike
        self.writing = [(index, call) for index, call in enumerate(trace.calls) if call.mutated]
        self.groups: list[list[int]] = []
        self.scope_of: list[int] = []

    def units(self) -> Units:
        for index in self.chosen:
            call, scope = self.trace.calls[index], self.scope(index)
            if self.trace.is_never_unit(index) or call.name in self.unlike:
                continue  # it stays code between the units, like the calls below
            if call.mutated and self.groups and self.scope_of[-1] == scope and self.produces(self.groups[-1], call):
                self.groups[-1].append(index)
                continue
            if call.mutated or self.is_written_later(index, call):
                continue
            self.groups.append([index])
            self.scope_of.append(scope)
        if not self.groups:
            own = "each writes to its inputs or parameters, or runs a reverse-mode transform of torch.func or a `loop`."
            why = told(self.unlike) if self.unlike else own
            raise StepError(f"no call of the model can be recomputed, so there is nothing to plan: {why}")
        keys = self.keys()
        rows = groupby(range(len(self.groups)), key=self.scope_of.__getitem__)
        units = [unit for _, row in rows for unit in self.row(row, keys)]
        grouped = {index for group in self.groups for index in group}
        others = tuple((index, keys[index]) for index in self.chosen if index not in grouped)
        opened = tuple((index, keys[index]) for _, index in self.counted() if index not in self.is_chosen)
        return Units(
            trace=self.trace,
            roots=tuple(self.roots),
            units=tuple(units),
            others=others,
            opened=opened,
            unlike=self.unlike,
        )

    def produces(self, group: list[int], call: TracedCall) -> bool:
        """Whether `call` writes only to outputs of the last calls, unchanged since."""
        outputs = {(seen.identity, seen.version) for index in group for seen in self.trace.calls[index].outputs}
        return all((call.inputs[place].identity, call.inputs[place].version) in outputs for place in call.mutated)

    def is_written_later(self, index: int, call: TracedCall) -> bool:
        """Whether a later call writes to an input of this one: a holder of that input would find it changed."""
        versions = {seen.identity: seen.version for seen in call.inputs}
        return any(
            later.inputs[place].identity in versions
            for number, later in self.writing
            if number > index and later.entered > call.left
            for place in later.mutated
        )

    def scope(self, index: int) -> int:
        """Return the call of a root that opens the scope of a call: one around it, or itself if there is none."""
        outer = self.trace.calls[index].parent
        while outer is not None and self.trace.calls[outer].name not in self.opening:
            outer = self.trace.calls[outer].parent
        return index if outer is None else outer

    def counted(self) -> Iterator[tuple[int, int]]:
        """Yield the chosen calls and the split calls around them, in the order of entry, with scopes."""
        seen: set[int] = set()
        for index in self.chosen:
            around, scope = [index], self.scope(index)
            outer = None if index == scope else self.trace.calls[index].parent
            while outer is not None and outer != scope and outer not in seen:
                around.append(outer)
                outer = self.trace.calls[outer].parent
            seen.update(around)
            yield from ((scope, call) for call in reversed(around))

    def keys(self) -> dict[int, tuple[str, int]]:
        counts: dict[tuple[int, str], int] = {}
        keys: dict[int, tuple[str, int]] = {}
        for scope, index in self.counted():
            name = self.trace.calls[index].name
            count = counts.get((scope, name), 0)
            counts[scope, name] = count + 1
            keys[index] = (name, count)
        return keys

    def row(self, numbers: Iterable[int], keys: dict[int, tuple[str, int]]) -> Iterator[Unit]:
        """Yield the units of consecutive groups that one scope sees."""
        made: dict[tuple[int, int], int] = {}  # by identity and version, the last unit with it as an output
        for number in numbers:
            yield self.unit(number, keys, made)
            calls = (self.trace.calls[index] for index in self.groups[number])
            made.update({(seen.identity, seen.version): number for call in calls for seen in call.outputs})

    def unit(self, number: int, keys: dict[int, tuple[str, int]], made: dict[tuple[int, int], int]) -> Unit:
        group = self.groups[number]
        calls = [self.trace.calls[index] for index in group]
        inside: set[tuple[int, int]] = set()
        inputs: dict[int, None] = {}
        links: dict[int, int] = {}
        differentiable: set[int] = set()
        for call in calls:
            for seen in call.inputs:
                if (seen.identity, seen.version) in inside or seen.storage in self.trace.fixed or seen.storage < 0:
                    continue
                inputs[seen.storage] = None
                if seen.requires_grad:
                    differentiable.add(seen.storage)
                producer = made.get((seen.identity, seen.version))
                if producer is not None:
                    links[seen.storage] = producer
            inside.update((seen.identity, seen.version) for seen in call.outputs)
        return Unit(
            calls=tuple(group),
            keys=tuple(keys[index] for index in group),
            scope=self.scope_of[number],
            inputs=tuple(inputs),
            links=tuple(links.items()),
            differentiable=frozenset(differentiable),
            carried=tuple({storage: None for call in calls for storage in call.carried if storage >= 0}),
            outputs=tuple({seen.storage: None for call in calls for seen in call.outputs if seen.storage >= 0}),
        )
