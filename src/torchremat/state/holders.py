"""Mutable objects other than dicts: their contents, read, compared by identity, and written back.

Also the objects that users name in `guard=`, some of which manage their own state.
"""

from __future__ import annotations

import random
import threading
import types
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from copy import deepcopy
from itertools import chain, repeat
from operator import attrgetter, is_, is_not
from typing import Any, NamedTuple, Protocol, cast, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn

from torchremat.errors import UnsupportedError
from torchremat.state.containers import ABSENT, MUTABLE, Dict, copied, holds_same, make


class Holder(ABC):
    """A mutable object other than a dict."""

    __slots__ = ()

    @abstractmethod
    def read(self) -> object:
        """Return a copy of its current contents, which later changes do not reach."""

    @abstractmethod
    def write(self, contents: Any) -> None:
        """Set its contents to what `read` returned; unchanged contents are not written."""

    def values(self) -> Iterable[object]:
        """Return the objects in it that may lead further."""
        return ()

    def is_same(self, before: Any) -> bool:
        """Return whether it holds the very objects that `read` returned, in the same places."""
        return holds_same(self.read(), before)

    @property
    def item(self) -> object:
        """The object."""
        return self


class _OfItem(Holder):
    """A holder that is not the object itself."""

    __slots__ = ("_item",)

    def __init__(self, item: Any) -> None:
        self._item = item

    @property
    def item(self) -> object:
        """The object."""
        return self._item


class Container(_OfItem):
    """A list, deque, set or bytearray."""

    __slots__ = ()

    def read(self) -> object:
        """Return its current contents."""
        return copied(self._item)

    def write(self, contents: Any) -> None:
        """Set its contents to what `read` returned."""
        make(self._item, contents)


