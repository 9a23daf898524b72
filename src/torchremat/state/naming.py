"""Names for reached objects, as a reader of the code knows them. Slow, and only for messages."""

from __future__ import annotations

import functools
import types
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn

from torchremat.ambient.global_state import only_looks_on
from torchremat.state.code import class_code, is_library, reads_of
from torchremat.state.holders import ClassData, Slots
from torchremat.tensors.structure import Leaf

_DEEPEST = 8
_MOST = 20_000
_ATOMS = (bool, int, float, complex, str, bytes, type(None), types.ModuleType, torch.dtype, torch.device)

Named = tuple[str, object]


def named_objects(function: object, template: object = ((), {}), label: str = "") -> Iterator[Named]:
    """Yield the objects that a call reaches with their names, each object once, the nearest first.

    Args:
        function: The user's function.
        template: Its arguments, split by `split`.
        label: The name of the called module, if the user has given it one.
    """
    args, kwargs = cast("tuple[tuple[object, ...], dict[str, object]]", template)
    pending: deque[tuple[str, object, int]] = deque()
    pending.extend((f"args[{place}]", value, 0) for place, value in enumerate(args))
    pending.extend((f"kwargs[{key!r}]", value, 0) for key, value in kwargs.items())
    pending.extend((name, value, 0) for name, value in _of_function(function, label))
    seen: set[int] = set()
    kept: list[object] = []
    while pending and len(seen) < _MOST:
        name, value, depth = pending.popleft()
        if isinstance(value, (*_ATOMS, Leaf)) or id(value) in seen:
            if isinstance(value, _ATOMS):
                yield name, value
            continue
        seen.add(id(value))
        kept.append(value)
        yield name, value
        if depth < _DEEPEST and not only_looks_on(value):
            pending.extend((inner, one, depth + 1) for inner, one in _inside(name, value))


def name_of(tensor: Tensor, function: object, template: object, roots: Iterable[nn.Module]) -> str | None:
    """Return the name of a tensor that a call reaches, None if it is not found.

    Args:
        tensor: The tensor; an alias of it without its graph shares its memory.
        function: The user's function.
        template: Its arguments, split by `split`.
        roots: Modules to search first.
    """
    for module in roots:
        prefix = cast("str", getattr(module.__dict__.get("forward"), "name", ""))  # of a wrapped module
        for name, one in (*module.named_parameters(prefix), *module.named_buffers(prefix)):
            if one is tensor:
                return name
    found = ((name, one) for name, one in named_objects(function, template or ((), {})) if isinstance(one, Tensor))
    return next((name for name, one in found if one is tensor or _is_alias(one, tensor)), None)


def _is_alias(one: Tensor, alias: Tensor) -> bool:
    if type(one) is not Tensor or type(alias) is not Tensor or one.layout is not torch.strided:
        return False
    return one.grad_fn is not None and one.shape == alias.shape and one.data_ptr() == alias.data_ptr() != 0


def _of_function(function: object, label: str) -> Iterator[Named]:
    owner = getattr(function, "__self__", None)
    if isinstance(owner, nn.Module):
        yield getattr(owner.__dict__.get("forward"), "name", label), owner
        yield from _inside("", getattr(function, "__func__", None))
    elif isinstance(function, nn.Module):
        yield label, function
    elif isinstance(function, types.FunctionType | functools.partial):
        yield from _inside("", function)
    elif isinstance(function, types.MethodType):
        yield "self", owner
        yield from _inside("", function.__func__)
    else:
        yield "self", function


def _inside(name: str, value: object) -> Iterable[Named]:
    if isinstance(value, Tensor):
        return _attributes(name, dict(value.__dict__))
    if isinstance(value, nn.Module):
        return _of_module(name, value)
    if isinstance(value, types.FunctionType):
        return _of_code(value)
    if isinstance(value, types.MethodType):
        return [("self", value.__self__), *_inside("", value.__func__)]
    if isinstance(value, functools.partial):
        call = cast("functools.partial[object]", value)
        inner = [(f"args[{place}]", one) for place, one in enumerate(call.args)]
        return [*_inside("", call.func), *inner, *((f"kwargs[{key!r}]", one) for key, one in call.keywords.items())]
    if isinstance(value, dict):
        return [(f"{name}[{key!r}]", one) for key, one in list(dict.items(cast("dict[Any, object]", value)))]
    if isinstance(value, list | tuple | deque):
        return [(f"{name}[{place}]", one) for place, one in enumerate(list(cast("list[object]", value)))]
    if isinstance(value, type):
        return _of_class(name, value)
    if is_library(type(value).__module__) and not isinstance(value, types.SimpleNamespace):
        children = getattr(value, "children", ())  # of a registered container in a template
        return _inside(name, children) if isinstance(children, list | dict) else ()
    slots = Slots.of(value)
    own = _attributes(name, getattr(value, "__dict__", {}))
    return [*own, *_attributes(name, slots.read() if slots is not None else {}), *_of_class(name, type(value))]


def _attributes(name: str, own: dict[str, object]) -> list[Named]:
    return [(f"{name}.{key}" if name else key, one) for key, one in list(own.items())]


def _of_module(name: str, module: nn.Module) -> Iterator[Named]:
    own = module.__dict__
    for table in ("_parameters", "_buffers", "_modules"):
        yield from _attributes(name, own.get(table, {}))
    yield from _attributes(name or "self", {key: one for key, one in own.items() if key not in _OF_EVERY_MODULE})
    yield from _of_class(name or type(module).__name__, type(module))


def _of_code(function: types.FunctionType) -> Iterator[Named]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # still empty
            continue
    for place, one in enumerate(function.__defaults__ or ()):
        yield f"default {place}", one
    yield from _attributes(function.__name__, function.__dict__)
    if not is_library(function.__globals__.get("__name__")):
        space = function.__globals__
        yield from ((name, space[name]) for name in reads_of(function.__code__).names if name in space)


def _of_class(name: str, kind: type) -> Iterator[Named]:
    if is_library(kind.__module__):
        return
    code = class_code(kind)
    for owner, names in code.data:
        one = owner()
        if one is not None:
            for key, value in zip(names, ClassData(one, names).values(), strict=True):
                yield f"{kind.__name__}.{key}", value
    for key in code.always:
        for found in code.methods[key]:
            one = found()
            if one is not None:
                yield from _of_code(one)


_OF_EVERY_MODULE = frozenset(nn.Module().__dict__) - {"training"}
