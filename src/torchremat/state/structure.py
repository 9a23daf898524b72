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
from contextlib import suppress
from functools import partial
from gc import is_tracked
from itertools import chain, compress, repeat
from operator import attrgetter, call, is_not
from typing import Any, NamedTuple, cast
from weakref import ReferenceType, ref

from torch import Tensor, nn

from torchremat._compat.modules import hooks_of_all_modules
from torchremat.state.containers import MUTABLE, Dict, Dicts, size_of, values_of
from torchremat.state.contents import Contents
from torchremat.state.following.objects import LONG, tables_of
from torchremat.state.foreign import Foreign
from torchremat.state.holders import Bindings, ClassData, ClassValues, Container, Holder, LaterNames, Slots, ThreadLocal, attribute_of
from torchremat.state.world import LEADS_NOWHERE, Search, World


class _Round(NamedTuple):
    """Objects that cannot be held weakly, found among the contents that were read before; dicts come first.

    Attributes:
        places: Where each of them is.
        kinds: The ids of their types.
        reads: How those are read that are no dicts.
        owners: The numbers of those that have a dict of attributes.
        objects: The numbers of those whose class may be another one.
    """

    places: list[int]
    kinds: list[int]
    reads: list[Callable[[_Reading, Any], None]]
    owners: list[int]
    objects: list[int]


