"""What a step does with its regions, event by event: as the executor did it, and as the simulator says.

    hold 2-5/1 at 3: 7 8     the region over units 2 to 5, not inside another one, begins to hold storages for unit 3
    release 2-5/1: 7 8       it lets go of them
    recompute 2-5/1          its recompute begins, and has its first inputs
    run 3                    unit 3 runs in it to its end; `run 3, cut` up to the last save that is needed
    backward 3               all that unit 3 has saved is there, and autograd asks for it
    drop 3                   and has it no longer
    put 7                    a store is given a storage of a kept unit
    settle 7                 it has read it, and the memory is let go
    begin 7                  it is to bring it back soon
    bring 7                  it brings it back

Storages are numbered as in the trace. Of the regions inside of others the executor says what waits in their slots.
"""

import re
from collections import Counter, defaultdict
from functools import partial
from itertools import chain, groupby
from types import MappingProxyType
from weakref import WeakKeyDictionary, ref

from probes.memory import address_of
from probes.planning import (
    InputPassSimulator,
    KeepNode,
    Live,
    MemorySimulator,
    OffloadedBytes,
    OffloadSchedule,
    ProgramPoint,
    RanForward,
    UnitObserver,
    calls_of,
    held_of,
    installed,
    recomputed_ahead,
)
from probes.regions import RegionPlace, Settings, holding, thread


def executed(run, model, profile, tree, transfers=None):
    """The events of a real step, in which the units of `transfers` go to a store."""
    observer = Following(profile.units)
    store = Telling(observer)
    schedule = OffloadSchedule((store,), transfers, store.sees) if transfers else None
    with installed(
        model,
        calls_of(profile.units),
        tree,
        Settings(observer=observer),
        held_of(profile, tree),
        offload_schedule=schedule,
    ):
        left = run()
    events = [*observer.events]
    del left  # what a backward leaves that has not run to its end goes now, and is none of its events
    return events


def simulated(profile, tree, offloads=MappingProxyType({}), *, ahead=False, split=False):
    """The events that the simulator tells.

    `ahead` for a step whose regions are recomputed before the gradient comes, `split` for one whose backward is
    split: up to the end of its input pass.
    """
    kind = ToldInputPass if split else Told
    simulator = kind(profile.units, profile.sizes, profile.order, profile.lifetimes, tree, profile.options, offloads)
    steps = (simulator.forward(), recomputed_ahead(simulator), simulator.backward()) if ahead else (simulator,)
    for state in chain.from_iterable(steps):
        simulator.comes_to(state)
    return simulator.events


def first_difference(ours, theirs):
    """Both from a little before they differ, in words; nothing if they do not."""
    ours, theirs = in_order(ours), in_order(theirs)
    place = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs)))
    if place == len(ours) == len(theirs):
        return ""
    before = "\n".join(f"  {event}" for event in ours[max(0, place - 12) : place])
    return (
        f"after {place} equal events, of which these are the last:\n{before}\n"
        f"the executor:  {ours[place : place + 6]}\nthe simulator: {theirs[place : place + 6]}"
    )


def in_order(events):
    """The events with what goes at one moment in one order: autograd lets go of a unit's tensors node by node."""
    found = []
    for goes, run in groupby(events, lambda event: event.startswith(("drop", "release"))):
        for event in sorted(run) if goes else run:
            # A region that leaves no graph goes with its call; the simulator does not have it at all.
            if found and re.sub("^hold | at [0-9]+", "", found[-1]) == event.removeprefix("release "):
                found.pop()
            else:
                found.append(event)
    return found


def named(node, depth):
    return f"{node.first}-{node.last}/{depth}"


def told(verb, name, storages):
    return f"{verb} {name}: {' '.join(map(str, sorted(storages)))}"


# ----------------------------------------------------------------------------------------------------- simulated


