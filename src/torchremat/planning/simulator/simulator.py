"""The exact interpreter: what is live at every moment of a step, for any tree of regions over the units.

Bytes are counted by storage. At each moment of a step a set of *boundary* storages (inputs and outputs of units) is
held: by regions, by kept units that saved them, by links of a recompute that is under way, by local variables of the
code between the units, by what that code saved. Beside them each kept unit holds what it saved inside. All else that is
live at that moment does not depend on the plan; it is known from the one profiled step, as live bytes minus what this
same interpreter says was held in it.

    live = extra[moment] + bytes of the boundary storages held + bytes saved inside + the unit's own peak over that

Which region holds which input, when a recompute stops, when a link is dropped: `regions.rules` says it to the walk as
to what runs the regions, and a test compares both event by event.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Iterator
from typing import TypeAlias

from torchremat.planning.profiles.units import Units
from torchremat.planning.simulator.graphs import Graphs
from torchremat.planning.simulator.links import Links
from torchremat.planning.simulator.offload_choices import NO_LOADS, Offloads
from torchremat.planning.simulator.offloaded import OffloadedBytes
from torchremat.planning.simulator.points import Lifetimes, Live, OptionBytes, ProgramPoint, RanForward, UnitBytes
from torchremat.regions.rules import ended, last_needed, last_uses
from torchremat.schedules.chain import KeepNode, RegionNode, Tree

# For each unit the ways of keeping it beside keeping all; none at all if there are none for any unit.
Options: TypeAlias = tuple[tuple[OptionBytes, ...], ...]


class MemorySimulator:
    """One walk through a step under a tree. Iterate over it once: it yields `Live` and `RanForward`."""

    def __init__(
        self,
        units: Units,
        sizes: tuple[UnitBytes, ...],
        order: tuple[int, ...],
        lifetimes: Lifetimes,
        tree: Tree,
        options: Options = (),
        offloads: Offloads = NO_LOADS,
    ) -> None:
        self.units = units
        self.sizes = sizes
        self.order = order
        self.lifetimes = lifetimes
        # A unit kept as one of its options says is a region of its own.
        self.chosen = {
            node.stage: options[node.stage][node.option - 1]
            for node in tree
            if isinstance(node, KeepNode) and node.option
        }
        self.tree = tree = tuple(
            RegionNode((node,)) if isinstance(node, KeepNode) and node.option else node for node in tree
        )
        self.offloaded = OffloadedBytes(self, offloads)
        self.bytes = units.trace.storage_bytes
        # The regions around each unit, outermost first, and how many there are around and with a region, by its id.
        self.around: list[tuple[RegionNode, ...]] = [()] * len(sizes)
        self.depth: dict[int, int] = {}
        self.regions: list[RegionNode] = []  # in the order in which the forward enters them
        self._look_around(tree, ())
        self.graphs = Graphs(sizes, lifetimes.graphs, units.trace.end)
        self.held: Counter[int] = Counter()
        self.held_bytes = 0
        self.alive: Iterable[int] = ()  # beside what is held, at the last moment that was asked for
        self.unborn: list[int] = []  # held by way of an object that will get them later
        self.inside = 0  # what kept units saved inside, and the states that regions keep
        self.states: dict[int, int] = {}  # by id of the region, the state that it keeps
        self.slots: dict[int, list[int]] = {}  # by id of the region, what it holds
        # The units of which all that was saved is there, and the ids of the regions that have been recomputed.
        self.available = {unit for unit, around in enumerate(self.around) if not around}
        self.done: set[int] = set()
        # While regions are recomputed before any gradient is there, the forward's outputs are still held, as inputs of
        # other regions. So those of a recompute are storages of their own, by unit and, until it ends, by region.
        self.is_ahead = False
        self.anew: dict[int, dict[int, int]] = {}
        self.anew_in: dict[int, dict[int, int]] = {}

    def _look_around(self, nodes: Iterable[KeepNode | RegionNode], around: tuple[RegionNode, ...]) -> None:
        for node in nodes:
            if isinstance(node, KeepNode):
                self.around[node.stage] = around
            else:
                inside = (*around, node)
                self.depth[id(node)] = len(inside)
                self.regions.append(node)
                self._look_around(node.children, inside)

    def __iter__(self) -> Iterator[Live | RanForward]:
        yield from self.forward()
        yield from self.backward()

    # ------------------------------------------------------------------------------------------------------- holding

    def hold(self, storages: Iterable[int]) -> None:
        """Begin to hold storages, each once more."""
        for storage in storages:
            self.held[storage] += 1
            if self.held[storage] == 1:
                self.held_bytes += self.bytes[storage]

    def release(self, storages: Iterable[int]) -> None:
        """Undo `hold`."""
        for storage in storages:
            self.held[storage] -= 1
            if not self.held[storage]:
                del self.held[storage]
                self.held_bytes -= self.bytes[storage]

    def total(self, alive: Iterable[int] = ()) -> int:
        """Bytes held, with `alive` beside them."""
        self.alive = alive
        total = self.inside + self.held_bytes
        for storage in alive:
            if storage not in self.held:
                total += self.bytes[storage]
        return total

    def be_born(self, time: int) -> None:
        """Hold what objects that are held have got by now."""
        if not self.unborn:
            return
        born = self.units.trace.born
        self.hold(storage for storage in self.unborn if born[storage] <= time)
        self.unborn = [storage for storage in self.unborn if born[storage] > time]

    # ------------------------------------------------------------------------------------------------------- forward

    def forward(self) -> Iterator[Live]:
        """Walk through the first forward."""
        inter_call = self.lifetimes.glue_before
        for unit, (size, own) in enumerate(zip(self.sizes, self.units.units, strict=True)):
            self.hold(inter_call.get(unit, ()))
            self.be_born(self.units.entered(unit))
            self.lose_graphs(self.units.entered(unit))
            alive, levels = self.lifetimes.entered[unit], len(self.around[unit])
            option = self.chosen.get(unit)
            peak = size.dropping_bytes(levels, option) if levels else size.full_peak_bytes
            yield Live((ProgramPoint.FORWARD, unit), self.total(alive), peak, f"forward of {own.name}", unit)
            self.take(unit)
            yield from self.offloaded.left(unit)
            self.be_born(self.units.left(unit))
            self.lose_graphs(self.units.left(unit))
            yield Live(
                (ProgramPoint.LEFT, unit), self.total(self.lifetimes.left[unit]), None, f"forward after {own.name}"
            )
        self.hold(inter_call.get(len(self.sizes), ()))
        self.be_born(self.units.trace.end)
        self.lose_graphs(self.units.trace.end)
        yield Live((ProgramPoint.END, 0), self.total(self.lifetimes.end), None, "loss, between forward and backward")
        self.hold(self.lifetimes.end)  # what the step's caller holds stays

    def take(self, unit: int) -> None:
        """Hold what stays of a unit's first forward."""
        if not self.around[unit]:
            self.keep(unit, again=False)
            self.graphs.note(KeepNode(unit))
            return
        self.enter(unit)
        region = self.around[unit][0]
        if unit == region.last:
            self.graphs.note(region)
        option = self.chosen.get(unit)
        if option is not None:
            self.hold(option.kept)
            self.inside += option.kept_bytes

    def enter(self, unit: int) -> None:
        """Hold what the top-level region around a unit holds for it, and the states that all regions around it keep."""
        region = self.around[unit][0]
        if not self.graphs.has_any(region):
            return
        own = self.units.units[unit]
        held = self.external(region, unit)
        self.hold_for(region, unit, held)
        self.slots[id(region)] += own.carried
        self.unborn += own.carried
        state = self.sizes[unit].state_bytes
        for around in self.around[unit] if state else ():
            if self.graphs.has_any(around):
                self.states[id(around)] = self.states.get(id(around), 0) + state
                self.inside += state

    def hold_for(self, region: RegionNode, unit: int, storages: list[int]) -> None:
        """Let a region hold inputs of a unit in it until it lets go of them, or goes."""
        self.slots.setdefault(id(region), []).extend(storages)
        self.hold(storages)

    def lose_graphs(self, time: int) -> None:
        """Release what graphs that are gone by now have held, whatever a backward would let go of."""
        for node in self.graphs.lost(time):
            if isinstance(node, RegionNode):
                MemorySimulator.leave(self, node)
            else:
                MemorySimulator.drop(self, node.stage, again=False)

    def external(self, region: RegionNode, unit: int) -> list[int]:
        """Inputs that a region begins to hold when a unit in it runs: neither recomputed by it nor held already."""
        return self.units.external(region.first)[unit - region.first]

    def keep(self, unit: int, *, again: bool) -> None:
        """Hold what a unit saves; `again` in a recompute."""
        size = self.sizes[unit]
        self.hold(self.named(unit, size.saved))
        if not again:
            self.hold(size.left)
        self.inside += size.inside_bytes + (size.copied_bytes + self.left_bytes(unit) if again else 0)

    def drop(self, unit: int, *, again: bool) -> None:
        """Release what `keep` holds."""
        size = self.sizes[unit]
        self.release(self.named(unit, size.saved))
        if not again:
            self.release(size.left)
        self.inside -= size.inside_bytes + (size.copied_bytes + self.left_bytes(unit) if again else 0)

    def remake(self, unit: int, anew: dict[int, int], kept: Container[int] = ()) -> None:
        """Let the outputs of a unit's recompute be storages of their own, but those that were kept; noted in `anew`."""
        own = self.units.units[unit]
        for storage in own.outputs:
            if storage not in own.inputs and storage not in kept:
                anew[storage] = len(self.bytes)
                self.bytes[anew[storage]] = self.bytes[storage]
        self.anew[unit] = anew

    def named(self, unit: int, storages: Iterable[int]) -> Iterable[int]:
        """Return what stands for storages of the forward in what a unit has saved."""
        anew = self.anew.get(unit)
        return [anew.get(storage, storage) for storage in storages] if anew else storages

    def left_bytes(self, unit: int) -> int:
        """Bytes of what a unit leaves with somebody else."""
        left = self.sizes[unit].left
        return sum(self.bytes[storage] for storage in left) if left else 0

    # ------------------------------------------------------------------------------------------------------ backward

    def backward(self) -> Iterator[Live | RanForward]:
        """Walk through the backward, with the recomputes that it asks for."""
        waiting = set(self.order)
        # Released when the backward has come to a unit before the glue.
        inter_call = sorted(self.lifetimes.inter_call, key=lambda one: -one[1])
        for unit in self.order:
            while inter_call and inter_call[0][1] > unit:
                self.leave_glue(inter_call.pop(0)[0])
            chain = self.around[unit]
            yield from self.offloaded.came(unit)
            option = self.chosen.get(unit)
            # Ahead of it or in its midst, see `OptionBytes`.
            over = None if option is None or unit in self.available else option.late_peak_bytes
            for region in chain:
                if unit not in self.available and id(region) not in self.done:
                    yield from self.recompute(region, unit)
            what, stays = f"backward of {self.units.units[unit].name}", None
            if not chain:
                stays = frozenset(storage for storage in self.lifetimes.made[unit] if self.held[storage] > 1)
            lets_go = self.offloaded.lets_go(unit)
            yield Live((ProgramPoint.BACKWARD, unit), self.total(), over, what, stays=stays, lets_go=lets_go)
            self.drop(unit, again=bool(chain))
            self.offloaded.dropped(unit)
            waiting.discard(unit)
            for region in chain:
                if waiting.isdisjoint(range(region.first, region.last + 1)):
                    self.leave(region)
            yield Live(
                (ProgramPoint.RELEASED, unit), self.total(), None, f"backward before {self.units.units[unit].name}"
            )

    def leave_glue(self, storage: int) -> None:
        """Release what code between the units has saved."""
        self.release((storage,))

    def leave(self, region: RegionNode) -> None:
        """Let a region go with its last node, and what it holds with it; inner ones have nothing by then."""
        self.release(self.slots.pop(id(region), ()))
        self.inside -= self.states.pop(id(region), 0)

    def recompute(self, region: RegionNode, until: int) -> Iterator[Live | RanForward]:
        """The recompute of `region` that the backward of unit `until` asks for."""
        self.done.add(id(region))
        key, nested = (ProgramPoint.RECOMPUTE, until), self.depth[id(region)] > 1
        option = self.chosen.get(region.first)
        if option is not None:
            yield from self.recompute_option(region, option)
            self.available.add(region.first)
            return
        children = {unit: node for node in region.children for unit in range(node.first, node.last + 1)}
        around = self.around[region.first][: self.depth[id(region)] - 1]
        anew = self.anew_in[id(region)] = dict(self.anew_in[id(around[-1])]) if around and self.is_ahead else {}
        last, runs_last = self.last_needed(region, children, until)
        has_states = any(size.state_bytes for size in self.sizes[region.first : last + 1])
        links = Links(self.units, region, traced=nested or has_states)
        lets_go = nested and not self.is_ahead  # a session has all until the backward comes
        inputs = (self.units.units[unit].inputs for unit in range(region.first, region.last + 1))
        last_use = last_uses(inputs, region.first) if lets_go else {}
        states: dict[int, int] = {}  # of the nested regions that the recompute makes, by id
        for unit in range(region.first, last + 1):
            node, size, own = children[unit], self.sizes[unit], self.units.units[unit]
            if isinstance(node, RegionNode):
                held = self.external(node, unit) if self.graphs.waits(node) else []
                held = [anew.get(storage, storage) for storage in held]
                self.hold_for(node, unit, held)
            if unit == last and not runs_last:
                break
            inner = self.around[unit][self.depth[id(region)] :]
            if inner:
                peak = size.dropping_bytes(len(inner))
            else:
                peak = size.truncated_peak_bytes if unit == last else size.full_peak_bytes
            # The states of now are set aside meanwhile, and put back.
            peak += size.state_bytes + size.recast_bytes
            alive = [anew.get(storage, storage) for storage in links.storages] if anew else links.storages
            yield Live(key, self.total(alive), peak, f"recompute of {own.name}", unit)
            yield RanForward(unit, truncated=unit == last and isinstance(node, KeepNode))
            if self.is_ahead:
                self.remake(unit, anew)
            if isinstance(node, KeepNode):
                if self.graphs.waits(node):
                    self.keep(unit, again=True)
                self.available.add(unit)
            links.pass_on(unit, own, inner)
            for one in inner if size.state_bytes else ():
                self.inside += size.state_bytes
                states[id(one)] = states.get(id(one), 0) + size.state_bytes
            for one in links.ended & states.keys() if states else ():
                if one not in links.regions:
                    self.inside -= states.pop(one)
            if lets_go:
                # A nested region's inputs are values of its parent's recompute, and go with their last use in its own.
                gone = ended(self.slots.get(id(region), ()), last_use, unit)
                self.let_go(region, set(gone) - links.leaves if gone else set())
        self.inside -= sum(states.values())
        if lets_go:
            # The call at which it stops has taken its inputs too, and then all that was taken goes.
            self.let_go(region, {s for unit in range(region.first, last + 1) for s in self.external(region, unit)})

    def recompute_option(self, region: RegionNode, option: OptionBytes) -> Iterator[Live | RanForward]:
        """The recompute of a unit that holds the outputs of some of its operators."""
        unit = region.first
        (node,) = region.children
        if option.recomputes:
            size, name, key = self.sizes[unit], self.units.units[unit].name, (ProgramPoint.RECOMPUTE, unit)
            if not self.is_ahead:
                yield Live(key, self.total(), option.early_peak_bytes, f"backward of {name}")
            peak = option.ahead_peak_bytes if self.is_ahead else option.recompute_peak_bytes
            peak += size.state_bytes + size.recast_bytes
            yield Live(key, self.total(), peak, f"recompute of {name}", unit)
            yield RanForward(unit, truncated=True, option=node.option if isinstance(node, KeepNode) else 0)
        if self.is_ahead:
            self.remake(unit, {}, kept=option.kept)
        # All that it saves is there now, and what was held for the recompute alone is gone.
        self.keep(unit, again=True)
        self.release(option.kept)
        self.inside -= option.kept_bytes

    def let_go(self, region: RegionNode, gone: set[int]) -> None:
        """Release what a nested region has held and holds no longer."""
        slots = self.slots.get(id(region), [])
        self.slots[id(region)] = [storage for storage in slots if storage not in gone]
        self.release(storage for storage in slots if storage in gone)

    def last_needed(
        self, region: RegionNode, children: dict[int, KeepNode | RegionNode], until: int
    ) -> tuple[int, bool]:
        """The unit at which the recompute stops, and whether that unit is run (else it stops at its inputs)."""
        first = region.first

        def waits(number: int) -> bool:
            unit = first + number
            node = children[unit]
            # What is saved of a unit in a nested region are the inputs that this one holds.
            return self.graphs.waits(node) and (isinstance(node, KeepNode) or bool(self.external(node, unit)))

        number = last_needed(region.last + 1 - first, waits)
        return (until, True) if number < 0 else (first + number, isinstance(children[first + number], KeepNode))
