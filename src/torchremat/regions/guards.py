"""State that a region's forward changes: buffers of its modules, and objects among its arguments.

A forward that updates BatchNorm statistics or a key-value cache would update them again when it is recomputed. Both are
handled alike: what the forward saw is kept, the recompute sees it, and afterwards all is as before the recompute (rule 11).

Missing on purpose: objects that are reached in other ways than through an argument (globals, closures).
"""

from __future__ import annotations

import functools
import types
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from typing import cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

# ---------------------------------------------------------------------------------------------------------------- modules


def modules_of(function: object, arguments: Iterable[object] = ()) -> list[nn.Module]:
    """Return the modules that a call of `function` can be seen to run: itself, its `self`, its closure, its arguments."""
    found: list[nn.Module] = []
    seen: set[int] = set()
    pending: list[object] = [function, *arguments]
    while pending:
        item = pending.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, nn.Module):
            found.append(item)
        elif isinstance(item, types.MethodType):
            pending += [item.__self__] if isinstance(item.__self__, nn.Module) else [item.__func__]
        elif isinstance(item, functools.partial):
            partial = cast("functools.partial[object]", item)
            pending += [partial.func, *partial.args, *partial.keywords.values()]
        elif isinstance(item, types.FunctionType) and item.__closure__:
            for cell in item.__closure__:
                try:
                    content = cell.cell_contents
                except ValueError:  # a cell that is not filled yet
                    continue
                if isinstance(content, (nn.Module, types.MethodType, types.FunctionType, functools.partial)):
                    pending.append(content)
                elif isinstance(content, (list, tuple)):
                    pending += [one for one in cast("list[object]", content) if isinstance(one, nn.Module)]
    return found


# ---------------------------------------------------------------------------------------------------------------- buffers

_Place = tuple[nn.Module, str]


class Buffers:
    """The buffers that a region's modules change, as the forward saw them."""

    # NOTE [ Which buffers a forward changes ]
    # Versions cannot tell: native BatchNorm does not bump that of `running_mean`. So the first forward of a module in a
    # training state is watched by value, all of its buffers cloned and compared, and what it changed is remembered per
    # module; from then on only those are cloned.
    _changed: WeakKeyDictionary[nn.Module, dict[bool, frozenset[str]]] = WeakKeyDictionary()

    __slots__ = ("_before", "_unknown")

    def __init__(self, modules: list[nn.Module]) -> None:
        self._before: list[tuple[_Place, Tensor]] = []
        self._unknown: list[nn.Module] = []
        for module in _with_buffers(modules):
            names = Buffers._changed.get(module, {}).get(module.training)
            if names is None:
                self._unknown.append(module)
                names = module._buffers.keys()
            for name in names:
                buffer = module._buffers.get(name)
                if buffer is not None:
                    self._before.append(((module, name), buffer.detach().clone()))

    @property
    def nbytes(self) -> int:
        """Bytes of what is kept."""
        return sum(before.nbytes for _, before in self._before)

    def settle(self) -> bool:
        """Keep only what the forward has changed; return whether anything is left."""
        if self._unknown:  # See NOTE [ Which buffers a forward changes ]
            unknown = set(map(id, self._unknown))
            changed: dict[int, set[str]] = {key: set() for key in unknown}
            left: list[tuple[_Place, Tensor]] = []
            for (module, name), before in self._before:
                if id(module) not in unknown:
                    left.append(((module, name), before))
                    continue
                now = module._buffers.get(name)
                if now is None or now.shape != before.shape or not torch.equal(now, before):
                    changed[id(module)].add(name)
                    left.append(((module, name), before))
            for module in self._unknown:
                Buffers._changed.setdefault(module, {})[module.training] = frozenset(changed[id(module)])
            self._before, self._unknown = left, []
        return bool(self._before)

    @contextmanager
    def around(self) -> Generator[None]:
        """Let a block see the buffers as the forward saw them; the buffers themselves are not touched.

        Other tensors take their places, so that no version is bumped: a `copy_` into a buffer makes every node that saved
        it raise "modified by an inplace operation".
        """
        own = [(place, place[0]._buffers.get(place[1])) for place, _ in self._before]
        try:
            for (module, name), before in self._before:
                module._buffers[name] = before.clone()
            yield
        finally:
            for (module, name), buffer in own:
                module._buffers[name] = buffer


