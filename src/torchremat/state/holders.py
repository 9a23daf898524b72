"""Mutable objects other than dicts: their contents, read, compared by identity, and written back."""

from __future__ import annotations

import threading
import types
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from itertools import chain, repeat
from operator import attrgetter, is_not, itemgetter
from typing import Any, cast
from weakref import ref

from torchremat.errors import bug
from torchremat.state.containers import ABSENT, Dict, copied, holds_same, make


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


class ItemHolder(Holder):
    """A holder that is not the object itself."""

    __slots__ = ("_item",)

    def __init__(self, item: Any) -> None:
        self._item = item

    @property
    def item(self) -> object:
        """The object."""
        return self._item


class Container(ItemHolder):
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
        names: Names in Python modules, global ones above all.
        spaces: For each of them, the names and values of its Python module.
    """

    __slots__ = ("cells", "functions", "names", "objects", "owners", "spaces")

    def __init__(self) -> None:
        self.cells: list[types.CellType] = []
        self.functions: list[types.FunctionType] = []
        self.objects: list[object] = []
        self.owners: list[object] = []
        self.names: list[str] = []
        self.spaces: list[Dict] = []

    def __bool__(self) -> bool:
        return bool(self.objects or self.functions or self.cells or self.names)

    def add_names(self, space: Dict, names: tuple[str, ...]) -> list[object]:
        """Add global names of one Python module; return the values of those that are bound."""
        self.spaces += [space] * len(names)
        self.names += names
        return [space[name] for name in names if name in space]

    def read(self) -> list[object]:
        """Return its current contents."""
        found: list[object] = [*map(type, self.objects), *map(attribute_of, self.owners, repeat("__dict__"))]
        if self.functions:
            found += chain.from_iterable(map(_of_function, self.functions))
        if self.names:
            found += map(dict.get, self.spaces, self.names, repeat(ABSENT))
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
            if attribute_of(item, "__dict__") is not own:
                object.__setattr__(item, "__dict__", own)
        for function in self.functions:
            function.__defaults__, function.__kwdefaults__, code = next(rest), next(rest), next(rest)
            if function.__code__ is not code:
                function.__code__ = code
        for space, name in zip(self.spaces, self.names, strict=True):
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
attribute_of = cast("Callable[[object, str], Dict]", object.__getattribute__)


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


def _taking(names: tuple[str, ...]) -> Callable[[Mapping[str, object]], Iterable[object]]:
    """Return a function that returns the items of these names; a `map` over them takes twice as long."""
    return itemgetter(*names) if len(names) > 1 else lambda own: [own[name] for name in names]


class ClassData(Holder):
    """Attributes that a class has itself, and those that it is given later."""

    __slots__ = ("_class", "_names", "_own", "_size", "_take")

    def __init__(self, kind: type, names: tuple[str, ...]) -> None:
        self._class = ref(kind)  # its objects keep it alive, and a holder may be shared by calls
        self._own = vars(kind)
        self._names = names
        self._size = len(self._own)
        self._take = _taking(names)

    def values(self) -> list[object]:
        """Return the objects in it that may lead further."""
        return self.read()[:-1]

    def read(self) -> list[object]:
        """Return its current contents; last, the attributes it has been given since."""
        own = self._own
        if len(own) == self._size:
            try:
                return [*self._take(own), ()]
            except KeyError:  # one was deleted, and another was given
                pass
        later = [pair for pair in own.items() if pair[0] not in self._names and not pair[0].startswith("__")]
        return [*map(own.get, self._names, repeat(ABSENT)), tuple(later)]

    def is_same(self, before: list[Any]) -> bool:
        """Return whether it has the very attributes that `read` returned."""
        own = self._own
        if len(own) != self._size or before[-1]:
            return super().is_same(before)
        try:
            return not any(map(is_not, self._take(own), before))
        except KeyError:
            return False

    @property
    def _kind(self) -> type:
        kind = self._class()
        if kind is None:
            raise bug("the attributes of a class were asked for after the class was freed")
        return kind

    def write(self, contents: list[Any]) -> None:
        """Set its contents to what `read` returned."""
        *values, given = contents
        for name, _ in cast("tuple[tuple[str, object], ...]", self.read()[-1]):
            if name not in dict(given):
                type.__delattr__(self._kind, name)
        for name, before in (*given, *zip(self._names, values, strict=True)):
            now = self._own.get(name, ABSENT)
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
        return [*map(self._own.get, self._names, repeat(ABSENT)), ()]

    def is_same(self, before: list[Any]) -> bool:
        """Return whether it has the very values that `read` returned."""
        return not any(map(is_not, self.read(), before))


class LaterNames(ItemHolder):
    """The names that a Python module is given later, with their values: of those that it has, code reads some.

    A module of a package that a forward imports first is one as well, and stays there.
    """

    __slots__ = ("_size",)

    def __init__(self, space: Dict) -> None:
        super().__init__(space)
        self._size = len(space)

    def read(self) -> Dict:
        """Return its current contents."""
        if len(self._item) <= self._size:
            return {}
        return {name: one for name, one in [*self._item.items()][self._size :] if type(one) is not types.ModuleType}

    def write(self, contents: Dict) -> None:
        """Set its contents to what `read` returned."""
        for name in self.read().keys() - contents.keys():
            del self._item[name]
        self._item.update(contents)


class Slots(ItemHolder):
    """The attributes of an object whose class has `__slots__`.

    They are read and written by the descriptors of the class that declares them: a derived class may have a property of
    the same name.
    """

    __slots__ = ("_members",)

    def __init__(self, item: object, members: dict[str, types.MemberDescriptorType]) -> None:
        super().__init__(item)
        self._members = members

    @staticmethod
    def of(item: object) -> Slots | None:
        """Return the slots of an object, None if its class has none."""
        # From the class attributes, since private names in `__slots__` are mangled there.
        members: dict[str, types.MemberDescriptorType] = {}
        for own in [vars(kind) for kind in type(item).__mro__ if "__slots__" in vars(kind)]:
            for name, one in own.items():
                if isinstance(one, types.MemberDescriptorType):
                    members[one.__qualname__ if name in members else name] = one
        return Slots(item, members) if members else None

    def read(self) -> dict[str, object]:
        """Return its current contents."""
        contents: dict[str, object] = {}
        for name, member in self._members.items():
            try:
                contents[name] = member.__get__(self._item)
            except AttributeError:
                continue  # it has no value
        return contents

    def values(self) -> Iterable[object]:
        """Return the objects in it that may lead further."""
        return self.read().values()

    def write(self, contents: dict[str, object]) -> None:
        """Set its contents to what `read` returned."""
        now = self.read()
        for name, member in self._members.items():
            if name in contents:
                member.__set__(self._item, contents[name])
            elif name in now:
                member.__delete__(self._item)


class ThreadLocal(ItemHolder):
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
