"""The exact interpreter: the live bytes at every program point of a step, for any tree of regions over the units.

Bytes are counted by storage. At each program point of a step a set of *boundary* storages (inputs and outputs of units)
is held: by regions, by kept units that saved them, by links of a recompute in progress, by local variables of the code
between the units, and by the tensors that this code saved. In addition, each kept unit holds what it saved inside. All
other live bytes at that point do not depend on the plan; they are known from the one profiled step, as its live bytes
minus the bytes that this same interpreter counts as held in it.

    live = extra[point] + bytes of the boundary storages held + bytes saved inside + the unit's own peak over that

Which region holds which input, when a recompute stops, when a link is dropped: `regions.rules` decides it for the
simulator and for the executor alike, and a test compares both event by event.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from operator import is_
from typing import TypeAlias

from torchremat.planning.profiles.units import Units
from torchremat.planning.simulator.holding import Graphs, Links, LiveBytes, OffloadedBytes
from torchremat.planning.simulator.offload_choices import NO_OFFLOADS, Offloads
from torchremat.planning.simulator.points import Lifetimes, Live, OptionBytes, ProgramPoint, RanForward, UnitBytes
from torchremat.regions.rules import ended, last_needed, last_uses
from torchremat.schedules.chain import KeepNode, Node, RegionNode, Tree, kept

# For each unit the ways of keeping it in part; empty if no unit has any.
Options: TypeAlias = tuple[tuple[OptionBytes, ...], ...]


class MemorySimulator:
    """One simulation of a step under a tree. Iterate over it once: it yields `Live` and `RanForward`."""

    def __init__(
        self,
        units: Units,
        sizes: tuple[UnitBytes, ...],
        order: tuple[int, ...],
        lifetimes: Lifetimes,
        tree: Tree,
        options: Options = (),
        offloads: Offloads = NO_OFFLOADS,
    ) -> None:
        self.units = units
        self.sizes = sizes
        self.order = order
        self.lifetimes = lifetimes
        self.chosen = {node.stage: options[node.stage][node.option - 1] for node in kept(tree) if node.option}
        self.tree = tree = tuple(map(_with_options_apart, tree)) if self.chosen else tree
        self.live = LiveBytes(units.trace.storage_bytes)
        self.offloaded = OffloadedBytes(self.live, units, lifetimes, offloads)
        # The regions around each unit, outermost first; and by id of a region its depth, itself included.
        self.around: list[tuple[RegionNode, ...]] = [()] * len(sizes)
        self.depth: dict[int, int] = {}
        self.regions: list[RegionNode] = []  # in the order in which the forward enters them
        self._look_around(tree, ())
        self.graphs = Graphs(sizes, lifetimes.graphs, units.trace.end)
        self.unborn: list[int] = []  # held through an object that will get them later
        self.states: dict[int, int] = {}  # by id of the region, the state bytes that it keeps
        self.slots: dict[int, list[int]] = {}  # by id of the region, the storages that it holds
        # The units whose saved tensors are all there, and the ids of the regions that have been recomputed.
        self.available = {unit for unit, around in enumerate(self.around) if not around}
        self.done: set[int] = set()
        # While regions are recomputed before any gradient has arrived, the forward's outputs are still held, as inputs
        # of other regions. So the outputs of a recompute are separate storages, by unit and, until it ends, by
        # region.
        self.is_ahead = False
        self.anew: dict[int, dict[int, int]] = {}
        self.anew_in: dict[int, dict[int, int]] = {}

    def _look_around(self, nodes: Iterable[Node], around: tuple[RegionNode, ...]) -> None:
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

    # ------------------------------------------------------------------------------------------------------- forward

    def be_born(self, time: int) -> None:
        """Hold the storages that held objects have got by now."""
        if not self.unborn:
            return
        born = self.units.trace.born
        self.live.hold(storage for storage in self.unborn if born[storage] <= time)
        self.unborn = [storage for storage in self.unborn if born[storage] > time]

    def forward(self) -> Iterator[Live]:
        """Simulate the first forward."""
        inter_call = self.lifetimes.inter_call_before
        for unit, (size, own) in enumerate(zip(self.sizes, self.units.units, strict=True)):
            self.live.hold(inter_call.get(unit, ()))
            self.be_born(self.units.entered(unit))
            self.lose_graphs(self.units.entered(unit))
            alive, levels = self.lifetimes.entered[unit], len(self.around[unit])
            option = self.chosen.get(unit)
            peak = size.dropping_bytes(levels, option) if levels else size.full_peak_bytes
            yield Live((ProgramPoint.FORWARD, unit), self.live.total(alive), peak, f"forward of {own.name}", unit)
            self.take(unit)
            yield from self.offloaded.left(unit)
            self.be_born(self.units.left(unit))
            self.lose_graphs(self.units.left(unit))
            yield Live(
                (ProgramPoint.LEFT, unit), self.live.total(self.lifetimes.left[unit]), None, f"forward after {own.name}"
            )
        self.live.hold(inter_call.get(len(self.sizes), ()))
        self.be_born(self.units.trace.end)
        self.lose_graphs(self.units.trace.end)
        yield Live(
            (ProgramPoint.END, 0), self.live.total(self.lifetimes.end), None, "loss, between forward and backward"
        )
        self.live.hold(self.lifetimes.end)  # the storages of the step's caller stay

    def take(self, unit: int) -> None:
        """Hold the storages that stay after a unit's first forward."""
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
            self.live.hold(option.kept)
            self.live.inside += option.kept_bytes

    def enter(self, unit: int) -> None:
        """Hold a unit's inputs for its top-level region, and the states that all regions around the unit keep."""
        region = self.around[unit][0]
        if not self.graphs.has_any(region):
            return
        own = self.units.units[unit]
        held = self.external(region, unit)
        self.hold_for(region, unit, held)
        self.live.hold(self.sizes[unit].captured)
        self.slots[id(region)] += (*self.sizes[unit].captured, *own.carried)
        self.unborn += own.carried
        state = self.sizes[unit].state_bytes
        for around in self.around[unit] if state else ():
            if self.graphs.has_any(around):
                self.states[id(around)] = self.states.get(id(around), 0) + state
                self.live.inside += state

    def hold_for(self, region: RegionNode, unit: int, storages: list[int]) -> None:
        """Let a region hold inputs of a unit in it until the region releases them, or is freed itself."""
        self.slots.setdefault(id(region), []).extend(storages)
        self.live.hold(storages)

    def lose_graphs(self, time: int) -> None:
        """Release everything held by graphs that are freed by now, including what a backward would release."""
        for node in self.graphs.lost(time):
            if isinstance(node, RegionNode):
                MemorySimulator.leave(self, node)
            else:
                MemorySimulator.drop(self, node.stage, again=False)

    def external(self, region: RegionNode, unit: int) -> list[int]:
        """Inputs that a region begins to hold when a unit in it runs: neither recomputed by the region nor held yet."""
        return self.units.external(region.first, unit)

    def keep(self, unit: int, *, again: bool) -> None:
        """Hold the saved tensors of a unit; `again` in a recompute."""
        size = self.sizes[unit]
        self.live.hold(self.named(unit, size.saved))
        if not again:
            self.live.hold(size.left)
        self.live.inside += size.inside_bytes + (size.copied_bytes + self.left_bytes(unit) if again else 0)

    def drop(self, unit: int, *, again: bool) -> None:
        """Release the storages that `keep` holds."""
        size = self.sizes[unit]
        self.live.release(self.named(unit, size.saved))
        if not again:
            self.live.release(size.left)
        self.live.inside -= size.inside_bytes + (size.copied_bytes + self.left_bytes(unit) if again else 0)

    def remake(self, unit: int, anew: dict[int, int], kept: Container[int] = ()) -> None:
        """Make the outputs of a unit's recompute, except the kept ones, separate storages; recorded in `anew`."""
        own = self.units.units[unit]
        for storage in own.outputs:
            if storage not in own.inputs and storage not in kept:
                anew[storage] = len(self.live.bytes)
                self.live.bytes[anew[storage]] = self.live.bytes[storage]
        self.anew[unit] = anew

    def named(self, unit: int, storages: Iterable[int]) -> Iterable[int]:
        """Return the storages that stand for storages of the forward among the saved tensors of a unit."""
        anew = self.anew.get(unit)
        return [anew.get(storage, storage) for storage in storages] if anew else storages

    def left_bytes(self, unit: int) -> int:
        """Bytes of the storages that something else also references after a unit."""
        left = self.sizes[unit].left
        return sum(self.live.bytes[storage] for storage in left) if left else 0

    # ------------------------------------------------------------------------------------------------------ backward

    def backward(self) -> Iterator[Live | RanForward]:
        """Simulate the backward, with the recomputes that it triggers."""
        waiting = set(self.order)
        # Released when the backward has reached a unit before the glue.
        inter_call = sorted(self.lifetimes.inter_call, key=lambda one: -one[1])
        for unit in self.order:
            while inter_call and inter_call[0][1] > unit:
                self.leave_inter_call(inter_call.pop(0)[0])
            chain = self.around[unit]
            yield from self.offloaded.came(unit)
            option = self.chosen.get(unit)
            # Before its backward or in the middle of it, see `OptionBytes`.
            is_late = option is not None and unit not in self.available
            over = option.late_peak_bytes if option is not None and is_late else None
            since = option.late_from if option is not None and is_late else 0
            for region in chain:
                if unit not in self.available and id(region) not in self.done:
                    yield from self.recompute(region, unit)
            what, stays = f"backward of {self.units.units[unit].name}", None
            if not chain:
                stays = frozenset(storage for storage in self.lifetimes.made[unit] if self.live.held[storage] > 1)
            lets_go, inputs = self.offloaded.lets_go(unit), self.inputs_alone(unit) if chain else {}
            yield Live(
                (ProgramPoint.BACKWARD, unit),
                self.live.total(),
                over,
                what,
                stays=stays,
                lets_go=lets_go,
                inputs=inputs,
                since=since,
            )
            self.drop(unit, again=bool(chain))
            self.offloaded.dropped(unit)
            waiting.discard(unit)
            for region in chain:
                if waiting.isdisjoint(range(region.first, region.last + 1)):
                    self.leave(region)
            yield Live(
                (ProgramPoint.RELEASED, unit), self.live.total(), None, f"backward before {self.units.units[unit].name}"
            )

    def inputs_alone(self, unit: int) -> dict[int, int]:
        """Return the bytes of the inputs that nothing but the saved tensors of a recomputed unit holds, by storage."""
        live, anew = self.live, self.anew.get(unit, {})
        inputs = self.sizes[unit].saved.intersection(self.units.units[unit].inputs)
        return {one: live.bytes[one] for one in inputs if live.held[anew.get(one, one)] == 1}

    def leave_inter_call(self, storage: int) -> None:
        """Release a storage that code between the units has saved."""
        self.live.release((storage,))

    def leave(self, region: RegionNode) -> None:
        """Free a region with its last node, and all that the region holds; inner regions hold nothing by then."""
        self.live.release(self.slots.pop(id(region), ()))
        self.live.inside -= self.states.pop(id(region), 0)

    def recompute(self, region: RegionNode, until: int) -> Iterator[Live | RanForward]:
        """The recompute of `region` that the backward of unit `until` triggers."""
        self.done.add(id(region))
        key, nested = (ProgramPoint.RECOMPUTE, until), self.depth[id(region)] > 1
        option = self.chosen.get(region.first)
        if option is not None and isinstance(region.children[0], KeepNode):
            yield from self.recompute_option(region, option)
            self.available.add(region.first)
            return
        children = {unit: node for node in region.children for unit in range(node.first, node.last + 1)}
        around = self.around[region.first][: self.depth[id(region)] - 1]
        anew = self.anew_in[id(region)] = dict(self.anew_in[id(around[-1])]) if around and self.is_ahead else {}
        last, runs_last = self.last_needed(region, children, until)
        keeps = any(size.state_bytes or size.graph_bytes for size in self.sizes[region.first : last + 1])
        links = Links(self.units, region, traced=nested or keeps)
        lets_go = nested and not self.is_ahead  # a session keeps everything until the backward arrives
        inputs = (self.units.units[unit].inputs for unit in range(region.first, region.last + 1))
        last_use = last_uses(inputs, region.first) if lets_go else {}
        # Of the nested regions that the recompute makes, and of the graphs of its units, by id.
        states: dict[int, int] = {}
        for unit in range(region.first, last + 1):
            node, size, own = children[unit], self.sizes[unit], self.units.units[unit]
            if isinstance(node, RegionNode):
                held = self.external(node, unit) if self.graphs.waits(node) else []
                held = [anew.get(storage, storage) for storage in held]
                self.hold_for(node, unit, held)
            alive = [anew.get(storage, storage) for storage in links.storages] if anew else links.storages
            if unit == last and not runs_last:
                if size.state_bytes:  # it stops when the current state has been set aside
                    yield Live(key, self.live.total(alive), size.state_bytes, f"recompute of {own.name}", unit)
                break
            inner = self.around[unit][self.depth[id(region)] :]
            if inner:
                peak = size.dropping_bytes(len(inner))
            else:
                peak = size.truncated_peak_bytes if unit == last else size.full_peak_bytes
            # The current states are set aside meanwhile, and restored.
            peak += size.state_bytes + size.recast_bytes
            yield Live(key, self.live.total(alive), peak, f"recompute of {own.name}", unit)
            yield RanForward(unit, truncated=unit == last and isinstance(node, KeepNode))
            if self.is_ahead:
                self.remake(unit, anew)
            if isinstance(node, KeepNode):
                if self.graphs.waits(node):
                    self.keep(unit, again=True)
                self.available.add(unit)
            links.pass_on(unit, own, inner)
            if size.graph_bytes:
                self.live.inside += size.graph_bytes
                states[id(own)] = size.graph_bytes
            for one in inner if size.state_bytes else ():
                self.live.inside += size.state_bytes
                states[id(one)] = states.get(id(one), 0) + size.state_bytes
            for one in links.ended & states.keys() if states else ():
                if one not in links.graphs:
                    self.live.inside -= states.pop(one)
            if lets_go:
                # A nested region's inputs are values of its parent's recompute, and are freed at their last use in its
                # own.
                gone = ended(self.slots.get(id(region), ()), last_use, unit)
                self.let_go(region, set(gone) - links.leaves if gone else set())
        self.live.inside -= sum(states.values())
        if lets_go:
            # The call at which it stops has taken its inputs too, and then all taken inputs are released.
            self.let_go(region, {s for unit in range(region.first, last + 1) for s in self.external(region, unit)})

    def recompute_option(self, region: RegionNode, option: OptionBytes) -> Iterator[Live | RanForward]:
        """The recompute of a unit that holds the outputs of some of its operators."""
        unit = region.first
        (node,) = region.children
        if option.recomputes:
            size, name, key = self.sizes[unit], self.units.units[unit].name, (ProgramPoint.RECOMPUTE, unit)
            ran = RanForward(unit, truncated=True, option=node.option if isinstance(node, KeepNode) else 0)
            if not self.is_ahead:
                yield from (ran for _ in option.cuts)
                yield Live(key, self.live.total(), option.early_peak_bytes, f"backward of {name}")
            peak = option.ahead_peak_bytes if self.is_ahead else option.recompute_peak_bytes
            peak += size.state_bytes + size.recast_bytes
            yield Live(key, self.live.total(), peak, f"recompute of {name}", unit)
            yield ran
        if self.is_ahead:
            self.remake(unit, {}, kept=option.kept)
        # All its saved tensors are there now, and tensors held for the recompute alone are freed.
        self.keep(unit, again=True)
        self.live.release(option.kept)
        self.live.inside -= option.kept_bytes
        if self.depth[id(region)] > 1 and not self.is_ahead:
            self.let_go(region, set(self.external(region, unit)))

    def let_go(self, region: RegionNode, gone: set[int]) -> None:
        """Release the storages that a nested region no longer holds."""
        slots = self.slots.get(id(region), [])
        self.slots[id(region)] = [storage for storage in slots if storage not in gone]
        self.live.release(storage for storage in slots if storage in gone)

    def last_needed(self, region: RegionNode, children: dict[int, Node], until: int) -> tuple[int, bool]:
        """The unit at which the recompute stops, and whether that unit is run (else it stops at its inputs)."""
        first = region.first

        def waits(number: int) -> bool:
            unit = first + number
            node = children[unit]
            # The saved tensors of a unit in a nested region are the inputs that this region holds.
            return self.graphs.waits(node) and (isinstance(node, KeepNode) or bool(self.external(node, unit)))

        number = last_needed(region.last + 1 - first, waits)
        return (until, True) if number < 0 else (first + number, isinstance(children[first + number], KeepNode))


def _with_options_apart(node: Node) -> Node:
    """Return a node in which each unit that is kept by one of its options is a separate region."""
    if isinstance(node, KeepNode):
        return RegionNode((node,)) if node.option else node
    children = tuple(map(_with_options_apart, node.children))
    return node if all(map(is_, children, node.children)) else RegionNode(children)
