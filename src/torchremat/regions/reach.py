"""What calls can be seen to reach, by the name that a reader of its code knows it by.

A message that says "your cache grew" has to say which. So the arguments, the closure, the global names and the modules
of a call are looked at before and after it runs once more, and what it has changed is named and put back.
"""

from __future__ import annotations

import functools
import sys
import types
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from torchremat.errors import UnsupportedError
from torchremat.regions.guards import Objects
from torchremat.tensors.structure import Leaf

if TYPE_CHECKING:
    from torchremat.regions.calls import Call

_MOST = 2_000  # values that are described; more would say nothing to a reader
_DEPTH = 4
_CALLS = 4  # functions that are followed from one to the next
# Objects of these are not looked into: other threads change some of them, and they would be taken for the region's.
_SKIPPED = (sys.stdlib_module_names | {"torch"}) - {"builtins", "collections"}
_PLAIN = (bool, int, float, str, type(None))
_FUNCTIONS = (types.FunctionType, types.MethodType, types.BuiltinFunctionType, types.ModuleType, type)
_OF_EVERY_MODULE = frozenset(nn.Module().__dict__) - {"training"}
_MISSING = object()


@dataclass(frozen=True, slots=True)
class Change:
    """Something that was one thing before a call ran and another after it."""

    name: str
    before: str
    after: str


class Reach:
    """What calls reach.

    Attributes:
        things: Objects by name: arguments, what closures and global names mean, attributes of modules.
        modules: The modules that a region sees.
        names: Their paths, by id.
    """

    def __init__(self, calls: Iterable[Call], label: object) -> None:
        self.things: dict[str, object] = {}
        self.names: dict[int, str] = {}
        self.modules: list[nn.Module] = []
        self._cells: list[tuple[str, types.CellType, object]] = []
        self._globals: list[tuple[dict[str, object], str, object]] = []
        self._seen: set[int] = set()
        self._followed = 0
        self._state: dict[str, str] = {}
        self._training: list[tuple[nn.Module, bool]] = []
        self._attributes: list[tuple[dict[Any, Any], dict[Any, Any]]] = []
        self._objects: list[Objects] = []
        for call in calls:
            self._add_call(call, label if isinstance(label, str) else "")

    def look(self) -> None:
        """Remember what everything is now, but for objects that hold too much to be remembered."""
        self._state = self._described()
        self._training = [(module, module.training) for module in self.modules]
        for module in self.modules:
            own: list[dict[Any, Any]] = [module.__dict__, module._parameters, module._buffers]
            own += [module._forward_hooks, module._forward_pre_hooks]
            self._attributes += [(one, dict(one)) for one in own]
        for thing in self.things.values():
            with suppress(UnsupportedError):
                self._objects.append(Objects([thing]))

    # ----------------------------------------------------------------------------------------------------- reaching

    def _add_call(self, call: Call, label: str) -> None:
        function = function_of(call.body)
        owner = getattr(function, "__self__", None)
        if isinstance(owner, nn.Module):
            self._add_module(getattr(owner.__dict__.get("forward"), "name", label), owner)
        elif isinstance(function, nn.Module):
            self._add_module(label, function)
        self._follow(function)
        args, kwargs = cast("tuple[tuple[object, ...], dict[str, object]]", call.template)
        for position, value in enumerate(args):
            self._add_argument(f"args[{position}]", value)
        for key, value in kwargs.items():
            self._add_argument(f"kwargs[{key!r}]", value)

    def _add_argument(self, name: str, value: object) -> None:
        if isinstance(value, Leaf):
            return
        children: object = getattr(value, "children", value)  # of a registered container
        if isinstance(children, tuple | list):
            for position, item in enumerate(cast("list[object]", children)):
                self._add_argument(f"{name}[{position}]", item)
        elif isinstance(children, dict):
            for key, item in cast("dict[object, object]", children).items():
                self._add_argument(f"{name}[{key!r}]", item)
        else:
            self._add(name, value)

    def _add(self, name: str, value: object) -> None:
        if isinstance(value, nn.Module):
            self._add_module(name, value)
        elif isinstance(value, types.FunctionType | types.MethodType | functools.partial):
            self._follow(value)
        elif not isinstance(value, (*_PLAIN, *_FUNCTIONS)) and id(value) not in self._seen:
            self._seen.add(id(value))
            if isinstance(value, torch.Generator | Tensor) or type(value).__module__.split(".")[0] not in _SKIPPED:
                self.things[name] = value
            if isinstance(value, list | tuple):
                for position, item in enumerate(cast("list[object]", value)):
                    if isinstance(item, nn.Module):
                        self._add_module(f"{name}[{position}]", item)

    def _add_module(self, name: str, module: nn.Module) -> None:
        for path, inner in module.named_modules(prefix=name):
            if id(inner) not in self.names:
                self.names[id(inner)] = path or type(inner).__name__
                self.modules.append(inner)
                for key, value in inner.__dict__.items():
                    if key not in _OF_EVERY_MODULE:
                        self._add(f"{path}.{key}" if path else f"self.{key}", value)

    def _follow(self, function: object) -> None:
        if id(function) in self._seen or (getattr(function, "__module__", None) or "").split(".")[0] == "torch":
            return
        if self._followed == _CALLS:
            return
        self._seen.add(id(function))
        self._followed += 1
        self._follow_into(function)
        self._followed -= 1

    def _follow_into(self, function: object) -> None:
        if isinstance(function, functools.partial):
            call = cast("functools.partial[object]", function)
            self._follow(call.func)
            for position, value in enumerate(call.args):
                self._add(f"args[{position}]", value)
            for key, value in call.keywords.items():
                self._add(f"kwargs[{key!r}]", value)
        elif isinstance(function, types.MethodType):
            self._follow(function.__func__)
            self._add("self", function.__self__)
        elif isinstance(function, types.FunctionType):
            self._follow_code(function)
        elif not isinstance(function, (nn.Module, *_FUNCTIONS)):
            self._add("self", function)
            self._follow(vars(type(function)).get("__call__"))

    def _follow_code(self, function: types.FunctionType) -> None:
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            try:
                value = cell.cell_contents
            except ValueError:  # not filled yet
                continue
            self._cells.append((name, cell, value))
            self._add(name, value)
        space = function.__globals__
        for name in function.__code__.co_names:
            if name in space:
                self._globals.append((space, name, space[name]))
                self._add(name, space[name])

    def generators(self) -> dict[str, torch.Generator]:
        """Return the random generators among the things."""
        return {name: one for name, one in self.things.items() if isinstance(one, torch.Generator)}

    def parameters(self) -> list[tuple[str, Tensor]]:
        """Return the parameters and buffers of the modules, by their names."""
        found: list[tuple[str, Tensor]] = []
        for module in self.modules:
            path = self.names[id(module)]
            own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
            found += [(f"{path}.{name}", tensor) for name, tensor in own]
        return found

    # ----------------------------------------------------------------------------------------------------- changing

    def changes(self) -> list[Change]:
        """Return what is different now, containers first, the outer ones before what is in them."""
        before, now = self._state, self._described()
        names = [name for name in {**before, **now} if before.get(name) != now.get(name)]
        names.sort(key=lambda name: ("items" not in before.get(name, ""), len(name)))
        return [Change(name, before.get(name, "nothing"), now.get(name, "nothing")) for name in names]

    def put_back(self) -> None:
        """Make everything what it was when it was looked at."""
        for _, cell, value in self._cells:
            cell.cell_contents = value
        for space, name, value in self._globals:
            if space.get(name, _MISSING) is not value:
                space[name] = value
        for own, contents in self._attributes:
            _put_back(own, contents)
        for module, flag in self._training:
            module.training = flag
        for objects in self._objects:
            objects.put_back()

    def _described(self) -> dict[str, str]:
        found: dict[str, str] = {}
        for module in self.modules:
            path = self.names[id(module)]
            for name, value in module.__dict__.items():
                if name not in _OF_EVERY_MODULE and isinstance(value, _PLAIN):
                    found[f"{path}.{name}"] = _short(value)
        for name, cell, value in self._cells:
            found.update(_plain(name, _content(cell), value))
        for space, name, value in self._globals:
            found.update(_plain(name, space.get(name, _MISSING), value))
        for name, value in self.things.items():
            _describe(name, value, found, set(), 0)
        return found