class Told(MemorySimulator):
    """A walk that tells what it does."""

    def __init__(self, *args):
        super().__init__(*args)
        self.events = []
        self.holding = {}
        self.begun = set()  # units whose backward began before their last part was recomputed
        self.again = set()  # units of which all that was saved has been recomputed
        # By nested region and storage that it would have let go of by now, the units inside that have saved it as well.
        self.staying = {}
        self.original = {}
        self.offloaded = ToldOffloads(self, self.offloaded._offloads)

    def name(self, region):
        return named(region, self.depth[id(region)])

    def remake(self, unit, anew, kept=()):
        super().remake(unit, anew, kept)
        self.original.update({again: storage for storage, again in anew.items()})

    def numbers(self, storages):
        """The numbers of storages in the trace: what is recomputed ahead has numbers of its own."""
        return [self.original.get(storage, storage) for storage in storages]

    def hold_for(self, region, unit, storages):
        if storages:
            self.events.append(told("hold", f"{self.name(region)} at {unit}", self.numbers(storages)))
            self.holding.setdefault(self.name(region), set()).update(storages)
        super().hold_for(region, unit, storages)

    def let_go(self, region, gone):
        gone = gone & self.holding.get(self.name(region), set())
        own = [node.stage for node in region.children if isinstance(node, KeepNode) and node.stage in self.again]
        saving = {storage: {unit for unit in own if storage in self.sizes[unit].saved} for storage in gone}
        self.staying.update({(region, storage): units for storage, units in saving.items() if units})
        self.told_gone(region, {storage for storage, units in saving.items() if not units})
        super().let_go(region, gone)

    def keep(self, unit, *, again):
        if again:
            self.again.add(unit)
        super().keep(unit, again=again)

    def leave(self, region):
        self.told_gone(region, set(self.holding.get(self.name(region), ())))
        super().leave(region)

    def told_gone(self, region, gone):
        if gone:
            self.events.append(told("release", self.name(region), self.numbers(gone)))
            self.holding[self.name(region)] -= gone

    def lose_graphs(self, time):
        before = {id(one): one for one in self.regions if id(one) in self.slots}
        super().lose_graphs(time)
        for key in before.keys() - self.slots.keys():
            self.told_gone(before[key], set(self.holding.get(self.name(before[key]), ())))

    def recompute(self, region, until):
        self.events.append(f"recompute {self.name(region)}")
        for state in super().recompute(region, until):
            if isinstance(state, RanForward):
                is_part = state.option and self.chosen[state.unit].cuts and not self.is_ahead
                if is_part and state.unit in self.begun:
                    self.events.append(f"recompute {self.name(region)}")
                self.events.append(f"run {state.unit}" + ", cut" * state.truncated)
                if is_part and state.unit not in self.begun:
                    self.begun.add(state.unit)
                    self.events.append(f"backward {state.unit}")
            yield state

    def comes_to(self, state):
        if not isinstance(state, Live) or state.key[0] is not ProgramPoint.BACKWARD:
            return
        if self.around[state.key[1]] and state.key[1] not in self.begun:
            self.events.append(f"backward {state.key[1]}")

    def drop(self, unit, *, again):
        if again:
            self.again.discard(unit)
            self.events.append(f"drop {unit}")
            for (region, storage), units in [*self.staying.items()]:
                units.discard(unit)
                if not units:
                    del self.staying[region, storage]
                    self.told_gone(region, {storage})
        super().drop(unit, again=again)


class ToldInputPass(InputPassSimulator, Told):
    """Tells of the input pass of a backward: what it releases, with its graph, has no weight behind it."""


class ToldOffloads(OffloadedBytes):
    """Tells of each storage that goes to a store and comes back."""

    def __init__(self, simulator, offloads):
        super().__init__(simulator.live, simulator.units, simulator.lifetimes, offloads)
        self._simulator = simulator
        self.settled = set()

    def told(self, verb, unit, parcels):
        saved = self._simulator.units.saved(unit)
        self._simulator.events += [f"{verb} {saved[parcel.place]}" for parcel in parcels]

    def parcels(self, unit):
        return self._offloads[unit].offload_size.parcels

    def _store(self, unit):
        self.told("put", unit, [one for one in self.parcels(unit) if one.storage is None or not self._put[one.storage]])
        return super()._store(unit)

    def left(self, unit):
        yield from super().left(unit)
        for leaving in self._leaving.get(unit, ()):
            first = [one for one in self.parcels(leaving) if one.storage is None or one.storage not in self.settled]
            self.settled.update(one.storage for one in first)
            self.told("settle", leaving, first)

    def _away(self, unit):
        leaving = self._offloads[unit].offload_size.leaving
        return [one for one in leaving if one.storage is None or one.storage not in self._live.held]

    def _begin(self, unit):
        self.told("begin", unit, [one for one in self._away(unit) if one.storage not in self._begun])
        super()._begin(unit)

    def _bring(self, unit):
        self.told("bring", unit, self._away(unit))
        return super()._bring(unit)


