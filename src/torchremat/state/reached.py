"""One reading of a structure: what is reached now, and what must be as before for the structure to be the same."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable
from gc import is_tracked
from itertools import compress, repeat
from operator import is_not
from typing import Any, NamedTuple, cast
from weakref import ref

from torchremat._compat.memory import addresses_of
from torchremat.state.containers import MUTABLE, Dict, Dicts, size_of
from torchremat.state.foreign import Foreign
from torchremat.state.holders import Bindings, Container, Holder, Slots, ThreadLocal, attribute_of
from torchremat.state.world import LEADS_NOWHERE, World
from torchremat.state.world_state import WorldState


class Round(NamedTuple):
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
    reads: list[Callable[[Reached, Any], object]]
    owners: list[int]
    objects: list[int]


class Reached(World):
    """What is reached now, as one reading of a structure finds it.

    Attributes:
        then: The contents of its dicts.
        found: The other holders, each with its contents.
        seen: The objects in all of these, in the order in which they were read.
        shape: How many there are in each and under which names, and what else must be the same.
        late: Of the objects that were found again.
    """

    __slots__ = ("found", "is_inert", "late", "seen", "shape", "then")

    def __init__(self, then: Dicts, seen: list[Any]) -> None:
        super().__init__()
        self.then = [then]
        self.found: list[tuple[Holder, Any]] = []
        self.seen = seen
        self.shape: list[Any] = []
        self.late = Bindings()

    def read(self) -> WorldState:
        """Return the contents that were read."""
        return WorldState(self.then, self.found)

    def read_dicts(self, dicts: list[Dict]) -> None:
        """Read dicts."""
        found = Dicts(dicts)
        self.then.append(found)
        self.seen += found.values
        self.shape += ([*map(size_of, dicts)], found.keys)

    def take(self, holder: Holder, contents: list[Any]) -> None:
        """Take what a holder has read."""
        self.found.append((holder, contents))
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
            self.found.append((holder, contents))
            self.seen += contents.values()
            self.shape.append([*contents])

    def read_slots(self, item: object) -> None:
        """Read the slots of an object, if it has some."""
        self.read_named(Slots.of(item))

    def read_foreign(self, item: object) -> None:
        """Read an object whose state lies outside of Python's, and is none of the structure."""
        holder = Foreign.of(item)
        if holder is not None:
            self.found.append((holder, holder.read()))

    def read_round(self, found: Round) -> bool:
        """Read objects that are found again; return whether they are of the same types."""
        items = [self.seen[place] for place in found.places]
        if [*map(id, map(type, items))] != found.kinds:
            return False
        number = len(items) - len(found.reads)
        dicts, owners = items[:number], [items[number] for number in found.owners]
        dicts += map(attribute_of, owners, repeat("__dict__"))
        if dicts:
            self.read_dicts(dicts)
        for read, item in zip(found.reads, items[number:], strict=True):
            read(self, item)
        self.late.owners += owners
        self.late.objects += [items[number] for number in found.objects]
        return True


class Expected:
    """What must be seen for the structure to be the same.

    Args:
        reading: What was seen.
        again: The places of what is found again, whatever is there now.
        pins: Keeps an object, or notes when it dies; returns whether it is kept.

    Attributes:
        shape: See `Reached`.
    """

    __slots__ = ("_addresses", "_aliases", "_atoms", "_ids", "_others", "_plain", "shape")

    def __init__(self, reading: Reached, again: Iterable[int], pins: Callable[[object], bool]) -> None:
        self.shape, seen = reading.shape, reading.seen
        place_of = {id(seen[place]): place for place in again}
        firsts = [place_of.get(id(one)) for one in seen]
        # Where one object is in several places, it must stay one object.
        self._aliases = [(first, place) for place, first in enumerate(firsts) if first not in (None, place)]
        kept = [first is None and pins(one) for first, one in zip(firsts, seen, strict=True)]
        self._plain = kept
        self._others = [first is None and not is_kept for first, is_kept in zip(firsts, kept, strict=True)]
        self._atoms, self._ids = [*compress(seen, kept)], [*map(id, compress(seen, self._others))]
        self._addresses = addresses_of(tuple(seen))

    def agrees(self, reading: Reached) -> bool:
        """Return whether the same was seen, but for what is plain."""
        seen = reading.seen
        if reading.shape != self.shape:
            return False
        addresses = addresses_of(tuple(seen))
        if addresses == self._addresses:
            return True
        if [*map(id, compress(seen, self._others))] != self._ids:
            return False
        if any(seen[first] is not seen[place] for first, place in self._aliases):
            return False
        atoms = [*compress(seen, self._plain)]
        if any(map(is_not, atoms, self._atoms)):  # not by value: a tensor may be equal to a number
            if not all(map(is_atom, atoms)):
                return False
            self._atoms = atoms
        self._addresses = addresses
        return True


# Types whose objects refer to nothing that dies.
_ATOMS = frozenset(LEADS_NOWHERE - {property, types.CodeType})


def is_weak(one: object) -> bool:
    """Return whether an object can be held weakly."""
    try:
        ref(one)
    except TypeError:
        return False
    return True


def is_atom(one: object) -> bool:
    """Return whether an object refers to nothing that dies."""
    if type(one) in _ATOMS:
        return True
    if type(one) is tuple:
        return all(map(is_atom, cast("tuple[object, ...]", one)))
    return not (is_tracked(one) or issubclass(type(one), MUTABLE) or is_weak(one))
