"""What mutable objects hold: read, compared by identity, and written back.

Dicts (attributes, tables of modules and dicts themselves) are by far the most, and one comparison does for all of them:
see `Dicts`. Everything else is a `Holder`.
"""

from __future__ import annotations

import random
import types
from abc import ABC, abstractmethod
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Set
from copy import copy, deepcopy
from itertools import accumulate, chain, compress, count, filterfalse, repeat
from operator import attrgetter, is_not
from typing import Any, cast

import numpy as np

from torchremat.state.watching import only_looks_on

Dict = dict[Any, Any]
_ABSENT = object()  # in the place of what a name or a cell does not have


class Dicts:
    """What some dicts hold now, in one piece.

    What has not changed costs one comparison, however many they are.

    Attributes:
        values: All of their values, one dict after the other.
    """

    __slots__ = ("_dicts", "_empty", "_keys", "_keys_of", "_sizes", "_values_of", "values")

    def __init__(self, dicts: list[Dict]) -> None:
        # Most tables of modules, of hooks above all, are empty, which is the least to find out. Asked by the method of
        # `dict`: a subclass may show entries that it makes when it is asked.
        self._empty = [*filterfalse(_size, dicts)]
        self._dicts = dicts = [*filter(_size, dicts)]
        self._sizes = [*map(_size, dicts)]
        # Functions of C, as this runs for each call of each region; those of subclasses that keep an order are ours.
        is_plain = _PLAIN.issuperset(map(type, dicts))
        self._keys_of: Callable[[Dict], Iterable[Any]] = dict.__iter__ if is_plain else _keys_of
        self._values_of: Callable[[Dict], Iterable[Any]] = dict.values if is_plain else _values_of
        self._keys: list[Any] = [*chain.from_iterable(map(self._keys_of, dicts))]
        self.values: list[Any] = [*chain.from_iterable(map(self._values_of, dicts))]

    def with_values(self, values: list[Any]) -> Dicts:
        """Return the same with other values in the places of these."""
        new = copy(self)
        new.values = values
        return new

    def are_here(self) -> bool:
        """Return whether the dicts hold the very same objects now."""
        return (
            not any(map(_size, self._empty))
            and [*map(_size, self._dicts)] == self._sizes
            and not any(map(is_not, chain.from_iterable(map(self._values_of, self._dicts)), self.values))
            and self._has_keys()
        )

    def _has_keys(self) -> bool:
        try:
            # A list compares by identity first, and only where that differs as a dict does.
            return [*chain.from_iterable(map(self._keys_of, self._dicts))] == self._keys
        except Exception:  # noqa: BLE001 - of keys that compare their values, as tensors do
            return False

    def write(self) -> set[int]:
        """Let the dicts hold what they held; return the ids of those that did not."""
        dicts = self._dicts
        written = {id(own) for own in self._empty if _size(own) and _write_dict(own, {})}
        starts = [0, *accumulate(self._sizes)]
        if [*map(_size, dicts)] == self._sizes and self._has_keys():
            changed = [
                *compress(count(), map(is_not, chain.from_iterable(map(self._values_of, self._dicts)), self.values))
            ]
            place = 0
            for index in changed:
                while starts[place + 1] <= index:
                    place += 1
                own, key, value = dicts[place], self._keys[index], self.values[index]
                if not (only_looks_on(value) or only_looks_on(dict.__getitem__(own, key))):
                    dict.__setitem__(own, key, value)
                    written.add(id(own))
            return written
        for own, start, size in zip(dicts, starts, self._sizes, strict=False):
            end = start + size
            if _write_dict(own, dict(zip(self._keys[start:end], self.values[start:end], strict=True))):
                written.add(id(own))
        return written


_size = cast("Callable[[Dict], int]", dict.__len__)
_PLAIN = frozenset({dict})


def _kind(own: Dict) -> type[Dict]:
    # An OrderedDict keeps its order in a list of its own.
    return cast("type[Dict]", OrderedDict if isinstance(own, OrderedDict) else dict)


def _keys_of(own: Dict) -> Iterable[Any]:
    return _kind(own).__iter__(own)


def _values_of(own: Dict) -> Iterable[Any]:
    return _kind(own).values(own)


def _write_dict(own: Dict, before: Dict) -> bool:
    """Let a dict hold what it held, but for what only looks on; return whether it did not."""
    if is_same(own, before):
        return False
    lookers = {key: value for key, value in dict.items(own) if only_looks_on(value)}
    _refill_dict(own, {**{key: value for key, value in before.items() if not only_looks_on(value)}, **lookers})
    return True