class _Reading(World):
    """What is reached now, as one reading of a structure finds it.

    Attributes:
        then: The contents of its dicts.
        all: The other holders, each with its contents.
        seen: The objects in all of these, in the order in which they were read.
        shape: How many there are in each and under which names, and what else must be the same.
        late: Of the objects that were found again.
    """

    __slots__ = ("all", "is_inert", "late", "seen", "shape", "then")

    def __init__(self, then: Dicts, seen: list[Any]) -> None:
        super().__init__()
        self.then = then
        self.dicts = then.dicts
        self.all: list[tuple[Holder, Any]] = []
        self.seen = seen
        self.shape: list[Any] = []
        self.late = Bindings()

    def read(self) -> Contents:
        """Return the contents that were read."""
        return Contents(self.then, self.all)

    def read_dicts(self, dicts: list[Dict]) -> None:
        """Read dicts."""
        found = Dicts(dicts)
        self.then = self.then.with_more(found)
        self.dicts += dicts
        self.seen += found.values
        self.shape += ([*map(size_of, dicts)], found.keys)

    def read_attributes(self, dicts: list[Dict]) -> None:
        """Read the attributes of tensors, of which most have none."""
        if any(dicts):
            self.read_dicts(dicts)
        else:
            self.then.add_empty(dicts)
            self.dicts += dicts

    def take(self, holder: Holder, contents: list[Any]) -> None:
        """Take what a holder has read."""
        self.all.append((holder, contents))
        self.seen += contents
        self.shape.append(len(contents))

    def read_items(self, item: Any) -> None:
        """Read a list, deque, set or bytearray."""
        holder = Container(item)
        self.take(holder, cast("list[object]", holder.read()))

    def read_tuple(self, item: tuple[object, ...]) -> None:
        """Read a tuple."""
        self.seen += tuple.__iter__(item)
        self.shape.append(tuple.__len__(item))

    def read_named(self, holder: Slots | ThreadLocal | None) -> None:
        """Read the attributes that a holder knows by name."""
        if holder is not None:
            contents = holder.read()
            self.all.append((holder, contents))
            self.seen += contents.values()
            self.shape.append([*contents])

    def read_slots(self, item: object) -> None:
        """Read the slots of an object, if it has some."""
        self.read_named(Slots.of(item))

    def read_foreign(self, item: object) -> None:
        """Read an object whose state lies outside of Python's, and is none of the structure."""
        holder = Foreign.of(item)
        if holder is not None:
            self.all.append((holder, holder.read()))


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
        "_owners", "_passes_versions", "_plain", "_refs", "_roots", "_rounds", "_sets_generators", "_shape", "_slotted", "_space_of",
        "_spaces", "_state", "_tables", "_tensors", "_values",
    )  # fmt: skip

    def __init__(self, world: Search, ended: Callable[[object], None]) -> None:
        if world.shards or world.waits or world.optimizers or world.named or world.proxied:
            raise CannotBeHeldError
        if not _KINDS.issuperset(map(type, world.rest)):
            raise CannotBeHeldError
        self._ended = ended
        self._refs: dict[int, ReferenceType[Any]] = {}
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
        self._rounds: list[_Round] = []
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
            if reading is None or not all(self._read_round(reading, one) for one in self._rounds):
                return None
            self._end(reading)
            return reading if reading.shape == self._shape and self._agrees(reading.seen) else None
        except Exception:  # noqa: BLE001 - whatever is not there any more, or compares values: the search says what is
            return None

    # ------------------------------------------------------------------------------------------------- what it is

    def _weak(self, items: Iterable[Any]) -> list[ReferenceType[Any]]:
        return [*map(self._hold, items)]

    def _hold(self, one: object) -> ReferenceType[Any]:
        found = self._refs.get(id(one))
        if found is None:
            try:
                found = self._refs[id(one)] = ref(one, self._ended)
            except TypeError:
                raise CannotBeHeldError from None
        return found

    def _find_spaces(self, world: Search) -> None:
        """Find where the Python modules come from whose names are read."""
        self._names = world.bindings.names
        spaces = {id(one): one for one in world.bindings.spaces}
        functions = {id(one.__globals__): one for one in world.bindings.functions}
        modules = {id(vars(one)): one for one in world.namespaces}
        self._spaces: list[ReferenceType[Any] | Dict] = []
        for key, space in spaces.items():
            if getattr(sys.modules.get(space.get("__name__", "")), "__dict__", None) is space:
                self._spaces.append(space)  # it lives as long as Python
            elif key in functions or key in modules:
                self._spaces.append(self._hold(functions.get(key) or modules[key]))
            else:
                raise CannotBeHeldError
        number_of = {key: number for number, key in enumerate(spaces)}
        self._space_of = [number_of[id(one)] for one in world.bindings.spaces]

    def _find_dicts(self, world: Search) -> Dicts:
        """Return the dicts of attributes of what is held weakly, without their contents."""
        own = [one.__dict__ for one in world.modules]
        dicts: list[Dict] = [*own, *chain.from_iterable(map(tables_of, own))]
        modules = {*map(id, world.modules)}
        dicts += [attribute_of(one, "__dict__") for one in world.bindings.owners if id(one) not in modules and _is_weak(one)]
        dicts += [one.__dict__ for one in world.bindings.functions]
        dicts += [one.keywords for one in world.partials if self._hold(one)]
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

    def _find_rest(self, world: Search, reading: _Reading) -> None:
        """Find the places of the objects that cannot be held weakly."""
        dicts = {*map(id, world.dicts)} - {*map(id, reading.dicts)}
        owners = {id(one) for one in world.bindings.owners if not _is_weak(one)}
        objects = {id(one) for one in world.bindings.objects if not _is_weak(one)}
        others = dict.fromkeys(owners | objects, _Reading.read_slots)
        for one in world.rest:
            if type(one) is Container:
                others[id(one.item)] = _Reading.read_items
            elif type(one) is Foreign and not _is_weak(one.item):
                others[id(one.item)] = _Reading.read_foreign
        tables = {id(one) for one in world.tables}
        found: set[int] = set()
        start = 0
        while start < len(reading.seen):
            new = [*enumerate(reading.seen)][start:]
            start = len(reading.seen)
            each: dict[int, Callable[[_Reading, Any], None] | None] = {}
            for place, one in new:
                key = id(one)
                if key in found:
                    continue
                if key in tables:
                    self._tables.append(place)
                elif key in dicts:
                    each[place] = None
                elif issubclass(type(one), tuple) and not _is_atom(one):
                    each[place] = _Reading.read_tuple
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
                _Round(
                    places,
                    [id(type(one)) for one in items],
                    [read for place in places if (read := each[place]) is not None],
                    [number for number, one in enumerate(items) if id(one) in owners],
                    [number for number, one in enumerate(items) if id(one) in objects],
                )
            )
            self._read_round(reading, self._rounds[-1])

    def _find_tensors(self, world: Search, reading: _Reading) -> None:
        """Find the places of the tensors: none is held weakly, since `swap_tensors` refuses such."""
        place_of = {id(one): place for place, one in reversed([*enumerate(reading.seen)])}
        try:
            self._tensors = [place_of[id(one)] for one in world.tensors]
        except KeyError:
            raise CannotBeHeldError from None

    def _pin(self, reading: _Reading) -> None:
        """Note which objects were seen, and keep those alive that refer to nothing."""
        if not all(map(_is_atom, chain.from_iterable(one for one in reading.shape if type(one) is list))):
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
        self._others = [one is _NO_ATOM and id(found) not in place_of for one, found in zip(kept, reading.seen, strict=True)]
        self._ids = [*map(id, compress(reading.seen, self._others))]

    def _kept(self, one: object) -> object:
        """Return what is kept of an object: itself, if it refers to nothing."""
        if _is_atom(one):
            return one
        if not isinstance(one, _OF_CLASSES) and id(one) not in self._held:
            self._hold(one)
        return _NO_ATOM

    # ---------------------------------------------------------------------------------------------------- reading

    def _begun(self) -> _Reading | None:
        """Read what is held weakly, and its dicts; return None if they have other names."""
        values = self._dicts.current()
        if values is None or (any(map(is_not, self._values, values)) and not self._differ_plainly(values)):
            return None
        world = _Reading(self._dicts.with_values(values), values[len(self._values) :])
        world.is_inert, world.sets_generators = self._is_inert, self._sets_generators
        world.passes_versions = self._passes_versions
        world.modules, world.generators = [*map(call, self._modules)], [*map(call, self._generators)]
        world.roots = [world.modules[number] for number in self._roots]
        bindings = world.bindings
        bindings.objects, bindings.owners = [*map(call, self._objects)], [*map(call, self._owners)]
        bindings.functions = [*map(call, self._functions)]
        bindings.cells = [*chain.from_iterable(filter(None, map(_closure, bindings.functions)))]
        if self._names:
            spaces = [one if type(one) is dict else _space_of(one()) for one in self._spaces]
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
            world.all.append((LaterNames(vars(one())), {}))
        return world

    def _differ_plainly(self, values: list[Any]) -> bool:
        """Return whether only numbers and strings differ in the dicts that hold nothing else."""
        pairs = zip(self._values, values, strict=False)
        if not all(one is before or (_is_atom(before) and _is_atom(one)) for before, one in pairs):
            return False
        self._values = values[: len(self._values)]
        return True

    def _read_round(self, reading: _Reading, found: _Round) -> bool:
        """Read objects that are found again; return whether they are of the same types."""
        items = [reading.seen[place] for place in found.places]
        if [*map(id, map(type, items))] != found.kinds:
            return False
        dicts = items[: len(items) - len(found.reads)]
        if found.owners:
            owners = [items[number] for number in found.owners]
            dicts += map(attribute_of, owners, repeat("__dict__"))
            reading.late.owners += owners
        if dicts:
            reading.read_dicts(dicts)
        for read, item in zip(found.reads, items[len(items) - len(found.reads) :], strict=True):
            read(reading, item)
        reading.late.objects += [items[number] for number in found.objects]
        return True

    def _end(self, reading: _Reading) -> None:
        """Add what depends on all that was read."""
        seen, shape = reading.seen, reading.shape
        if self._tensors:
            tensors = reading.tensors = [seen[place] for place in self._tensors]
            reading.read_attributes([*map(_attributes, tensors)])
            shape += ([*map(id, map(type, tensors))], [*map(_requires_grad, tensors)])
            reading.state = [(reading.modules[number], name, tensors[one]) for number, name, one in self._state]
            reading.loose = [tensors[number] for number in self._loose]
        if reading.late:
            reading.all.append((reading.late, reading.late.read()))
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