# ------------------------------------------------------------------------------------------------------ executed


class Telling:
    """A store that tells what it is asked for."""

    def __init__(self, observer):
        self.observer = observer
        self.saved = Counter()  # by unit
        self.numbers = {}  # by address, of what is there

    def sees(self, unit, tensor):
        number = self.observer.units.saved(unit)[self.saved[unit]]
        self.saved[unit] += 1
        self.numbers[address_of(tensor.untyped_storage())] = number

    def put(self, tensor):
        return ToldHandle(self.observer.events, self.numbers[address_of(tensor.untyped_storage())], tensor.clone())


class ToldHandle:
    def __init__(self, events, number, tensor):
        self.events, self.number, self.tensor = events, number, tensor
        self.stored_bytes = tensor.nbytes
        self.is_settled = False
        self.events.append(f"put {number}")

    def settle(self):
        if not self.is_settled:
            self.events.append(f"settle {self.number}")
        self.is_settled = True

    def prefetch(self):
        self.events.append(f"begin {self.number}")

    def get(self):
        self.events.append(f"bring {self.number}")
        return self.tensor.clone()


def waiting_in(slot):
    """The recomputed tensor that waits in a slot for a backward or a session, if there is one."""
    if slot is None or slot.task is not None:
        return slot and slot.tensor
    return next((one.tensor for one in (slot.others or {}).values()), None)


