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
from itertools import chain, repeat
from operator import attrgetter, call, is_not
from typing import Any, NamedTuple, cast
from weakref import ref

from torch import Tensor

from torchremat._compat.modules import hooks_of_all_modules
from torchremat.state.containers import Dict, Dicts, values_of
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
from torchremat.state.reached import Expected, Reached, Round, is_atom, is_weak
from torchremat.state.world import Reaching, World

Weak = Callable[[], Any]
"""Returns an object that is held weakly, while it lives."""


class CannotBeHeldError(Exception):
    """Something in a world can neither be held weakly nor found again."""


class _Held(NamedTuple):
    """What a structure holds weakly, by how it is read: see `World`, `Bindings` and the holders."""

    modules: list[Weak]
    functions: list[Weak]
    objects: list[Weak]
    owners: list[Weak]
    generators: list[Weak]
    slots: list[Weak]
    foreign: list[Weak]
    locals: list[Weak]
    namespaces: list[Weak]


_attributes = cast("Callable[[Tensor], Dict]", attrgetter("__dict__"))
_closure = cast("Callable[[types.FunctionType], tuple[types.CellType, ...] | None]", attrgetter("__closure__"))
_requires_grad = cast("Callable[[Tensor], bool]", attrgetter("requires_grad"))
# Parts of classes, which live as long as these.
_OF_CLASSES = (
    property, classmethod, staticmethod, types.GetSetDescriptorType, types.MemberDescriptorType,
    types.MethodDescriptorType, types.ClassMethodDescriptorType, types.WrapperDescriptorType,
)  # fmt: skip
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
        "_classes", "_dicts", "_ended", "_expected", "_facts", "_held", "_imports", "_known", "_loose", "_names",
        "_refs", "_roots", "_rounds", "_space_of", "_spaces", "_state", "_tables", "_tensors", "_values",
    )  # fmt: skip

    def __init__(self, world: Reaching, ended: Callable[[object], None]) -> None:
        if world.shards or world.waits or world.optimizers or world.named or world.proxied:
            raise CannotBeHeldError
        if not _KINDS.issuperset(map(type, world.rest)):
            raise CannotBeHeldError
        self._ended = ended
        self._refs: dict[int, Weak] = {}
        self._facts = world.is_inert, world.sets_generators, world.passes_versions
        number_of = {id(one): number for number, one in enumerate(world.modules)}
        tensor_of = {id(one): number for number, one in enumerate(world.tensors)}
        try:
            self._roots = [number_of[id(one)] for one in world.roots]
            self._state = [(number_of[id(one)], name, tensor_of[id(tensor)]) for one, name, tensor in world.state]
            self._loose = [tensor_of[id(one)] for one in world.loose]
        except KeyError:
            raise CannotBeHeldError from None  # a tensor without a version
        items = [(type(one), one.item) for one in world.rest]
        self._held = _Held(
            self._weak(world.modules),
            self._weak(world.bindings.functions),
            self._weak(filter(is_weak, world.bindings.objects)),
            self._weak(filter(is_weak, world.bindings.owners)),
            self._weak(world.generators),
            self._weak(one for kind, one in items if kind is Slots and is_weak(one)),
            self._weak(one for kind, one in items if kind is Foreign and is_weak(one)),
            self._weak(one for kind, one in items if kind is ThreadLocal),
            self._weak(world.namespaces),
        )
        self._classes = [one for one in world.rest if isinstance(one, ClassData)]
        self._imports = world.imports
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
        names = (self._dicts.keys, *(one for one in reading.shape if type(one) is list))
        if not all(map(is_atom, chain.from_iterable(names))):
            raise CannotBeHeldError  # a dict has objects for keys
        again = [*self._tables, *self._tensors, *chain.from_iterable(one.places for one in self._rounds)]
        self._expected = Expected(reading, again, self._pins)

    def read(self) -> World | None:
        """Return what is reached now, None if the structure is another one."""
        try:
            reading = self._begun()
            if reading is None or not all(map(reading.read_round, self._rounds)):
                return None
            self._end(reading)
            return reading if self._expected.agrees(reading) else None
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
        owners = [one for one in world.bindings.owners if id(one) not in modules and is_weak(one)]
        dicts += map(attribute_of, owners, repeat("__dict__"))
        dicts += [one.__dict__ for one in world.bindings.functions]
        self._weak(world.partials)
        dicts += [one.keywords for one in world.partials]
        if world.modules:
            dicts += hooks_of_all_modules
        names = [one.__dict__.get("_non_persistent_buffers_set") for one in world.modules]
        self._known = {*map(id, dicts), *(id(one) for one in names if one is not None)}
        each = {id(one): one for one in dicts}
        plain = {key for key, own in each.items() if all(map(self._is_known, values_of(own)))}
        first = Dicts([own for key, own in each.items() if key in plain])
        self._values = first.values
        return first.with_more(Dicts([own for key, own in each.items() if key not in plain])).with_values([])

    def _is_known(self, one: object) -> bool:
        return id(one) in self._known or is_atom(one)

    def _find_rest(self, world: Reaching, reading: Reached) -> None:
        """Find the places of the objects that cannot be held weakly."""
        dicts = {*map(id, world.dicts)} - {*map(id, reading.read().all_dicts)}
        owners = {id(one) for one in world.bindings.owners if not is_weak(one)}
        objects = {id(one) for one in world.bindings.objects if not is_weak(one)}
        others = dict.fromkeys(owners | objects, Reached.read_slots)
        for one in world.rest:
            if type(one) is Container:
                others[id(one.item)] = Reached.read_items
            elif type(one) is Foreign and not is_weak(one.item):
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
                elif issubclass(type(one), tuple) and not is_atom(one):
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

    def _pins(self, one: object) -> bool:
        """Return whether an object is kept, since it refers to nothing; else note when it dies."""
        if is_atom(one):
            return True
        if not isinstance(one, _OF_CLASSES) and id(one) not in self._known:
            self._hold(one)
        return False

    # ---------------------------------------------------------------------------------------------------- reading

    def _begun(self) -> Reached | None:
        """Read what is held weakly, and its dicts; return None if they have other names."""
        values = self._dicts.current()
        if values is None or (any(map(is_not, self._values, values)) and not self._differ_plainly(values)):
            return None
        world = Reached(self._dicts.with_values(values), values[len(self._values) :])
        held = self._held
        world.is_inert, world.sets_generators, world.passes_versions = self._facts
        world.modules, world.generators = [*map(call, held.modules)], [*map(call, held.generators)]
        world.roots = [world.modules[number] for number in self._roots]
        bindings = world.bindings
        bindings.objects, bindings.owners = [*map(call, held.objects)], [*map(call, held.owners)]
        bindings.functions = [*map(call, held.functions)]
        bindings.cells = [*chain.from_iterable(filter(None, map(_closure, bindings.functions)))]
        if self._names:
            spaces = [*map(call, self._spaces)]
            bindings.spaces, bindings.names = [*map(spaces.__getitem__, self._space_of)], self._names
        if bindings:
            world.take(bindings, bindings.read())
        for one in self._classes:
            world.take(one, one.read())
        for one in held.slots:
            world.read_slots(one())
        for one in held.foreign:
            world.read_foreign(one())
        for one in held.locals:
            world.read_named(ThreadLocal(one()))
        for one in held.namespaces:
            world.found.append((LaterNames(vars(one())), {}))
        return world

    def _differ_plainly(self, values: list[Any]) -> bool:
        """Return whether only numbers and strings differ in the dicts that hold nothing else."""
        pairs = zip(self._values, values, strict=False)
        if not all(one is before or (is_atom(before) and is_atom(one)) for before, one in pairs):
            return False
        self._values = values[: len(self._values)]
        return True

    def _end(self, reading: Reached) -> None:
        """Add what depends on all that was read."""
        seen, shape = reading.seen, reading.shape
        if self._tensors:
            tensors = reading.tensors = [seen[place] for place in self._tensors]
            reading.read_dicts([*map(_attributes, tensors)])
            shape += ([*map(id, map(type, tensors))], [*map(_requires_grad, tensors)])
            reading.state = [(reading.modules[number], name, tensors[one]) for number, name, one in self._state]
            reading.loose = [tensors[number] for number in self._loose]
        if reading.late:
            reading.found.append((reading.late, reading.late.read()))
        if self._held.namespaces or self._imports or self._tables:
            shape.append([len(vars(one())) for one in self._held.namespaces])
            shape.append([*map(id, map(sys.modules.get, self._imports))])
            shape.append([len(seen[place]) > LONG for place in self._tables])


def _space_of(held: Weak) -> Dict:
    owner = held()
    return owner.__globals__ if type(owner) is types.FunctionType else vars(owner)


def _same(space: Dict) -> Dict:
    return space


def _is_part(world: Reaching, reading: Reached) -> bool:
    """Return whether all that a search has found was read."""
    own, here, late = world.bindings, reading.bindings, reading.late
    pairs: list[tuple[Iterable[object], Iterable[object]]] = [
        (world.dicts, reading.read().all_dicts),
        (own.cells, here.cells),
        (own.objects, [*here.objects, *late.objects]),
        (own.owners, [*here.owners, *late.owners]),
        ([one.item for one in world.rest if one is not own], [one.item for one, _ in reading.found]),
    ]
    return all({*map(id, found)} <= {*map(id, read)} for found, read in pairs)
