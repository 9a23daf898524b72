"""The objects that a region's forward changes: caches, lists, counters.

A forward that appends to a key-value cache would do so again when it is recomputed. What the objects held before is
remembered by identity, the recompute sees it, and afterwards all is as before the recompute (rule 11).

    object                             a tensor in it is written in place      how it is known
    argument                           a recompute that uses it raises         found among the arguments
    named by the user, `guard=`        by the forward: the recompute sees a    cloned before the forward
                                       clone from before; by others: as above
    named, with snapshot and restore   whatever these two do                   `snapshot()` before the forward
    named, a module                    as above, in its attributes             its buffers: see `modules`

NumPy arrays are looked after if they are named or inside of what is.

Missing on purpose: objects that are reached in other ways (globals, closures) and are not named.
"""

from __future__ import annotations

import random
import types
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from copy import deepcopy
from typing import Any, NamedTuple, NoReturn, Protocol, cast, runtime_checkable
from weakref import ReferenceType, ref

import numpy as np
import torch
from torch import Tensor, nn

from torchremat.errors import UnsupportedError, bug
from torchremat.saved.copies import again
from torchremat.saved.tensor import version_of

_MOST_ITEMS = 100_000
_ATOMS = (
    type, types.FunctionType, types.MethodType, types.BuiltinFunctionType, types.ModuleType, torch.dtype, torch.device,
    str, bytes, int, float, complex, type(None),
)  # fmt: skip
_MUTABLE = (list, dict, set, deque, bytearray)


@runtime_checkable
class Guarded(Protocol):
    """An object that knows how to keep its state and to take it back."""

    def snapshot(self) -> object:
        """Return the state as it is now, such that later changes do not reach it."""
        ...

    def restore(self, state: Any) -> None:
        """Make the state what it was when `snapshot` returned it. May be called many times with the same value."""
        ...


class WrittenObjectError(BaseException):
    """A tensor inside an object was written in place, and the recompute needs what it held before.

    No `Exception`: user code that swallows those must not swallow it.
    """

    def __init__(self, name: str, *, is_named: bool) -> None:
        super().__init__(name)
        self.name = name
        self.is_named = is_named

    def message(self, region: str) -> str:
        """Return the words for it, given those for the region."""
        if self.is_named:
            return (
                f"{region}: the tensor `{self.name}` inside a guarded object was written in place after the forward, "
                "which had only read it, so the call cannot be recomputed. Read a clone of it, run backward before it "
                "is written, or write out of place."
            )
        return (
            f"{region}: the tensor `{self.name}` inside an argument was written in place, in the forward or since, so "
            "the call cannot be recomputed. Name the object as `guard=[...]`, keep it out of the region, or pass the "
            "tensor as an argument of its own and write out of place."
        )


class _Written(Tensor):
    """What a recompute finds in the place of a tensor that was written: whoever does not use it need not care.

    The static caches of language models hold one tensor per layer, and a layer reads its own alone.
    """

    words: tuple[str, bool]

    @classmethod
    def in_place_of(cls, name: str, *, is_named: bool) -> _Written:
        made = torch.empty(0).as_subclass(cls)
        object.__setattr__(made, "words", (name, is_named))
        return made

    @classmethod
    def __torch_function__(
        cls,
        func: object,
        types: object,
        args: Sequence[object] = (),
        kwargs: dict[str, object] | None = None,
    ) -> NoReturn:
        pending: list[object] = [*args, *(kwargs or {}).values()]
        while pending:
            item = pending.pop()
            if isinstance(item, _Written):
                name, is_named = cast("tuple[str, bool]", object.__getattribute__(item, "words"))
                raise WrittenObjectError(name, is_named=is_named)
            if isinstance(item, list | tuple):
                pending += cast("Sequence[object]", item)
        raise bug("a tensor that was written is used without being an argument")