def _refill_dict(own: Dict, before: Dict) -> None:
    kind = _kind(own)
    for key in [*_keys_of(own)]:
        if key not in before:
            kind.__delitem__(own, key)
    if [*_keys_of(own)] == list(before)[: _size(own)]:
        for key, value in before.items():
            if dict.get(own, key, _ABSENT) is not value:
                kind.__setitem__(own, key, value)
    else:
        kind.clear(own)
        kind.update(own, before)


class Holder(ABC):
    """A mutable object that is no dict."""

    __slots__ = ()

    @abstractmethod
    def read(self) -> object:
        """Return what it holds now, such that later changes do not reach it."""

    @abstractmethod
    def write(self, contents: Any) -> None:
        """Let it hold what `read` returned; nothing is written where it does."""

    def values(self) -> Iterable[object]:
        """Return the objects in it that may lead further."""
        return ()

    def is_same(self, before: Any) -> bool:
        """Return whether it holds the very objects that `read` returned, in the same places."""
        return _same(self.read(), before)

    @property
    def item(self) -> object:
        """The object."""
        return self


def _same(now: Any, before: Any) -> bool:
    if isinstance(before, dict):
        return now.keys() == before.keys() and all(now[key] is one for key, one in cast("Dict", before).items())
    if isinstance(before, (list, tuple, deque)):
        return len(now) == len(cast("list[object]", before)) and not any(map(is_not, now, before))
    return bool(now == before)


class Container(Holder):
    """A list, deque, set or bytearray."""

    __slots__ = ("_item",)

    def __init__(self, item: Any) -> None:
        self._item = item

    @property
    def item(self) -> object:
        """The object."""
        return self._item

    def read(self) -> object:
        """Return what it holds now."""
        return copied(self._item)

    def write(self, contents: Any) -> None:
        """Let it hold what `read` returned."""
        make(self._item, contents)


class Bindings(Holder):
    """What cells, global names and defaults mean, which code functions have, and which class and attributes objects.

    Attributes:
        cells: The cells of closures.
        functions: Those whose defaults and code count.
        objects: Those whose class may be another one later.
        owners: Those of them whose attributes are in a dict, which may be another one later.
    """

    __slots__ = ("_names", "_spaces", "cells", "functions", "objects", "owners")

    def __init__(self) -> None:
        self.cells: list[types.CellType] = []
        self.functions: list[types.FunctionType] = []
        self.objects: list[object] = []
        self.owners: list[object] = []
        self._spaces: list[Dict] = []
        self._names: list[str] = []

    def __bool__(self) -> bool:
        return bool(self.objects or self.functions or self.cells or self._names)

    def add_names(self, space: Dict, names: tuple[str, ...]) -> list[object]:
        """Add global names of one Python module; return what they mean, of those that mean something."""
        self._spaces += [space] * len(names)
        self._names += names
        return [space[name] for name in names if name in space]

    def read(self) -> list[object]:
        """Return what it holds now."""
        found: list[object] = [*map(type, self.objects), *map(_attributes, self.owners)]
        if self.functions:
            found += chain.from_iterable(map(_of_function, self.functions))
        if self._names:
            found += map(dict.get, self._spaces, self._names, repeat(_ABSENT))
        if self.cells:
            found += contents_of(self.cells)
        return found

    def is_same(self, before: list[object]) -> bool:
        """Return whether it holds the very objects that `read` returned."""
        return not any(map(is_not, self.read(), before))

    def write(self, contents: list[Any]) -> None:
        """Let it hold what `read` returned."""
        rest = iter(contents)
        for item in self.objects:
            kind = next(rest)
            if type(item) is not kind:
                object.__setattr__(item, "__class__", kind)
        for item in self.owners:
            own = next(rest)
            if _attributes(item) is not own:
                object.__setattr__(item, "__dict__", own)
        for function in self.functions:
            function.__defaults__, function.__kwdefaults__, code = next(rest), next(rest), next(rest)
            if function.__code__ is not code:
                function.__code__ = code
        for space, name in zip(self._spaces, self._names, strict=True):
            before = next(rest)
            if before is _ABSENT:
                space.pop(name, None)
            elif space.get(name, _ABSENT) is not before:
                space[name] = before
        for cell in self.cells:
            before = next(rest)
            if content_of(cell) is before:
                continue
            if before is _ABSENT:
                del cell.cell_contents
            else:
                cell.cell_contents = before


