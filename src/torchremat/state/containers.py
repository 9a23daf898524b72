"""Built-in containers and the contents of many dicts: copied, compared by identity, and refilled.

Dicts (attributes, tables of modules, dicts themselves) are most of what a call can reach, and one comparison covers
all of them. Everything else is a `Holder`.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Set
from copy import copy
from itertools import accumulate, chain, compress, count, filterfalse, repeat
from operator import is_not
from typing import Any, cast

from torchremat.ambient.global_state import only_looks_on

Dict = dict[Any, Any]
ABSENT = object()  # in place of a missing name or an empty cell
size_of = cast("Callable[[Dict], int]", dict.__len__)


def _kind(own: Dict) -> type[Dict]:
    # An OrderedDict keeps its order in its own list.
    return cast("type[Dict]", OrderedDict if isinstance(own, OrderedDict) else dict)


def keys_of(own: Dict) -> Iterable[Any]:
    """Return a view of the keys of a dict, bypassing any override in its class."""
    return _kind(own).keys(own)


def values_of(own: Dict) -> Iterable[Any]:
    """Return a view of the values of a dict, bypassing any override in its class."""
    return _kind(own).values(own)


def refill_dict(own: Dict, before: Dict) -> None:
    """Set the contents of a dict to those of another, in the same order."""
    kind = _kind(own)
    for key in [*keys_of(own)]:
        if key not in before:
            kind.__delitem__(own, key)
    if [*keys_of(own)] == list(before)[: size_of(own)]:
        for key, value in before.items():
            if dict.get(own, key, ABSENT) is not value:
                kind.__setitem__(own, key, value)
    else:
        kind.clear(own)
        kind.update(own, before)


def holds_same(now: Any, before: Any) -> bool:
    """Return whether two containers hold the very same objects, in the same places."""
    if isinstance(before, dict):
        return now.keys() == before.keys() and all(now[key] is one for key, one in cast("Dict", before).items())
    if isinstance(before, (list, tuple, deque)):
        return len(now) == len(cast("list[object]", before)) and not any(map(is_not, now, before))
    return bool(now == before)


MUTABLE = (list, dict, set, deque, bytearray)


_BUILT_IN = {*MUTABLE, Counter, OrderedDict, defaultdict}
COPIED = frozenset({*_BUILT_IN, tuple})  # the types of values that `ContainerCopies` may copy


def copied(own: object) -> object:
    """Return a shallow copy of the contents of a container."""
    # The methods of the built-in class: a subclass may override them, with side effects.
    for kind in MUTABLE:
        if isinstance(own, kind):
            return kind.copy(own)  # pyright: ignore[reportArgumentType]: it is of that kind
    raise TypeError(type(own).__name__)


def is_same(own: object, before: object) -> bool:
    """Return whether a container holds the very objects that it held before, in the same places."""
    if isinstance(before, dict):
        a, b = cast("Dict", own), cast("Dict", before)
        return size_of(a) == len(b) and not any(map(is_not, values_of(a), b.values())) and [*keys_of(a)] == list(b)
    return holds_same(copied(own), before)


def make(own: object, contents: object) -> None:
    """Set the contents of a container; a no-op if they are the same."""
    if not is_same(own, contents):
        _refill(own, contents)


def _refill(own: object, contents: object) -> None:
    if isinstance(own, dict):
        refill_dict(cast("Dict", own), cast("Dict", contents))
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
    """Return contents with some objects replaced, by id, in tuples too; the contents themselves if none is."""
    if isinstance(contents, dict):
        items = cast("Dict", contents)
        made = replaced([*items.values()], others)
        return contents if not any(map(is_not, made, items.values())) else dict(zip(items, made, strict=True))
    if type(contents) in (list, tuple, deque):
        each = cast("list[object]", contents)
        made = replaced(each, others)
        return contents if not any(map(is_not, made, each)) else type(each)(made)
    return contents


def replaced(values: list[object], others: Mapping[int, object]) -> list[object]:
    """Return values with some of them replaced, by id, in tuples too."""
    ids, tuples = [*map(id, values)], []
    if tuple in {*map(type, values)}:
        tuples = [one for one in values if type(one) is tuple and not _FLAT.issuperset(map(type, one))]
    if others.keys().isdisjoint(ids) and not tuples:
        return values  # told in C, since most values stay
    inside = {id(one): with_others(one, others) for one in tuples}
    return [*map({**others, **inside}.get, ids, values)]


# Types of which most tuples consist.
_FLAT = frozenset({type(None), bool, int, float, str})


class ContainerCopies(dict[int, tuple[object, object, object]]):
    """Copies of built-in containers, including nested ones, each made once.

    By the id of a container: itself, its copy, and the copy's initial contents. No other code has the copies, so other
    threads may change the containers meanwhile.
    """

    __slots__ = ()

    def of(self, value: object, is_left: Callable[[object], bool]) -> object:
        """Return the copy of a value; itself if it is no container, `is_left` says so, or it is a tuple of such."""
        if type(value) is tuple:
            each = cast("tuple[object, ...]", value)
            made = tuple(self.of(one, is_left) for one in each)
            return made if any(a is not b for a, b in zip(each, made, strict=True)) else value
        if type(value) not in _BUILT_IN or is_left(value):
            return value
        if id(value) not in self:
            new = copy(value)
            self[id(value)] = value, new, None  # before its contents, which may refer back to it
            if isinstance(new, dict):
                for key, one in cast("Dict", new).items():
                    new[key] = self.of(one, is_left)
            elif isinstance(new, list | deque):
                for place, one in enumerate(cast("list[object]", new)):
                    new[place] = self.of(one, is_left)
            self[id(value)] = value, new, copied(new)
        return self[id(value)][1]

    def put_back(self) -> None:
        """Restore the copies to their initial contents."""
        for _, own, before in self.values():
            make(own, before)


class Dicts:
    """The current contents of some dicts, in one piece.

    Unchanged dicts cost one comparison, however many they are.

    Attributes:
        keys: All of their keys, one dict after the other.
        values: All of their values.
    """

    __slots__ = ("_dicts", "_empty", "_key_views", "_sizes", "_value_views", "keys", "values")

    def __init__(self, dicts: list[Dict]) -> None:
        # Most tables of modules, hooks above all, are empty, which is the cheapest property to check: a built-in dict
        # is false then. A subclass may run code when it is asked, so it counts as filled.
        built_in = dicts if _BUILT_IN.issuperset(map(type, dicts)) else [one for one in dicts if type(one) in _BUILT_IN]
        self._empty = [*filterfalse(None, built_in)]
        plain = [*filter(None, built_in)]
        if not _PLAIN.issuperset(map(type, plain)):
            plain = [one for one in plain if type(one) is dict]
        others: list[Dict] = []
        if len(self._empty) + len(plain) < len(dicts):
            others = [one for one in dicts if type(one) is not dict and (type(one) not in _BUILT_IN or one)]
        self._dicts = [*plain, *others]
        self._sizes = [*map(size_of, self._dicts)]
        # Views show the contents of any later moment, and are read in C, as this runs for each call of each region.
        self._key_views: list[Iterable[Any]] = [*plain, *map(keys_of, others)]
        self._value_views = [*map(dict.values, plain), *map(values_of, others)]
        self.keys: list[Any] = [*chain.from_iterable(self._key_views)]
        self.values: list[Any] = [*chain.from_iterable(self._value_views)]

    def with_more(self, more: Dicts) -> Dicts:
        """Return these dicts and others."""
        new = object.__new__(Dicts)
        for name in self.__slots__:
            setattr(new, name, [*getattr(self, name), *getattr(more, name)])
        return new

    def with_values(self, values: list[Any]) -> Dicts:
        """Return the same dicts with other values in place of these."""
        new = object.__new__(Dicts)  # name by name, since `copy` takes ten times as long
        new._dicts, new._empty, new._sizes, new.keys = self._dicts, self._empty, self._sizes, self.keys
        new._key_views, new._value_views, new.values = self._key_views, self._value_views, values
        return new

    def with_others(self, others: Mapping[int, object]) -> Dicts:
        """Return the same dicts with some values replaced, by id."""
        return self.with_values(replaced(self.values, others))

    def as_now(self, gone: Set[int]) -> Dicts:
        """Return the same dicts with the current values in place of those in `gone`, by id."""
        owners = chain.from_iterable(map(repeat, self._dicts, self._sizes))
        rows = zip(owners, self.keys, self.values, strict=True)
        return self.with_values([dict.get(own, key, value) if id(value) in gone else value for own, key, value in rows])

    @property
    def dicts(self) -> list[Dict]:
        """The dicts."""
        return [*self._dicts, *self._empty]

    def now(self) -> Dicts:
        """Return what the dicts hold now."""
        values = self.current()
        return Dicts(self.dicts) if values is None else self.with_values(values)

    def current(self) -> list[Any] | None:
        """Return their current values, None if they have other keys now."""
        if any(self._empty) or [*map(size_of, self._dicts)] != self._sizes or not self._has_keys():
            return None
        return [*chain.from_iterable(self._value_views)]

    def are_here(self) -> bool:
        """Return whether the dicts hold the very same objects now."""
        return (
            not any(self._empty)
            and [*map(size_of, self._dicts)] == self._sizes
            and not any(map(is_not, chain.from_iterable(self._value_views), self.values))
            and self._has_keys()
        )

    def _has_keys(self) -> bool:
        try:
            # A list compares by identity first, and only where that differs by equality, as a dict does.
            return [*chain.from_iterable(self._key_views)] == self.keys
        except Exception:  # noqa: BLE001 - of keys that compare their values, as tensors do
            return False

    def write(self) -> set[int]:
        """Restore the contents of the dicts; return the ids of the dicts that had changed."""
        dicts = self._dicts
        written = {id(own) for own in filter(None, self._empty) if self._write_dict(own, {})}
        starts = [0, *accumulate(self._sizes)]
        if [*map(size_of, dicts)] == self._sizes and self._has_keys():
            changed = [*compress(count(), map(is_not, chain.from_iterable(self._value_views), self.values))]
            place = 0
            for index in changed:
                while starts[place + 1] <= index:
                    place += 1
                own, key, value = dicts[place], self.keys[index], self.values[index]
                if not (only_looks_on(value) or only_looks_on(dict.__getitem__(own, key))):
                    dict.__setitem__(own, key, value)
                    written.add(id(own))
            return written
        for own, start, size in zip(dicts, starts, self._sizes, strict=False):
            end = start + size
            if self._write_dict(own, dict(zip(self.keys[start:end], self.values[start:end], strict=True))):
                written.add(id(own))
        return written

    def _write_dict(self, own: Dict, before: Dict) -> bool:
        """Restore the contents of a dict, except for observers; return whether it had changed."""
        if is_same(own, before):
            return False
        lookers = {key: value for key, value in dict.items(own) if only_looks_on(value)}
        if type(own) is OrderedDict and any(own.get(key) is True for key in own.keys() - before.keys()):
            # A module notes in other tables how it calls a hook (`with_kwargs`, `always_call`), by the hook's number.
            lookers |= dict.fromkeys(own.keys() & self._numbers_of_observers(), True)
        refill_dict(own, {**{key: value for key, value in before.items() if not only_looks_on(value)}, **lookers})
        return True

    def _numbers_of_observers(self) -> set[object]:
        tables = [one for one in (*self._dicts, *self._empty) if type(one) is OrderedDict]
        return {key for own in tables for key, value in own.items() if only_looks_on(value)}


_PLAIN = frozenset({dict})