def function_of(body: object) -> object:
    """Return the user's function that a body calls."""
    while True:
        if isinstance(body, functools.partial) and _is_own(body.func) and body.args:
            body = body.args[0]
        elif _is_own(type(body)) and hasattr(body, "body"):
            body = cast("Any", body).body
        else:
            return body


def _is_own(item: object) -> bool:
    return (getattr(item, "__module__", None) or "").startswith("torchremat.")


def _content(cell: types.CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:
        return _MISSING


def _plain(name: str, now: object, then: object) -> Iterator[tuple[str, str]]:
    if isinstance(now, _PLAIN) and isinstance(then, _PLAIN):
        yield name, _short(now)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def _put_back(now: dict[Any, Any], before: dict[Any, Any]) -> None:
    for name in now.keys() - before.keys():
        del now[name]
    for name, value in before.items():
        if now.get(name, _MISSING) is not value:
            now[name] = value


def _describe(name: str, value: object, found: dict[str, str], seen: set[int], depth: int) -> None:
    if len(found) >= _MOST or depth > _DEPTH or id(value) in seen:
        return
    if isinstance(value, _PLAIN):
        found[name] = _short(value)
        return
    seen.add(id(value))
    if isinstance(value, Tensor):
        found[name] = f"shape {tuple(value.shape)}"
    elif isinstance(value, (nn.Module, torch.Generator, *_FUNCTIONS)):
        return
    elif isinstance(value, dict):
        items = cast("dict[object, object]", value)
        found[name] = f"{len(items)} items"
        for key, item in list(items.items()):
            _describe(f"{name}[{_short(key)}]", item, found, seen, depth + 1)
    elif isinstance(value, list | tuple | deque):
        items = list(cast("list[object]", value))
        found[name] = f"{len(items)} items"
        for position, item in enumerate(items):
            _describe(f"{name}[{position}]", item, found, seen, depth + 1)
    elif isinstance(value, set | bytearray):
        found[name] = f"{len(cast('set[object]', value))} items"
    else:
        for key, item in list(getattr(value, "__dict__", {}).items()):
            _describe(f"{name}.{key}", item, found, seen, depth + 1)