_content = cast("Callable[[types.CellType], object]", attrgetter("cell_contents"))
_attributes = cast("Callable[[object], Dict]", attrgetter("__dict__"))
_of_function = cast(
    "Callable[[types.FunctionType], tuple[Any, Any, Any]]", attrgetter("__defaults__", "__kwdefaults__", "__code__")
)


def contents_of(cells: Iterable[types.CellType]) -> list[object]:
    """Return what cells hold; see `content_of`."""
    try:
        return [*map(_content, cells)]
    except ValueError:  # one is not filled yet
        return [*map(content_of, cells)]


def content_of(cell: types.CellType) -> object:
    """Return what a cell holds; something that nothing follows if it is not filled yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return _ABSENT


class ClassData(Holder):
    """Attributes that a class has itself, and those that it is given later."""

    __slots__ = ("_kind", "_names", "_size")

    def __init__(self, kind: type, names: tuple[str, ...]) -> None:
        self._kind = kind
        self._names = names
        self._size = len(vars(kind))

    def values(self) -> list[object]:
        """Return the objects in it that may lead further."""
        own = vars(self._kind)
        return [own.get(name, _ABSENT) for name in self._names]

    def read(self) -> tuple[object, ...]:
        """Return what it holds now; last, what it has been given since."""
        values, own = self.values(), vars(self._kind)
        if len(own) == self._size and not [one for one in values if one is _ABSENT]:
            return (*values, ())
        later = [pair for pair in own.items() if pair[0] not in self._names and not pair[0].startswith("__")]
        return (*values, tuple(later))

    def write(self, contents: tuple[Any, ...]) -> None:
        """Let it hold what `read` returned."""
        *values, given = contents
        for name, _ in cast("tuple[tuple[str, object], ...]", self.read()[-1]):
            if name not in dict(given):
                type.__delattr__(self._kind, name)
        for name, before in (*given, *zip(self._names, values, strict=True)):
            now = vars(self._kind).get(name, _ABSENT)
            if now is before:
                continue
            if before is _ABSENT:
                type.__delattr__(self._kind, name)
            else:
                type.__setattr__(self._kind, name, before)


class Slots(Holder):
    """The attributes of an object whose class has `__slots__`."""

    __slots__ = ("_item", "_names")

    def __init__(self, item: object, names: list[str]) -> None:
        self._item = item
        self._names = names

    @property
    def item(self) -> object:
        """The object."""
        return self._item

    @staticmethod
    def of(item: object) -> Slots | None:
        """Return those of an object, None if its class has none."""
        # By what the classes have, since private names are not there as they are written in `__slots__`.
        classes = [vars(kind) for kind in type(item).__mro__ if "__slots__" in vars(kind)]
        members = [name for own in classes for name, one in own.items() if isinstance(one, types.MemberDescriptorType)]
        return Slots(item, members) if members else None

    def read(self) -> dict[str, object]:
        """Return what it holds now."""
        return {name: getattr(self._item, name) for name in self._names if hasattr(self._item, name)}

    def values(self) -> Iterable[object]:
        """Return the objects in it that may lead further."""
        return self.read().values()

    def write(self, contents: dict[str, object]) -> None:
        """Let it hold what `read` returned."""
        for name in self._names:
            if name in contents:
                object.__setattr__(self._item, name, contents[name])
            elif hasattr(self._item, name):
                object.__delattr__(self._item, name)


class Foreign(Holder):
    """An object whose state is not Python's: an array, or random numbers of Python or NumPy."""

    __slots__ = ("_item",)

    def __init__(
        self, item: random.Random | np.ndarray[Any, Any] | np.random.Generator | np.random.RandomState
    ) -> None:
        self._item = item

    @property
    def item(self) -> object:
        """The object."""
        return self._item

    @classmethod
    def of(cls, item: object) -> Foreign | None:
        """Return the one for an object, None if it has no state or keeps it for itself."""
        if isinstance(item, random.SystemRandom) or (isinstance(item, np.ndarray) and not item.flags.writeable):
            return None
        return cls(cast("Any", item))

    def read(self) -> object:
        """Return what it holds now."""
        item = self._item
        if isinstance(item, random.Random):
            return item.getstate()
        if isinstance(item, np.ndarray):
            return item.copy()
        return item.get_state() if isinstance(item, np.random.RandomState) else deepcopy(item.bit_generator.state)

    def is_same(self, before: Any) -> bool:
        """Return whether it is in the same state; of random numbers but Python's it is as cheap to write it."""
        if isinstance(self._item, np.ndarray):
            return bool(np.array_equal(self._item, before, equal_nan=self._item.dtype.kind in "fc"))
        return isinstance(self._item, random.Random) and self._item.getstate() == before

    def write(self, contents: Any) -> None:
        """Let it hold what `read` returned."""
        item = self._item
        if isinstance(item, random.Random):
            item.setstate(contents)
        elif isinstance(item, np.ndarray):
            item[...] = contents
        elif isinstance(item, np.random.RandomState):
            item.set_state(contents)
        else:
            item.bit_generator.state = contents


