"""The contents of mutable objects: read, compared and written back.

A container is a list, dict, set, deque or bytearray, or the attributes of an object or module shown as one. What it
holds is compared by identity. What is foreign to Python, arrays and generators of random numbers, has a snapshot.
"""

from __future__ import annotations

import random
import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterator, Set
from copy import copy, deepcopy
from typing import Any, cast

import numpy as np
from torch import nn

MUTABLE = (list, dict, set, deque, bytearray)
_BUILT_IN = {*MUTABLE, Counter, OrderedDict, defaultdict}


class Foreign:
    """An object whose state is not Python's: an array, or random numbers of Python or NumPy."""

    __slots__ = ("_item",)

    def __init__(
        self, item: random.Random | np.ndarray[Any, Any] | np.random.Generator | np.random.RandomState
    ) -> None:
        self._item = item

    @classmethod
    def of(cls, item: object) -> Foreign | None:
        """Return the one for an object, None if it has no state or keeps it for itself."""
        if isinstance(item, random.SystemRandom) or (isinstance(item, np.ndarray) and not item.flags.writeable):
            return None
        return cls(cast("Any", item))

    def snapshot(self) -> object:
        """Return the state as it is now."""
        item = self._item
        if isinstance(item, random.Random):
            return item.getstate()
        if isinstance(item, np.ndarray):
            return item.copy()
        return item.get_state() if isinstance(item, np.random.RandomState) else deepcopy(item.bit_generator.state)

    def restore(self, state: Any) -> None:
        """Make the state what it was when `snapshot` returned it."""
        item = self._item
        if isinstance(item, random.Random):
            item.setstate(state)
        elif isinstance(item, np.ndarray):
            item[...] = state
        elif isinstance(item, np.random.RandomState):
            item.set_state(state)
        else:
            item.bit_generator.state = state


FOREIGN = (random.Random, np.ndarray, np.random.Generator, np.random.RandomState)


class Slots:
    """The attributes of an object whose class has `__slots__`, as a container."""

    __slots__ = ("item", "names")

    def __init__(self, item: object, names: list[str]) -> None:
        self.item = item
        self.names = names

    @staticmethod
    def of(item: object) -> Slots | None:
        """Return those of an object, None if its class has none."""
        # By what the classes have, since private names are not there as they are written in `__slots__`.
        classes = [vars(kind) for kind in type(item).__mro__ if "__slots__" in vars(kind)]
        members = [name for own in classes for name, one in own.items() if isinstance(one, types.MemberDescriptorType)]
        return Slots(item, members) if members else None

    def read(self) -> dict[str, object]:
        """Return the attributes by name."""
        return {name: getattr(self.item, name) for name in self.names if hasattr(self.item, name)}

    def write(self, contents: dict[str, object]) -> None:
        """Make the attributes those of `contents`, and no others."""
        for name in self.names:
            if name in contents:
                object.__setattr__(self.item, name, contents[name])
            elif hasattr(self.item, name):
                object.__delattr__(self.item, name)


class Attributes:
    """The attributes of a module that are none of every module's, as a container."""

    __slots__ = ("module",)

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def read(self) -> dict[str, object]:
        """Return the attributes by name."""
        # A wrapped module has its `forward` there.
        return {name: one for name, one in vars(self.module).items() if name not in _OF_EVERY_MODULE}

    def write(self, contents: dict[str, object]) -> None:
        """Make the attributes those of `contents`, and no others."""
        own = vars(self.module)
        for name in self.read().keys() - contents.keys():
            del own[name]
        own.update(contents)


_OF_EVERY_MODULE = {*vars(nn.Module()), "forward"}


def copied(own: object) -> object:
    """Return a copy of the contents of a container, not of what it holds."""
    # The methods of the built-in class: a subclass may have written its own, with effects.
    if isinstance(own, Slots | Attributes):
        return own.read()
    for kind in MUTABLE:
        if isinstance(own, kind):
            return kind.copy(own)  # pyright: ignore[reportArgumentType]: it is of that kind
    raise TypeError(type(own).__name__)


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
                for key, one in cast("dict[object, object]", new).items():
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


def named_items(name: str, contents: object) -> Iterator[tuple[str, object]]:
    """Yield what contents hold, each with its name below `name`."""
    if isinstance(contents, dict):
        for key, value in cast("dict[object, object]", contents).items():
            yield f"{name}.{key}", value
    elif not isinstance(contents, bytearray):
        for i, value in enumerate(cast("list[object]", contents)):
            yield f"{name}[{i}]", value


def is_same(own: object, before: object) -> bool:
    """Return whether a container holds the very objects that it held before, in the same places."""
    now = copied(own)
    if isinstance(before, dict):
        a, b = cast("dict[object, object]", now), cast("dict[object, object]", before)
        return a.keys() == b.keys() and all(a[key] is b[key] for key in a)
    if isinstance(before, (list, deque)):
        a, b = cast("list[object]", now), cast("list[object]", before)
        return len(a) == len(b) and all(x is y for x, y in zip(a, b, strict=True))
    return now == before


def make(own: object, contents: object) -> None:
    """Let a container hold `contents`; one that does is left alone."""
    if not is_same(own, contents):
        _refill(own, contents)


def _refill(own: object, contents: object) -> None:
    if isinstance(own, Slots | Attributes):
        own.write(cast("dict[str, object]", contents))
    elif isinstance(own, dict):
        kind = OrderedDict if isinstance(own, OrderedDict) else dict  # the former keeps its order in a list of its own
        kind.clear(own)  # pyright: ignore[reportArgumentType, reportUnknownArgumentType]: it is of that kind
        kind.update(own, cast("dict[object, object]", contents))  # pyright: ignore[reportArgumentType, reportCallIssue]
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
