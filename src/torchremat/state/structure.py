"""The structure of what a root reaches: searched for once; each later call reads it, and compares.

NOTE [ Structure and stamps ]

    structure    which objects are reached, which names they have, and what holds them; made once for a root
    stamps       the versions of tensors, the values of what is plain, and all other contents; read by each call

A step of an optimizer moves versions, a counter changes a value, a batch norm writes its statistics: none of these
changes the structure, so in training every call shares it. If another object is anywhere in it, if a name, a class or a
piece of code is another one, the next call searches again.

A structure keeps no object alive, and belongs to the root, which keeps it: to the forward of a wrapped module. It holds
the dicts of attributes of objects, and the objects themselves weakly: when the first of them dies, it ends. What cannot
be held weakly (a list, a dict, an object with slots; a tensor, which `swap_tensors` would refuse) is found again where
it was found, by its place among the contents that were read before. Numbers and strings are kept. A world of which this
is not so, of a scripted module or of parameters that are sharded, is searched for by each call.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterable
from functools import partial
from gc import is_tracked
from itertools import chain, compress, repeat
from operator import attrgetter, call, is_not
from typing import Any, cast
from weakref import ref

from torch import Tensor

from torchremat._compat.modules import hooks_of_all_modules
from torchremat.state.containers import MUTABLE, Dict, Dicts, values_of
from torchremat.state.following.objects import LONG, tables_of
from torchremat.state.foreign import Foreign
from torchremat.state.holders import (
    Bindings,
    ClassData,
    ClassValues,
    Container,
    LaterNames,
    Slots,
    ThreadLocal,
    attribute_of,
)
from torchremat.state.reached import Reached, Round
from torchremat.state.world import LEADS_NOWHERE, Reaching, World

Weak = Callable[[], Any]
"""Returns an object that is held weakly, while it lives."""


class CannotBeHeldError(Exception):
    """Something in a world can neither be held weakly nor found again."""


_attributes = cast("Callable[[Tensor], Dict]", attrgetter("__dict__"))
_closure = cast("Callable[[types.FunctionType], tuple[types.CellType, ...] | None]", attrgetter("__closure__"))
_requires_grad = cast("Callable[[Tensor], bool]", attrgetter("requires_grad"))
# Types whose objects refer to nothing that dies, and parts of classes, which live as long as these.
_ATOMS = frozenset(LEADS_NOWHERE - {property, types.CodeType})
_OF_CLASSES = (
    property, classmethod, staticmethod, types.GetSetDescriptorType, types.MemberDescriptorType,
    types.MethodDescriptorType, types.ClassMethodDescriptorType, types.WrapperDescriptorType,
)  # fmt: skip
_NO_ATOM = object()
_KINDS = frozenset({Bindings, ClassData, ClassValues, Container, Foreign, LaterNames, Slots, ThreadLocal})


class Structure:
    """What a root reaches. See NOTE [ Structure and stamps ].

    Args:
        world: The search from the root, which has ended.
        ended: Called when an object in it dies.

    Raises:
        CannotBeHeldError: Something in it can neither be held weakly nor found again.
    """

    __slots__ = (
        "_aliases", "_atoms", "_classes", "_dicts", "_ended", "_foreign", "_functions", "_generators", "_held", "_ids",
        "_imports", "_is_inert", "_locals", "_loose", "_modules", "_names", "_namespaces", "_objects", "_others",
        "_owners", "_passes_versions", "_plain", "_refs", "_roots", "_rounds", "_sets_generators", "_shape", "_slotted",
        "_space_of", "_spaces", "_state", "_tables", "_tensors", "_values",
    )  # fmt: skip

    def __init__(self, world: Reaching, ended: Callable[[object], None]) -> None:
        if world.shards or world.waits or world.optimizers or world.named or world.proxied:
            raise CannotBeHeldError
        if not _KINDS.issuperset(map(type, world.rest)):
            raise CannotBeHeldError
        self._ended = ended
        self._refs: dict[int, Weak] = {}
        self._is_inert, self._sets_generators = world.is_inert, world.sets_generators
        self._passes_versions = world.passes_versions
        self._modules = self._weak(world.modules)
        number_of = {id(one): number for number, one in enumerate(world.modules)}
        tensor_of = {id(one): number for number, one in enumerate(world.tensors)}
        try:
            self._roots = [number_of[id(one)] for one in world.roots]
            self._state = [(number_of[id(one)], name, tensor_of[id(tensor)]) for one, name, tensor in world.state]
            self._loose = [tensor_of[id(one)] for one in world.loose]
        except KeyError:
            raise CannotBeHeldError from None  # a tensor without a version
        own = world.bindings
        self._functions = self._weak(own.functions)
        self._objects = self._weak(filter(_is_weak, own.objects))
        self._owners = self._weak(filter(_is_weak, own.owners))
        self._generators = self._weak(world.generators)
        items = [(type(one), one.item) for one in world.rest]
        self._slotted = self._weak(one for kind, one in items if kind is Slots and _is_weak(one))
        self._foreign = self._weak(one for kind, one in items if kind is Foreign and _is_weak(one))
        self._locals = self._weak(one for kind, one in items if kind is ThreadLocal)
        self._classes = [one for one in world.rest if isinstance(one, ClassData)]
        self._namespaces, self._imports = self._weak(world.namespaces), world.imports
        self._find_spaces(world)
        self._dicts = self._find_dicts(world)
        self._rounds: list[Round] = []
        self._tables: list[int] = []
        reading = self._begun()
        if reading is None:
            raise CannotBeHeldError
        self._find_rest(world, reading)
        self._find_tensors(world, reading)
        self._end(reading)
        if not _is_part(world, reading):
            raise CannotBeHeldError
        self._shape = reading.shape
        self._pin(reading)

    def read(self) -> World | None:
        """Return what is reached now, None if the structure is another one."""
        try:
            reading = self._begun()
            if reading is None or not all(map(reading.read_round, self._rounds)):
                return None
            self._end(reading)
            return reading if reading.shape == self._shape and self._agrees(reading.seen) else None
        except Exception:  # noqa: BLE001 - whatever is not there any more, or compares values: the search says what is
            return None

    # ------------------------------------------------------------------------------------------------- what it is

    def _weak(self, items: Iterable[Any]) -> list[Weak]:
        return [*map(self._hold, items)]

    def _hold(self, one: object) -> Weak:
        found = self._refs.get(id(one))
        if found is None:
            if isinstance(one, Tensor):
                raise CannotBeHeldError
            try:
                found = self._refs[id(one)] = ref(one, self._ended)
            except TypeError:
                raise CannotBeHeldError from None
        return found

    def _find_spaces(self, world: Reaching) -> None:
        """Find where the Python modules come from whose names are read."""
        self._names = world.bindings.names
        spaces = {id(one): one for one in world.bindings.spaces}
        functions = {id(one.__globals__): one for one in world.bindings.functions}
        modules = {id(vars(one)): one for one in world.namespaces}
        self._spaces: list[Weak] = []
        for key, space in spaces.items():
            if getattr(sys.modules.get(space.get("__name__", "")), "__dict__", None) is space:
                self._spaces.append(partial(_same, space))  # it lives as long as Python
            elif key in functions or key in modules:
                self._spaces.append(partial(_space_of, self._hold(functions.get(key) or modules[key])))
            else:
                raise CannotBeHeldError
        number_of = {key: number for number, key in enumerate(spaces)}
        self._space_of = [number_of[id(one)] for one in world.bindings.spaces]

    def _find_dicts(self, world: Reaching) -> Dicts:
        """Return the dicts of attributes of what is held weakly, without their contents."""
        own = [one.__dict__ for one in world.modules]
        dicts: list[Dict] = [*own, *chain.from_iterable(map(tables_of, own))]
        modules = {*map(id, world.modules)}
        owners = [one for one in world.bindings.owners if id(one) not in modules and _is_weak(one)]
        dicts += map(attribute_of, owners, repeat("__dict__"))
        dicts += [one.__dict__ for one in world.bindings.functions]
        self._weak(world.partials)
        dicts += [one.keywords for one in world.partials]
        if world.modules:
            dicts += hooks_of_all_modules
        names = [one.__dict__.get("_non_persistent_buffers_set") for one in world.modules]
        self._held = {*map(id, dicts), *(id(one) for one in names if one is not None)}
        each = {id(one): one for one in dicts}
        plain = {key for key, own in each.items() if all(map(self._is_held, values_of(own)))}
        first = Dicts([own for key, own in each.items() if key in plain])
        self._values = first.values
        return first.with_more(Dicts([own for key, own in each.items() if key not in plain])).with_values([])

    def _is_held(self, one: object) -> bool:
        return id(one) in self._held or _is_atom(one)

    def _find_rest(self, world: Reaching, reading: Reached) -> None:
        """Find the places of the objects that cannot be held weakly."""
        dicts = {*map(id, world.dicts)} - {*map(id, reading.dicts)}
        owners = {id(one) for one in world.bindings.owners if not _is_weak(one)}
        objects = {id(one) for one in world.bindings.objects if not _is_weak(one)}
        others = dict.fromkeys(owners | objects, Reached.read_slots)
        for one in world.rest:
            if type(one) is Container:
                others[id(one.item)] = Reached.read_items
            elif type(one) is Foreign and not _is_weak(one.item):
                others[id(one.item)] = Reached.read_foreign
        tables = {id(one) for one in world.tables}
        found: set[int] = set()
        start = 0
        while start < len(reading.seen):
            new = [*enumerate(reading.seen)][start:]
            start = len(reading.seen)
            each: dict[int, Callable[[Reached, Any], object] | None] = {}
            for place, one in new:
                key = id(one)
                if key in found:
                    continue
                if key in tables:
                    self._tables.append(place)
                elif key in dicts:
                    each[place] = None
                elif issubclass(type(one), tuple) and not _is_atom(one):
                    each[place] = Reached.read_tuple
                elif key in others:
                    each[place] = others[key]
                else:
                    continue
                found.add(key)
            if not each:
                return
            places = sorted(each, key=lambda place: each[place] is not None)
            items = [reading.seen[place] for place in places]
            self._rounds.append(
                Round(
                    places,
                    [id(type(one)) for one in items],
                    [read for place in places if (read := each[place]) is not None],
                    [number for number, one in enumerate(items) if id(one) in owners],
                    [number for number, one in enumerate(items) if id(one) in objects],
                )
            )
            reading.read_round(self._rounds[-1])

    def _find_tensors(self, world: Reaching, reading: Reached) -> None:
        """Find the places of the tensors: none is held weakly, since `swap_tensors` refuses such."""
        place_of = {id(one): place for place, one in reversed([*enumerate(reading.seen)])}
        try:
            self._tensors = [place_of[id(one)] for one in world.tensors]
        except KeyError:
            raise CannotBeHeldError from None

    def _pin(self, reading: Reached) -> None:
        """Note which objects were seen, and keep those alive that refer to nothing."""
        names = (self._dicts.keys, *(one for one in reading.shape if type(one) is list))
        if not all(map(_is_atom, chain.from_iterable(names))):
            raise CannotBeHeldError  # a dict has objects for keys
        again = {*self._tables, *self._tensors, *chain.from_iterable(one.places for one in self._rounds)}
        place_of = {id(reading.seen[place]): place for place in again}
        self._aliases: list[tuple[int, int]] = []
        kept: list[object] = []
        for place, one in enumerate(reading.seen):
            first = place_of.get(id(one))
            if first is not None and first != place:
                self._aliases.append((first, place))
            kept.append(_NO_ATOM if first is not None else self._kept(one))
        self._atoms = [one for one in kept if one is not _NO_ATOM]
        self._plain = [one is not _NO_ATOM for one in kept]
        pairs = zip(kept, reading.seen, strict=True)
        self._others = [one is _NO_ATOM and id(found) not in place_of for one, found in pairs]
        self._ids = [*map(id, compress(reading.seen, self._others))]

    def _kept(self, one: object) -> object:
        """Return what is kept of an object: itself, if it refers to nothing."""
        if _is_atom(one):
            return one
        if not isinstance(one, _OF_CLASSES) and id(one) not in self._held:
            self._hold(one)
        return _NO_ATOM

    # ---------------------------------------------------------------------------------------------------- reading

    def _begun(self) -> Reached | None:
        """Read what is held weakly, and its dicts; return None if they have other names."""
        values = self._dicts.current()
        if values is None or (any(map(is_not, self._values, values)) and not self._differ_plainly(values)):
            return None
        world = Reached(self._dicts.with_values(values), values[len(self._values) :])
        world.is_inert, world.sets_generators = self._is_inert, self._sets_generators
        world.passes_versions = self._passes_versions
        world.modules, world.generators = [*map(call, self._modules)], [*map(call, self._generators)]
        world.roots = [world.modules[number] for number in self._roots]
        bindings = world.bindings
        bindings.objects, bindings.owners = [*map(call, self._objects)], [*map(call, self._owners)]
        bindings.functions = [*map(call, self._functions)]
        bindings.cells = [*chain.from_iterable(filter(None, map(_closure, bindings.functions)))]
        if self._names:
            spaces = [*map(call, self._spaces)]
            bindings.spaces, bindings.names = [*map(spaces.__getitem__, self._space_of)], self._names
        if bindings:
            world.take(bindings, bindings.read())
        for one in self._classes:
            world.take(one, one.read())
        for one in self._slotted:
            world.read_slots(one())
        for one in self._foreign:
            world.read_foreign(one())
        for one in self._locals:
            world.read_named(ThreadLocal(one()))
        for one in self._namespaces:
            world.found.append((LaterNames(vars(one())), {}))
        return world

    def _differ_plainly(self, values: list[Any]) -> bool:
        """Return whether only numbers and strings differ in the dicts that hold nothing else."""
        pairs = zip(self._values, values, strict=False)
        if not all(one is before or (_is_atom(before) and _is_atom(one)) for before, one in pairs):
            return False
        self._values = values[: len(self._values)]
        return True

    def _end(self, reading: Reached) -> None:
        """Add what depends on all that was read."""
        seen, shape = reading.seen, reading.shape
        if self._tensors:
            tensors = reading.tensors = [seen[place] for place in self._tensors]
            reading.read_attributes([*map(_attributes, tensors)])
            shape += ([*map(id, map(type, tensors))], [*map(_requires_grad, tensors)])
            reading.state = [(reading.modules[number], name, tensors[one]) for number, name, one in self._state]
            reading.loose = [tensors[number] for number in self._loose]
        if reading.late:
            reading.found.append((reading.late, reading.late.read()))
        if self._namespaces or self._imports or self._tables:
            shape.append([len(vars(one())) for one in self._namespaces])
            shape.append([*map(id, map(sys.modules.get, self._imports))])
            shape.append([len(seen[place]) > LONG for place in self._tables])

    def _agrees(self, seen: list[Any]) -> bool:
        """Return whether the objects that were seen are the same, but for what is plain."""
        if [*map(id, compress(seen, self._others))] != self._ids:
            return False
        if any(seen[first] is not seen[place] for first, place in self._aliases):
            return False
        atoms = [*compress(seen, self._plain)]
        if atoms != self._atoms:
            if not all(map(_is_atom, atoms)):
                return False
            self._atoms = atoms
        return True


def _is_weak(one: object) -> bool:
    try:
        ref(one)
    except TypeError:
        return False
    return True


def _is_atom(one: object) -> bool:
    """Return whether an object refers to nothing that dies."""
    if type(one) in _ATOMS:
        return True
    if type(one) is tuple:
        return all(map(_is_atom, cast("tuple[object, ...]", one)))
    return not (is_tracked(one) or issubclass(type(one), MUTABLE) or _is_weak(one))


def _space_of(held: Weak) -> Dict:
    owner = held()
    return owner.__globals__ if type(owner) is types.FunctionType else vars(owner)


def _same(space: Dict) -> Dict:
    return space


def _is_part(world: Reaching, reading: Reached) -> bool:
    """Return whether all that a search has found was read."""
    own, here, late = world.bindings, reading.bindings, reading.late
    pairs: list[tuple[Iterable[object], Iterable[object]]] = [
        (world.dicts, reading.dicts),
        (own.cells, here.cells),
        (own.objects, [*here.objects, *late.objects]),
        (own.owners, [*here.owners, *late.owners]),
        ([one.item for one in world.rest if one is not own], [one.item for one, _ in reading.found]),
    ]
    return all({*map(id, found)} <= {*map(id, read)} for found, read in pairs)
