"""The objects that a region's forward changes: caches, lists, counters.

A forward that appends to a key-value cache would do so again when it is recomputed. What the objects held before is
remembered by identity, the recompute sees it, and afterwards all is as before the recompute (rule 11).

    object                             a tensor in it is written in place     how it is known
    argument                           the recompute raises MutationError     found among the arguments
    named by the user, `guard=`        the recompute sees a clone from before cloned before the forward
    named, with snapshot and restore   whatever these two do                  `snapshot()` before the forward

Missing on purpose: objects that are reached in other ways (globals, closures) and are not named, and NumPy arrays.
"""

from __future__ import annotations

import types
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any, Protocol, cast, runtime_checkable
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn

from torchremat.errors import UnsupportedError
from torchremat.saved.tensor import version_of

_MOST_ITEMS = 100_000
_ATOMS = (
    nn.Module, type, types.FunctionType, types.MethodType, types.BuiltinFunctionType, types.ModuleType, torch.Generator,
    torch.dtype, torch.device, str, bytes, int, float, complex, type(None),
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


class WrittenObjectError(Exception):
    """A tensor inside an object among the arguments was written in place."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name

    def message(self, region: str) -> str:
        """Return the words for it, given those for the region."""
        return (
            f"{region}: the tensor `{self.name}` inside an argument was written in place, in the forward or since, so "
            "the call cannot be recomputed. Name the object as `guard=[...]`, keep it out of the region, or pass the "
            "tensor as an argument of its own and write out of place."
        )


class _Clone:
    """What a tensor inside a named object was before the forward."""

    __slots__ = ("before", "name", "tensor", "version")

    def __init__(self, name: str, tensor: Tensor) -> None:
        self.name = name
        self.tensor = tensor
        self.version = version_of(tensor)
        self.before = tensor.detach().clone()

    def is_needed(self) -> bool:
        """Return whether the tensor was written since, or may have been."""
        return self.tensor.is_inference() or version_of(self.tensor) != self.version


class Objects:
    """The mutable objects that a region can change, as the forward saw them.

    Lists, dicts, sets, deques and attributes are remembered, to any depth. A tensor inside that is written in place
    cannot be brought back, unless the user has named the object.
    """

    __slots__ = ("_before", "_clones", "_snapshots", "_tensors", "_written")

    def __init__(self, objects: list[object], guard: Sequence[object] = ()) -> None:
        self._before: list[tuple[object, object]] = []
        self._tensors: list[tuple[str, ReferenceType[Tensor], int]] = []
        self._written: str | None = None
        # By id of the tensor.
        self._clones: dict[int, _Clone] = {}
        self._snapshots = [(one, one.snapshot()) for one in guard if isinstance(one, Guarded)]
        seen: set[int] = set()
        self._look(objects, seen, named=False)
        self._look([one for one in guard if not isinstance(one, Guarded)], seen, named=True)

    def _look(self, objects: list[object], seen: set[int], *, named: bool) -> None:
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
                if named:
                    self._clones[id(item)] = _Clone(name, item)
                elif not item.is_inference():
                    self._tensors.append((name, ref(item), item._version))
            elif isinstance(item, (tuple, frozenset)):
                pending += [(f"{name}[{i}]", one) for i, one in enumerate(cast("tuple[object, ...]", item))]
            else:
                self._look_into(name, item, pending)

    def _look_into(self, name: str, item: object, pending: list[tuple[str, object]]) -> None:
        for own in (item, getattr(item, "__dict__", None), _Slots.of(item)):
            if isinstance(own, (*_MUTABLE, _Slots)):
                contents = _copied(own)
                self._before.append((own, contents))
                pending += _named(name, contents)

    def tensors(self) -> list[Tensor]:
        """Return the tensors inside that are still alive."""
        return [tensor for _, alive, _ in self._tensors if (tensor := alive()) is not None]

    def settle(self) -> bool:
        """Keep only what the forward has changed; return whether there is still anything to restore or to watch."""
        clones = self._clones
        self._clones = {key: clone for key, clone in clones.items() if clone.is_needed()}
        # What the forward has left alone is watched as if nobody had named it.
        self._tensors += [
            (clone.name, ref(clone.tensor), clone.version) for key, clone in clones.items() if key not in self._clones
        ]
        self._before = [
            (own, before)
            for own, before in self._before
            if not _same(own, before) or (self._clones and self._cloned(before) is not before)
        ]
        self._written = self._name_written()
        return bool(self._before or self._tensors or self._snapshots)

    def _name_written(self) -> str | None:
        if self._written is not None:
            return self._written
        for name, alive, version in self._tensors:
            tensor = alive()
            if tensor is not None and tensor._version != version and id(tensor) not in self._clones:
                return name
        return None

    def restore(self, stack: ExitStack) -> None:
        """Give the objects the contents that the forward saw, until `stack` is closed.

        Raises:
            WrittenObjectError: A tensor inside was written in place.
        """
        written = self._name_written()
        if written is not None:
            raise WrittenObjectError(written)
        for own, before in self._before:
            stack.callback(_refill, own, _copied(own))
            # A recompute that writes to a clone must find another one the next time.
            _refill(own, self._cloned(before) if self._clones else before)
        for own, before in self._snapshots:
            stack.callback(own.restore, own.snapshot())
            own.restore(before)

    def _cloned(self, contents: object) -> object:
        """Return `contents` with new clones in the places of tensors that were written; itself if there are none."""
        if isinstance(contents, Tensor):
            found = self._clones.get(id(contents))
            return contents if found is None else found.before.clone().requires_grad_(contents.requires_grad)
        if isinstance(contents, dict):
            items = cast("dict[object, object]", contents)
            cloned = {key: self._cloned(value) for key, value in items.items()}
            return contents if all(cloned[key] is items[key] for key in items) else cloned
        if type(contents) in (list, tuple, deque):
            each = cast("list[object]", contents)
            new = [self._cloned(one) for one in each]
            same = all(a is b for a, b in zip(each, new, strict=True))
            return contents if same else type(each)(new)
        return contents


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
        classes = type(item).__mro__
        found = [vars(kind)["__slots__"] for kind in classes if "__slots__" in vars(kind)]
        names = [name for one in found for name in ((one,) if isinstance(one, str) else one)]
        members = [name for name in names if isinstance(getattr(type(item), name, None), types.MemberDescriptorType)]
        return _Slots(item, members) if members else None

    def read(self) -> dict[str, object]:
        return {name: getattr(self.item, name) for name in self.names if hasattr(self.item, name)}

    def write(self, contents: dict[str, object]) -> None:
        for name in self.names:
            if name in contents:
                object.__setattr__(self.item, name, contents[name])
            elif hasattr(self.item, name):
                object.__delattr__(self.item, name)


def _copied(own: object) -> object:
    # The methods of the built-in class: a subclass may have written its own, with effects.
    if isinstance(own, _Slots):
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


def _refill(own: object, contents: object) -> None:
    if isinstance(own, _Slots):
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