class _Seen(NamedTuple):
    """A tensor inside an object, as the forward saw it."""

    name: str
    tensor: ReferenceType[Tensor]
    version: int
    is_named: bool

    def is_written(self) -> bool:
        """Return whether it is alive and was written since, or may have been."""
        tensor = self.tensor()
        if tensor is None:
            return False
        return tensor.is_inference() if self.version < 0 else tensor._version != self.version


class _Clones:
    """What the tensors inside named objects were before the forward, by the id of the tensor."""

    __slots__ = ("_before",)

    def __init__(self, tensors: list[Tensor]) -> None:
        clones = again(tensors)
        self._before = {
            id(tensor): (clone, tensor.requires_grad) for tensor, clone in zip(tensors, clones, strict=True)
        }

    def keep(self, written: Iterable[int]) -> None:
        """Keep those of the tensors with these ids alone."""
        self._before = {key: self._before[key] for key in written if key in self._before}

    def shown(self) -> dict[int, Tensor]:
        """Return tensors for one recompute, which may write to them, by the id of the one that each stands for."""
        clones = again([clone for clone, _ in self._before.values()])
        shown: dict[int, Tensor] = {}
        for (key, (_, requires_grad)), clone in zip(self._before.items(), clones, strict=True):
            with torch.enable_grad():
                # Not a leaf, which could not be written in place.
                shown[key] = clone.requires_grad_().clone() if requires_grad else clone
        return shown


class Objects:
    """The mutable objects that a region can change, as the forward saw them.

    Lists, dicts, sets, deques and attributes are remembered, to any depth. A tensor inside that is written in place
    cannot be brought back, unless the user has named the object and it was the forward that wrote.

    Attributes:
        generators: The generators of torch among them and inside.
        modules: The modules inside of what the user has named.
    """

    __slots__ = ("_before", "_clones", "_snapshots", "_tensors", "generators", "modules")

    def __init__(self, objects: list[object], guard: Sequence[object] = ()) -> None:
        self.generators: list[torch.Generator] = []
        self.modules: list[nn.Module] = []
        self._before: list[tuple[object, object]] = []
        self._tensors: list[_Seen] = []
        self._snapshots: list[tuple[Guarded, object]] = []
        seen: set[int] = set()
        named: list[Tensor] = []
        for one in guard:
            if isinstance(one, Guarded) and not isinstance(one, nn.Module):
                self._snapshots.append((one, one.snapshot()))
                seen.add(id(one))  # it looks after itself, as an argument too
        # First, since what is named may be an argument as well.
        self._look(list(guard), seen, named)
        self._look(objects, seen, None)
        self._clones = _Clones(named)

    def _look(self, objects: list[object], seen: set[int], named: list[Tensor] | None) -> None:
        pending = [(type(item).__name__, item) for item in objects]
        while pending:
            name, item = pending.pop()
            if isinstance(item, _ATOMS) or id(item) in seen:
                continue
            seen.add(id(item))
            if len(seen) > _MOST_ITEMS:
                kind = type(objects[0]).__name__
                raise UnsupportedError(
                    f"more than {_MOST_ITEMS:,} objects hang on a region's argument of type {kind}; "
                    "whether the forward changes one cannot be watched. Pass what the function needs of it."
                )
            if isinstance(item, Tensor):
                self._tensors.append(_Seen(name, ref(item), version_of(item), named is not None))
                if named is not None:
                    named.append(item)
            elif isinstance(item, nn.Module):
                if named is not None:
                    self.modules.append(item)
                    for inner in item.modules():
                        own = _Attributes(inner)
                        contents = own.read()
                        self._before.append((own, contents))
                        pending += _named(name, contents)
            elif isinstance(item, torch.Generator):
                self.generators.append(item)
            elif isinstance(item, (tuple, frozenset)):
                pending += [(f"{name}[{i}]", one) for i, one in enumerate(cast("tuple[object, ...]", item))]
            else:
                self._look_into(name, item, pending, is_named=named is not None)

    def _look_into(self, name: str, item: object, pending: list[tuple[str, object]], *, is_named: bool) -> None:
        if isinstance(item, _FOREIGN):
            held = _Foreign.of(item)
            if held is not None and (is_named or not isinstance(item, np.ndarray)):
                self._snapshots.append((held, held.snapshot()))
        for own in (item, getattr(item, "__dict__", None), _Slots.of(item)):
            if isinstance(own, (*_MUTABLE, _Slots)):
                contents = _copied(own)
                self._before.append((own, contents))
                pending += _named(name, contents)

    def tensors(self) -> list[Tensor]:
        """Return the tensors inside that are still alive."""
        return [tensor for one in self._tensors if (tensor := one.tensor()) is not None]

    def settle(self) -> bool:
        """Keep clones of what the forward has written alone; return whether there is anything to restore."""
        self._clones.keep([id(one.tensor()) for one in self._tensors if one.is_named and one.is_written()])
        return bool(self._before or self._snapshots)

    def put_back(self) -> None:
        """Give the objects the contents that they had, for good; tensors are left as they are."""
        for own, before in self._before:
            _make(own, before)
        for own, before in self._snapshots:
            own.restore(before)

    def restore(self, stack: ExitStack) -> None:
        """Give the objects the contents that the forward saw, until `stack` is closed."""
        # A recompute that writes to a clone must find another one the next time.
        shown = self._clones.shown()
        for one in self._tensors:
            if one.is_written() and id(tensor := one.tensor()) not in shown and tensor is not None:
                shown[id(tensor)] = _Written.in_place_of(one.name, is_named=one.is_named)
        for own, before in self._before:
            contents = _with(shown, before) if shown else before
            # Also if it is the same now: the recompute is about to change it.
            stack.callback(_make, own, _copied(own))
            _make(own, contents)
        for own, before in self._snapshots:
            stack.callback(own.restore, own.snapshot())
            own.restore(before)


