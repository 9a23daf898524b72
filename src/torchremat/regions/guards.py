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

import types
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple, NoReturn, Protocol, cast, runtime_checkable
from weakref import ReferenceType, ref

import numpy as np
import torch
from torch import Tensor, nn

from torchremat.errors import UnsupportedError, bug
from torchremat.regions.contents import FOREIGN, MUTABLE, Attributes, Foreign, Slots, copied, make, named_items
from torchremat.tensors.copies import again
from torchremat.tensors.metadata import version_of

_MOST_ITEMS = 100_000
_ATOMS = (
    type, types.FunctionType, types.MethodType, types.BuiltinFunctionType, types.ModuleType, torch.dtype, torch.device,
    str, bytes, int, float, complex, type(None),
)  # fmt: skip


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

    def before(self, tensor: Tensor) -> Tensor:
        """Return the clone of a tensor."""
        return self._before[id(tensor)][0]

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
                        own = Attributes(inner)
                        contents = own.read()
                        self._before.append((own, contents))
                        pending += named_items(name, contents)
            elif isinstance(item, torch.Generator):
                self.generators.append(item)
            elif isinstance(item, (tuple, frozenset)):
                pending += [(f"{name}[{i}]", one) for i, one in enumerate(cast("tuple[object, ...]", item))]
            else:
                self._look_into(name, item, pending, is_named=named is not None)

    def _look_into(self, name: str, item: object, pending: list[tuple[str, object]], *, is_named: bool) -> None:
        if isinstance(item, FOREIGN):
            held = Foreign.of(item)
            if held is not None and (is_named or not isinstance(item, np.ndarray)):
                self._snapshots.append((held, held.snapshot()))
        for own in (item, getattr(item, "__dict__", None), Slots.of(item)):
            if isinstance(own, (*MUTABLE, Slots)):
                contents = copied(own)
                self._before.append((own, contents))
                pending += named_items(name, contents)

    @property
    def containers(self) -> frozenset[int]:
        """The ids of the containers that are restored."""
        return frozenset(id(own) for own, _ in self._before)

    def tensors(self) -> list[Tensor]:
        """Return the tensors inside that are still alive."""
        return [tensor for one in self._tensors if (tensor := one.tensor()) is not None]

    def named(self) -> list[tuple[Tensor, Tensor]]:
        """Return the tensors inside of what was named that are alive, each with its clone from before the forward."""
        found = [one.tensor() for one in self._tensors if one.is_named]
        return [(tensor, self._clones.before(tensor)) for tensor in found if tensor is not None]

    def settle(self) -> bool:
        """Keep clones of what the forward has written alone; return whether there is anything to restore."""
        self._clones.keep([id(one.tensor()) for one in self._tensors if one.is_named and one.is_written()])
        return bool(self._before or self._snapshots)

    def put_back(self) -> None:
        """Give the objects the contents that they had, for good; tensors are left as they are."""
        for own, before in self._before:
            make(own, before)
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
            stack.callback(make, own, copied(own))
            make(own, contents)
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


def check_named(one: object) -> None:
    """Refuse to guard what has no contents that could be given back.

    Raises:
        UnsupportedError: It is a tensor, a class, a constant, or an object that shows none of its state.
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
            f"guard: {type(one).__name__} cannot be changed and given back its contents; name the object that holds "
            "it, or give it `snapshot()` and `restore(state)`."
        )


def tensors_inside(objects: list[object]) -> list[Tensor]:
    """Return the tensors that mutable objects hold now, found as `Objects` finds them."""
    return Objects(objects).tensors()