def _space_of(owner: Any) -> Dict:
    return owner.__globals__ if type(owner) is types.FunctionType else vars(owner)


def _is_part(world: Search, reading: _Reading) -> bool:
    """Return whether all that a search has found was read."""
    own, here, late = world.bindings, reading.bindings, reading.late
    pairs: list[tuple[Iterable[object], Iterable[object]]] = [
        (world.dicts, reading.dicts),
        (own.cells, here.cells),
        (own.objects, [*here.objects, *late.objects]),
        (own.owners, [*here.owners, *late.owners]),
        ([one.item for one in world.rest if one is not own], [one.item for one, _ in reading.all]),
    ]
    return all({*map(id, found)} <= {*map(id, read)} for found, read in pairs)


class Root:
    """A root, as its calls know it: what it reaches. See NOTE [ Structure and stamps ]."""

    __slots__ = ("__weakref__", "_searches", "_structure")

    def __init__(self) -> None:
        self._structure: Structure | None = None
        self._searches = 0  # since the structure was the same as before

    def recall(self) -> World | None:
        """Return what it reaches now, None if it must be searched for."""
        known = self._structure
        if known is None:
            return None
        found = known.read()
        if found is None:
            self._structure = None
        else:
            self._searches = 0
        return found

    def remember(self, world: Search) -> None:
        """Keep the structure that a search has found; ever more rarely where each call finds another one."""
        self._searches += 1
        if self._searches & (self._searches - 1):
            return
        with suppress(CannotBeHeldError):
            self._structure = Structure(world, partial(_end, ref(self)))


class Rooted:
    """The forward of a module that is a root.

    Attributes:
        root: What its calls know.
    """

    def __init__(self) -> None:
        self.root = Root()


def root_of(module: object) -> Root | None:
    """Return what calls know of a module that is a root, None if it is none."""
    forward = module.__dict__.get("forward") if isinstance(module, nn.Module) else None
    return forward.root if isinstance(forward, Rooted) else None


def _end(root: ReferenceType[Root], _: object) -> None:
    if (alive := root()) is not None:
        alive._structure = None