def _with_buffers(modules: list[nn.Module]) -> Iterator[nn.Module]:
    seen: set[int] = set()
    pending = list(modules)
    while pending:
        module = pending.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        if module._buffers:
            yield module
        for child in module._modules.values():
            if child is not None:
                pending.append(child)


# ---------------------------------------------------------------------------------------------------------------- objects

_MOST_ITEMS = 10_000
_SKIPPED = (
    nn.Module, Tensor, type, types.FunctionType, types.MethodType, types.BuiltinFunctionType, types.ModuleType,
    torch.Generator, torch.dtype, torch.device, str, bytes, int, float, complex,
)  # fmt: skip
_Contents = tuple[Callable[[], None], object, object]


class Objects:
    """The mutable objects among a region's arguments, as the forward saw them: caches, lists, counters.

    Lists, dicts, sets, deques and attributes are remembered by identity, to any depth. A tensor inside that is written in
    place cannot be brought back; `written()` names it.
    """

    __slots__ = ("_before", "tensors")

    def __init__(self, objects: list[object]) -> None:
        self._before: list[tuple[object, object]] = []
        self.tensors: list[tuple[str, Tensor, int]] = []
        seen: set[int] = set()
        pending = [(type(item).__name__, item) for item in objects]
        while pending and len(seen) < _MOST_ITEMS:
            name, item = pending.pop()
            if id(item) in seen or item is None:
                continue
            seen.add(id(item))
            if isinstance(item, Tensor) and not item.is_inference():
                self.tensors.append((name, item, item._version))
            if isinstance(item, _SKIPPED):
                continue
            contents = _contents(item)
            if contents is not None:
                self._before.append((contents, _copied(contents)))
                pending += _named_items(name, contents)
            elif isinstance(item, (tuple, frozenset)):
                pending += [(f"{name}[{i}]", one) for i, one in enumerate(cast("tuple[object, ...]", item))]

    def settle(self) -> bool:
        """Keep only what the forward has changed; return whether anything is left."""
        self._before = [(own, before) for own, before in self._before if not _same(own, before)]
        self.tensors = [one for one in self.tensors if one[1]._version != one[2]]
        return bool(self._before or self.tensors)

    def written(self) -> str | None:
        """Return the name of a tensor inside that was written in place, or None."""
        return self.tensors[0][0] if self.tensors else None

    @contextmanager
    def around(self) -> Generator[None]:
        """Give the objects the contents that the forward saw, for a block."""
        now = [(own, _copied(own)) for own, _ in self._before]
        try:
            for own, before in self._before:
                _refill(own, before)
            yield
        finally:
            for own, contents in now:
                _refill(own, contents)


def tensors_inside(objects: list[object]) -> list[Tensor]:
    """Return the tensors that mutable objects hold now, found as `Objects` finds them."""
    return [tensor for _, tensor, _ in Objects(objects).tensors]


def _contents(item: object) -> object | None:
    if isinstance(item, (list, dict, set, deque, bytearray)):
        return cast("object", item)
    return getattr(item, "__dict__", None)


def _copied(own: object) -> object:
    return own.copy()  # pyright: ignore[reportAttributeAccessIssue]: every kind in `_contents` has it


def _named_items(name: str, own: object) -> list[tuple[str, object]]:
    if isinstance(own, dict):
        return [(f"{name}.{key}", value) for key, value in cast("dict[object, object]", own).items()]
    if isinstance(own, bytearray):
        return []
    return [(f"{name}[{i}]", value) for i, value in enumerate(cast("list[object]", own))]


def _same(own: object, before: object) -> bool:
    if isinstance(own, dict):
        a, b = cast("dict[object, object]", own), cast("dict[object, object]", before)
        return a.keys() == b.keys() and all(a[key] is b[key] for key in a)
    if isinstance(own, (list, deque)):
        a, b = cast("list[object]", own), cast("list[object]", before)
        return len(a) == len(b) and all(x is y for x, y in zip(a, b, strict=True))
    return own == before


def _refill(own: object, contents: object) -> None:
    if isinstance(own, (dict, set)):
        cast("dict[object, object]", own).clear()
        cast("dict[object, object]", own).update(cast("dict[object, object]", contents))
    elif isinstance(own, (list, bytearray)):
        own[:] = cast("list[object]", contents)
    elif isinstance(own, deque):
        own.clear()
        own.extend(cast("deque[object]", contents))