def _with(shown: dict[int, Tensor], contents: object) -> object:
    """Return `contents` with other tensors in the places of some, by id; itself if it has none of them."""
    if isinstance(contents, Tensor):
        return shown.get(id(contents), contents)
    if isinstance(contents, dict):
        items = cast("dict[object, object]", contents)
        new = {key: _with(shown, value) if isinstance(value, Tensor | tuple) else value for key, value in items.items()}
        return contents if all(new[key] is items[key] for key in items) else new
    if type(contents) in (list, tuple, deque):
        each = cast("list[object]", contents)
        made = [_with(shown, one) if isinstance(one, Tensor | tuple) else one for one in each]
        same = all(a is b for a, b in zip(each, made, strict=True))
        return contents if same else type(each)(made)
    return contents


class _Foreign:
    """An object whose state is not Python's: an array, or random numbers of Python or NumPy."""

    __slots__ = ("_item",)

    def __init__(
        self, item: random.Random | np.ndarray[Any, Any] | np.random.Generator | np.random.RandomState
    ) -> None:
        self._item = item

    @classmethod
    def of(cls, item: object) -> _Foreign | None:
        """Return the one for an object, None if it has no state or keeps it for itself."""
        if isinstance(item, random.SystemRandom) or (isinstance(item, np.ndarray) and not item.flags.writeable):
            return None
        return cls(cast("Any", item))

    def snapshot(self) -> object:
        item = self._item
        if isinstance(item, random.Random):
            return item.getstate()
        if isinstance(item, np.ndarray):
            return item.copy()
        return item.get_state() if isinstance(item, np.random.RandomState) else deepcopy(item.bit_generator.state)

    def restore(self, state: Any) -> None:
        item = self._item
        if isinstance(item, random.Random):
            item.setstate(state)
        elif isinstance(item, np.ndarray):
            item[...] = state
        elif isinstance(item, np.random.RandomState):
            item.set_state(state)
        else:
            item.bit_generator.state = state