class Following(UnitObserver):
    """The observer of a step under a tree. What a recompute makes of the regions inside it is not told."""

    def __init__(self, units):
        super().__init__(units)
        self.events = []
        self.names = WeakKeyDictionary()
        self.units_in = WeakKeyDictionary()  # by region, the unit of each of its calls
        self.slots = WeakKeyDictionary()  # by region and slot: the name, the unit and the storage that wait there
        self.memories = {}  # by name, what the region has been given in its recompute, by address
        self.unclaimed = set()  # by name and storage, what waits in slots and was not given yet
        self.waits = defaultdict(list)  # by name and storage, references to the slots in which it waits or has waited
        self.taken = []  # slots that the region around has for inputs of the one that begins
        self.held = Counter()  # by name and storage, how many tensors hold it
        self.running = {}  # by region that is recomputed, the call that runs
        self.left = Counter()  # by unit, how many of its slots are alive
        self.asked_for = set()
        self.kept = []  # references with callbacks

    def storage(self, unit, call, place):
        """The number of a tensor among the inputs of a unit's call; None if nothing but the model has it."""
        seen = self.units.trace.calls[self.units.units[unit].calls[call]].inputs[place]
        return None if seen.storage < 0 or seen.storage in self.units.trace.fixed else seen.storage

    def place_of(self, region, call):
        """The unit of a region's call, and the number of the call in it."""
        units = self.units_in[region]
        return units[call], units[:call].count(units[call])

    def meets(self, region):
        if region not in self.names:
            label = region.label
            first, last = (label.first, label.last) if isinstance(label, RegionPlace) else (self.unit_of(region),) * 2
            members = range(first, last + 1)
            depth = len(thread.now.calls) + 1
            self.names[region] = f"{first}-{last}/{depth}"
            self.units_in[region] = [unit for unit in members for _ in self.units.units[unit].calls]
            self.slots[region] = {}
            self.memories[self.names[region]] = {}
            if depth == 1:
                self.kept.append(ref(region, partial(self.gone, self.names[region])))

    def tell(self, verb, name, storages):
        """Note an event; those of several calls of one unit are one."""
        before = self.events[-1] if self.events else ""
        head, _, listed = before.partition(": ")
        if head == f"{verb} {name}":
            storages = {*storages, *map(int, listed.split())}
            self.events.pop()
        self.events.append(told(verb, name, storages))

    def hold(self, name, unit, storage):
        self.held[name, storage] += 1
        if self.held[name, storage] == 1:
            self.tell("hold", f"{name} at {unit}", {storage})

    def release(self, name, storage, *_):
        self.held[name, storage] -= 1
        if not self.held[name, storage]:
            del self.held[name, storage]
            # Another storage may come to lie there.
            self.memories[name] = {at: one for at, one in self.memories[name].items() if one != storage}
            self.tell("release", name, {storage})

    def never_given(self, name, storage, *_):
        if (name, storage) in self.unclaimed:
            self.unclaimed.discard((name, storage))
            self.release(name, storage)

    def gone(self, name, *_):
        for key in [key for key in self.held if key[0] == name]:
            self.held[key] = 1
            self.release(*key)

    def holds(self, region, call, places):
        if thread.now.recomputing:
            return
        self.meets(region)
        unit, number = self.place_of(region, call)
        storages = [self.storage(unit, number, place) for place in places]
        taken, self.taken = self.taken, []
        if not thread.now.calls:
            for storage in dict.fromkeys(storages):
                if storage is not None:
                    self.hold(self.names[region], unit, storage)
            return
        if len(taken) < len(storages):  # parameters are no saved tensors of the region around
            storages = [one for one in storages if one is not None]
        for (around, index), storage in zip(taken, storages, strict=True):
            self.slots[around][index] = self.names[region], unit, storage

    def saved(self, region, call, tensor):
        if region not in self.names or thread.now.recomputing:
            return
        index = len(region.slots) - 1
        if holding.now:
            self.taken.append((region, index))
            return
        unit, _ = self.place_of(region, call)
        self.left[unit] += 1
        self.kept.append(ref(region.slots[index](), partial(self.lost, unit)))

    def lost(self, unit, *_):
        self.left[unit] -= 1
        if not self.left[unit] and unit in self.asked_for:
            self.events.append(f"drop {unit}")

    def reruns(self, region, call):
        if region in self.names:
            if region not in self.running:
                self.events.append(f"recompute {self.names[region]}")
            self.running[region] = call

    def filled(self, region, index, tensor, *, ends):
        if region not in self.names:
            return
        slot = region.slots[index]()
        if index in self.slots[region]:
            name, unit, storage = self.slots[region][index]
            if storage is not None and slot is not None:
                self.hold(name, unit, storage)
                self.unclaimed.add((name, storage))
                self.kept.append(ref(slot, partial(self.never_given, name, storage)))
                self.waits[name, storage].append(ref(slot))
            return
        tensor = waiting_in(slot)
        storage = (
            self.memories[self.names[region]].get(address_of(tensor.untyped_storage())) if tensor is not None else None
        )
        if storage is not None:  # what the region holds is saved in it as well
            self.held[self.names[region], storage] += 1
            self.kept.append(ref(tensor, partial(self.release, self.names[region], storage)))
        if ends:
            self.events.append(f"run {self.units_in[region][self.running[region]]}, cut")

    def given(self, region, call, place, tensor):
        if region in self.names and not self.names[region].endswith("/1"):
            unit, number = self.place_of(region, call)
            storage = self.storage(unit, number, place)
            if storage is not None:
                self.unclaimed.discard((self.names[region], storage))
                self.memories[self.names[region]][address_of(tensor.untyped_storage())] = storage
                self.kept.append(ref(tensor, partial(self.let_go, self.names[region], storage)))

    def let_go(self, name, storage, *_):
        """What was given is gone; a session may have it in the slot still, for another one who asks."""
        if any(waiting_in(slot()) is not None for slot in self.waits[name, storage]):
            self.unclaimed.add((name, storage))
        else:
            self.release(name, storage)

    def returned(self, region, call, output):
        if region in self.names and call + 1 == len(self.units_in[region]) - self.units_in[region][::-1].index(
            self.units_in[region][call]
        ):
            self.events.append(f"run {self.units_in[region][call]}")

    def recomputed(self, region):
        self.running.pop(region, None)

    def asked(self, region, index, tensor):
        slot = region.slots[index]()
        is_held = slot is not None and slot.value is not None  # as the output of an operator, from the forward on
        if region in self.names and index not in self.slots[region] and not is_held:
            unit = self.units_in[region][region.call_of(index)]
            if unit not in self.asked_for:
                self.asked_for.add(unit)
                self.events.append(f"backward {unit}")