FOREIGN = (random.Random, np.ndarray, np.random.Generator, np.random.RandomState)

# ----------------------------------------------------------------------------------------------------- containers

MUTABLE = (list, dict, set, deque, bytearray)
_BUILT_IN = {*MUTABLE, Counter, OrderedDict, defaultdict}


def copied(own: object) -> object:
    """Return a copy of the contents of a container, not of what it holds."""
    # The methods of the built-in class: a subclass may have written its own, with effects.
    for kind in MUTABLE:
        if isinstance(own, kind):
            return kind.copy(own)  # pyright: ignore[reportArgumentType]: it is of that kind
    raise TypeError(type(own).__name__)


def is_same(own: object, before: object) -> bool:
    """Return whether a container holds the very objects that it held before, in the same places."""
    if isinstance(before, dict):
        a, b = cast("Dict", own), cast("Dict", before)
        return _size(a) == len(b) and not any(map(is_not, _values_of(a), b.values())) and [*_keys_of(a)] == list(b)
    return _same(copied(own), before)


def make(own: object, contents: object) -> None:
    """Let a container hold `contents`; one that does is left alone."""
    if not is_same(own, contents):
        _refill(own, contents)


def _refill(own: object, contents: object) -> None:
    if isinstance(own, dict):
        _refill_dict(cast("Dict", own), cast("Dict", contents))
    elif isinstance(own, set):
        set.clear(cast("set[object]", own))
        set.update(cast("set[object]", own), cast("set[object]", contents))
    elif isinstance(own, list):
        list.__setitem__(cast("list[object]", own), slice(None), cast("list[object]", contents))
    elif isinstance(own, bytearray):
        own[:] = cast("bytearray", contents)
    elif isinstance(own, deque):
        deque.clear(cast("deque[object]", own))
        deque.extend(cast("deque[object]", own), cast("deque[object]", contents))


def with_others(contents: object, others: Mapping[int, object]) -> object:
    """Return contents with other objects in the places of some, by id, in tuples too; themselves if they have none."""
    if isinstance(contents, dict):
        items = cast("Dict", contents)
        new = {key: other(value, others) for key, value in items.items()}
        return contents if _same(new, items) else new
    if type(contents) in (list, tuple, deque):
        each = cast("list[object]", contents)
        made = [other(one, others) for one in each]
        return contents if not any(map(is_not, made, each)) else type(each)(made)
    return contents


def other(value: object, others: Mapping[int, object]) -> object:
    """Return what stands in the place of one object, in tuples too."""
    return with_others(value, others) if type(value) is tuple else others.get(id(value), value)


class Copies(dict[int, tuple[object, object, object]]):
    """Copies of built-in containers, with copies of those inside of them, each made once.

    By the id of a container: itself, its copy, and what that held at first. Nobody else has the copies, so that other
    threads may change the containers meanwhile.
    """

    __slots__ = ()

    def of(self, value: object, but: Set[int] = frozenset()) -> object:
        """Return the copy of a value; itself if it is no container, one of those in `but` by id, or a tuple of such."""
        if type(value) is tuple:
            each = cast("tuple[object, ...]", value)
            made = tuple(self.of(one, but) for one in each)
            return made if any(a is not b for a, b in zip(each, made, strict=True)) else value
        if type(value) not in _BUILT_IN or id(value) in but:
            return value
        if id(value) not in self:
            new = copy(value)
            self[id(value)] = value, new, None  # before what is inside, which may hold it as well
            if isinstance(new, dict):
                for key, one in cast("Dict", new).items():
                    new[key] = self.of(one, but)
            elif isinstance(new, list | deque):
                for place, one in enumerate(cast("list[object]", new)):
                    new[place] = self.of(one, but)
            self[id(value)] = value, new, copied(new)
        return self[id(value)][1]

    def put_back(self) -> None:
        """Let the copies hold what they held when they were made."""
        for _, own, before in self.values():
            make(own, before)