_FOREIGN = (random.Random, np.ndarray, np.random.Generator, np.random.RandomState)


def check_named(one: object) -> None:
    """Refuse to guard what has no contents that could be given back.

    Raises:
        UnsupportedError: It is a tensor, a class, a constant, or an object that shows none of its state.
    """
    if (
        isinstance(one, (Tensor, type))
        or (type(one).__module__ == "builtins" and type(one).__hash__ is not None)
        or not (
            isinstance(one, (Guarded, nn.Module, torch.Generator, *_FOREIGN, *_MUTABLE))
            or hasattr(one, "__dict__")
            or _Slots.of(one) is not None
        )
    ):
        raise UnsupportedError(
            f"guard: {type(one).__name__} cannot be changed and given back its contents; name the object that holds "
            "it, or give it `snapshot()` and `restore(state)`."
        )


def tensors_inside(objects: list[object]) -> list[Tensor]:
    """Return the tensors that mutable objects hold now, found as `Objects` finds them."""
    return Objects(objects).tensors()


class _Slots:
    """The attributes of an object whose class has `__slots__`, as a container."""

    __slots__ = ("item", "names")

    def __init__(self, item: object, names: list[str]) -> None:
        self.item = item
        self.names = names

    @staticmethod
    def of(item: object) -> _Slots | None:
        # By what the classes have, since private names are not there as they are written in `__slots__`.
        classes = [vars(kind) for kind in type(item).__mro__ if "__slots__" in vars(kind)]
        members = [name for own in classes for name, one in own.items() if isinstance(one, types.MemberDescriptorType)]
        return _Slots(item, members) if members else None

    def read(self) -> dict[str, object]:
        return {name: getattr(self.item, name) for name in self.names if hasattr(self.item, name)}

    def write(self, contents: dict[str, object]) -> None:
        for name in self.names:
            if name in contents:
                object.__setattr__(self.item, name, contents[name])
            elif hasattr(self.item, name):
                object.__delattr__(self.item, name)


class _Attributes:
    """The attributes of a module that are none of every module's, as a container."""

    __slots__ = ("module",)

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def read(self) -> dict[str, object]:
        # A wrapped module has its `forward` there.
        return {name: one for name, one in vars(self.module).items() if name not in _OF_EVERY_MODULE}

    def write(self, contents: dict[str, object]) -> None:
        own = vars(self.module)
        for name in self.read().keys() - contents.keys():
            del own[name]
        own.update(contents)


_OF_EVERY_MODULE = {*vars(nn.Module()), "forward"}


def _copied(own: object) -> object:
    # The methods of the built-in class: a subclass may have written its own, with effects.
    if isinstance(own, _Slots | _Attributes):
        return own.read()
    for kind in _MUTABLE:
        if isinstance(own, kind):
            return kind.copy(own)  # pyright: ignore[reportArgumentType]: it is of that kind
    raise TypeError(type(own).__name__)


def _named(name: str, contents: object) -> Iterator[tuple[str, object]]:
    if isinstance(contents, dict):
        for key, value in cast("dict[object, object]", contents).items():
            yield f"{name}.{key}", value
    elif not isinstance(contents, bytearray):
        for i, value in enumerate(cast("list[object]", contents)):
            yield f"{name}[{i}]", value


def _same(own: object, before: object) -> bool:
    now = _copied(own)
    if isinstance(before, dict):
        a, b = cast("dict[object, object]", now), cast("dict[object, object]", before)
        return a.keys() == b.keys() and all(a[key] is b[key] for key in a)
    if isinstance(before, (list, deque)):
        a, b = cast("list[object]", now), cast("list[object]", before)
        return len(a) == len(b) and all(x is y for x, y in zip(a, b, strict=True))
    return now == before


def _make(own: object, contents: object) -> None:
    if not _same(own, contents):
        _refill(own, contents)


def _refill(own: object, contents: object) -> None:
    if isinstance(own, _Slots | _Attributes):
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