class Bindings(Holder):
    """The values of cells, global names and defaults, the code of functions, and the class and attributes of objects.

    Attributes:
        cells: The cells of closures.
        functions: The functions whose defaults and code count.
        objects: The objects whose class may change later.
        owners: Those of them whose attributes are in a dict, which may be replaced later.
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
        """Add global names of one Python module; return the values of those that are bound."""
        self._spaces += [space] * len(names)
        self._names += names
        return [space[name] for name in names if name in space]

    def read(self) -> list[object]:
        """Return its current contents."""
        found: list[object] = [*map(type, self.objects), *map(_attribute_of, self.owners, repeat("__dict__"))]
        if self.functions:
            found += chain.from_iterable(map(_of_function, self.functions))
        if self._names:
            found += map(dict.get, self._spaces, self._names, repeat(ABSENT))
        if self.cells:
            found += contents_of(self.cells)
        return found

    def is_same(self, before: list[object]) -> bool:
        """Return whether it holds the very objects that `read` returned."""
        return not any(map(is_not, self.read(), before))

    def write(self, contents: list[Any]) -> None:
        """Set its contents to what `read` returned."""
        if self.is_same(contents):
            return
        rest = iter(contents)
        for item in self.objects:
            kind = next(rest)
            if type(item) is not kind:
                object.__setattr__(item, "__class__", kind)
        for item in self.owners:
            own = next(rest)
            if _attribute_of(item, "__dict__") is not own:
                object.__setattr__(item, "__dict__", own)
        for function in self.functions:
            function.__defaults__, function.__kwdefaults__, code = next(rest), next(rest), next(rest)
            if function.__code__ is not code:
                function.__code__ = code
        for space, name in zip(self._spaces, self._names, strict=True):
            before = next(rest)
            if before is ABSENT:
                space.pop(name, None)
            elif space.get(name, ABSENT) is not before:
                space[name] = before
        for cell in self.cells:
            before = next(rest)
            if content_of(cell) is before:
                continue
            if before is ABSENT:
                del cell.cell_contents
            else:
                cell.cell_contents = before


_content = cast("Callable[[types.CellType], object]", attrgetter("cell_contents"))


# A class may have its own `__getattribute__`, which is user code.
_attribute_of = cast("Callable[[object, str], Dict]", object.__getattribute__)


_of_function = cast(
    "Callable[[types.FunctionType], tuple[Any, Any, Any]]", attrgetter("__defaults__", "__kwdefaults__", "__code__")
)


def contents_of(cells: Iterable[types.CellType]) -> list[object]:
    """Return the contents of cells; see `content_of`."""
    try:
        return [*map(_content, cells)]
    except ValueError:  # a cell is still empty
        return [*map(content_of, cells)]


def content_of(cell: types.CellType) -> object:
    """Return the contents of a cell; an object that nothing follows if it is still empty."""
    try:
        return cell.cell_contents
    except ValueError:
        return ABSENT


class ClassData(Holder):
    """Attributes that a class has itself, and those that it is given later."""

    __slots__ = ("_kind", "_names", "_size")

    def __init__(self, kind: type, names: tuple[str, ...]) -> None:
        self._kind = kind
        self._names = names
        self._size = len(vars(kind))

    def values(self) -> list[object]:
        """Return the objects in it that may lead further."""
        return [*map(vars(self._kind).get, self._names, repeat(ABSENT))]

    def read(self) -> list[object]:
        """Return its current contents; last, the attributes it has been given since."""
        values, own = self.values(), vars(self._kind)
        if len(own) == self._size and not any(map(is_, values, repeat(ABSENT))):
            return [*values, ()]
        later = [pair for pair in own.items() if pair[0] not in self._names and not pair[0].startswith("__")]
        return [*values, tuple(later)]

    def write(self, contents: list[Any]) -> None:
        """Set its contents to what `read` returned."""
        *values, given = contents
        for name, _ in cast("tuple[tuple[str, object], ...]", self.read()[-1]):
            if name not in dict(given):
                type.__delattr__(self._kind, name)
        for name, before in (*given, *zip(self._names, values, strict=True)):
            now = vars(self._kind).get(name, ABSENT)
            if now is before:
                continue
            if before is ABSENT:
                type.__delattr__(self._kind, name)
            else:
                type.__setattr__(self._kind, name, before)


class ClassValues(ClassData):
    """Some attributes of a class, whatever else it has."""

    __slots__ = ()

    def read(self) -> list[object]:
        """Return their values; none was given since."""
        return [*self.values(), ()]


class Slots(_OfItem):
    """The attributes of an object whose class has `__slots__`."""

    __slots__ = ("_names",)

    def __init__(self, item: object, names: list[str]) -> None:
        super().__init__(item)
        self._names = names

    @staticmethod
    def of(item: object) -> Slots | None:
        """Return the slots of an object, None if its class has none."""
        # From the class attributes, since private names in `__slots__` are mangled there.
        classes = [vars(kind) for kind in type(item).__mro__ if "__slots__" in vars(kind)]
        members = [name for own in classes for name, one in own.items() if isinstance(one, types.MemberDescriptorType)]
        return Slots(item, members) if members else None

    def read(self) -> dict[str, object]:
        """Return its current contents."""
        return {name: getattr(self._item, name) for name in self._names if hasattr(self._item, name)}

    def values(self) -> Iterable[object]:
        """Return the objects in it that may lead further."""
        return self.read().values()

    def write(self, contents: dict[str, object]) -> None:
        """Set its contents to what `read` returned."""
        for name in self._names:
            if name in contents:
                object.__setattr__(self._item, name, contents[name])
            elif hasattr(self._item, name):
                object.__delattr__(self._item, name)


class ScriptState(_OfItem):
    """The buffers and the other attributes of a scripted module, which are in C++; not its parameters."""

    __slots__ = ("_names",)

    def __init__(self, module: torch.jit.ScriptModule) -> None:
        super().__init__(module._c)
        attributes = cast("dict[str, tuple[object, bool]]", module._concrete_type.get_attributes())
        self._names = [name for name, (_, is_parameter) in attributes.items() if not is_parameter]

    def read(self) -> dict[str, object]:
        """Return its current contents."""
        found = {name: self._item.getattr(name) for name in self._names}
        return {name: value for name, value in found.items() if isinstance(value, _SCRIPT_VALUES)}

    def is_same(self, before: dict[str, object]) -> bool:
        """Return whether it holds what `read` returned: the very tensors, and equal values of other types."""
        return all(_is_same_in_script(self._item.getattr(name), value) for name, value in before.items())

    def write(self, contents: dict[str, object]) -> None:
        """Set its contents to what `read` returned."""
        for name, before in contents.items():
            if not _is_same_in_script(self._item.getattr(name), before):
                self._item.setattr(name, before)


# What Python can read and write; a list or a dict is a copy each time.
_SCRIPT_VALUES = (Tensor, types.NoneType, bool, int, float, complex, str, list, tuple, dict)


def _is_same_in_script(now: Any, before: Any) -> bool:
    if now is before:
        return True
    if isinstance(now, Tensor) or isinstance(before, Tensor) or type(now) is not type(before):
        return False
    return holds_same(now, before)


class ThreadLocal(_OfItem):
    """The attributes of a `threading.local` in the running thread, which need not be that of the forward."""

    __slots__ = ()

    def read(self) -> Dict:
        """Return its current contents."""
        return dict(self._own)

    def values(self) -> Iterable[object]:
        """Return the objects in it that may lead further."""
        return self.read().values()

    def write(self, contents: Dict) -> None:
        """Set its contents to what `read` returned."""
        make(self._own, contents)

    @property
    def _own(self) -> Dict:
        return cast("Dict", threading.local.__getattribute__(self._item, "__dict__"))


class _ForeignKind(NamedTuple):
    """How the state of a kind of foreign object is read, written and compared."""

    read: Callable[[Any], object]
    write: Callable[[Any, Any], None]
    is_same: Callable[[Any, Any], bool]


# By base class. Random numbers of NumPy are written without a comparison, which costs as much.
_FOREIGN: dict[type, _ForeignKind] = {
    random.Random: _ForeignKind(
        read=lambda item: item.getstate(),
        write=lambda item, state: item.setstate(state),
        is_same=lambda item, state: item.getstate() == state,
    ),
    np.ndarray: _ForeignKind(
        read=lambda item: item.copy(),
        write=lambda item, state: item.__setitem__(..., state),
        is_same=lambda item, state: np.array_equal(item, state, equal_nan=item.dtype.kind in "fc"),
    ),
    np.random.RandomState: _ForeignKind(
        read=lambda item: item.get_state(),
        write=lambda item, state: item.set_state(state),
        is_same=lambda item, state: False,
    ),
    np.random.Generator: _ForeignKind(
        read=lambda item: deepcopy(item.bit_generator.state),
        write=lambda item, state: setattr(item.bit_generator, "state", state),
        is_same=lambda item, state: False,
    ),
}
FOREIGN = tuple(_FOREIGN)


class Foreign(_OfItem):
    """An object whose state lives outside of Python: an array, or random numbers of Python or NumPy."""

    __slots__ = ("_kind",)

    def __init__(self, item: object) -> None:
        super().__init__(item)
        self._kind = next(kind for base, kind in _FOREIGN.items() if isinstance(item, base))

    @classmethod
    def of(cls, item: object) -> Foreign | None:
        """Return the holder for an object, None if the object has no state or does not expose it."""
        if isinstance(item, random.SystemRandom) or (isinstance(item, np.ndarray) and not item.flags.writeable):
            return None
        return cls(item)

    def read(self) -> object:
        """Return its current contents."""
        return self._kind.read(self._item)

    def is_same(self, before: Any) -> bool:
        """Return whether its state is known to be unchanged."""
        return self._kind.is_same(self._item, before)

    def write(self, contents: Any) -> None:
        """Set its contents to what `read` returned."""
        self._kind.write(self._item, contents)


@runtime_checkable
class Guarded(Protocol):
    """An object that can save and restore its own state."""

    def snapshot(self) -> object:
        """Return a copy of the current state, which later changes do not reach."""
        ...

    def restore(self, state: Any) -> None:
        """Restore the state that `snapshot` returned. May be called many times with the same value."""
        ...


def looks_after_itself(one: object) -> bool:
    """Return whether an object has `snapshot()` and `restore(state)`, and is no module."""
    return isinstance(one, Guarded) and not isinstance(one, nn.Module)


def check_named(one: object) -> None:
    """Refuse to guard an object without contents that can be restored.

    Raises:
        UnsupportedError: It is a tensor, a class, a constant, or an object that exposes none of its state.
    """
    if (
        isinstance(one, (Tensor, type))
        or (type(one).__module__ == "builtins" and type(one).__hash__ is not None)
        or not (
            isinstance(one, (Guarded, nn.Module, torch.Generator, *FOREIGN, *MUTABLE))
            or hasattr(one, "__dict__")
            or Slots.of(one) is not None
        )
    ):
        raise UnsupportedError(
            f"guard: the contents of {type(one).__name__} cannot be restored; name the object that holds it, or give "
            "it `snapshot()` and `restore(state)`."
        )
