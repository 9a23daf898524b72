"""What a function can be seen to reach before it runs: modules, generators, tensors.

That is: the function itself, its `self` or the attributes of that, what its closure, its defaults and its global names
mean, and so on through the functions among these, but for those of libraries. For the names of what is reached, which a
message needs and a region does not, see `reach`.
"""

from __future__ import annotations

import dis
import functools
import types
from collections.abc import Iterable, Sequence
from typing import cast

import torch
from torch import Tensor, nn

# The modules of a function that reaches nothing with a state, no generators either.
NOTHING: list[nn.Module] = []


def modules_of(function: object, arguments: Sequence[object] = ()) -> list[nn.Module]:
    """Return the modules that a call of `function` can be seen to run.

    These are the function itself, its `self` or the attributes of that, what its closure and its global names mean, and
    its arguments.
    """
    if _ATOMS.issuperset(map(type, arguments)):
        if isinstance(function, nn.Module):
            return [function]
        if _reaches_nothing(function):
            return NOTHING
    pending = [item for item in arguments if type(item) not in _ATOMS]
    pending += _reached(function)
    found: list[nn.Module] = []
    seen: set[int] = set()
    while pending:
        item = pending.pop()
        kind = type(item)
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, nn.Module):
            found.append(item)
        elif kind is types.FunctionType or kind is types.MethodType or isinstance(item, functools.partial):
            pending += _reached(item)
        elif kind is list or kind is tuple:
            pending += [one for one in cast("list[object]", item) if isinstance(one, nn.Module)]
    return found


_INERT = frozenset({type(None), bool, int, float, str, types.ModuleType})
_ATOMS = _INERT | {Tensor, nn.Parameter}


# Whose functions reach nothing of the user's, and much of their own.
_LIBRARIES = frozenset({"torch", "torchremat", "functools", "contextlib"})


def _reached(function: object) -> Iterable[object]:
    if isinstance(function, nn.Module):
        return (function,)
    if isinstance(function, functools.partial):
        partial = cast("functools.partial[object]", function)
        return (partial.func, *partial.args, *partial.keywords.values())
    if isinstance(function, types.MethodType):
        return (*_reached(function.__self__), *_reached(function.__func__))
    if isinstance(function, types.FunctionType):
        if (function.__module__ or "").partition(".")[0] in _LIBRARIES:
            return ()
        known = function.__globals__
        named = [known[name] for name in _global_names(function.__code__) if name in known]
        if function.__closure__:
            named += _closed_over(function)
        if function.__defaults__:  # `lambda x, layer=layer: layer(x)`
            named += function.__defaults__
        if function.__kwdefaults__:
            named += function.__kwdefaults__.values()
        return named
    # An object that is called, or whose method is.
    return [one for one in getattr(function, "__dict__", {}).values() if isinstance(one, nn.Module)]


def _reaches_nothing(function: object) -> bool:
    """Return whether it is plain that a function reaches nothing with a state, as most do not."""
    if type(function) is not types.FunctionType or function.__defaults__ or function.__kwdefaults__:
        return False
    for name in _global_names(function.__code__):
        if type(function.__globals__.get(name)) not in _INERT:
            return False
    for cell in function.__closure__ or ():
        try:
            if type(cell.cell_contents) not in _INERT:
                return False
        except ValueError:  # a cell that is not filled yet
            continue
    return True


@functools.lru_cache(maxsize=4096)
def _global_names(code: types.CodeType) -> tuple[str, ...]:
    # `co_names` has the names of attributes as well: `x.linear` is not the global `linear`.
    loads = (one.argval for one in dis.get_instructions(code) if one.opname in ("LOAD_GLOBAL", "LOAD_NAME"))
    return tuple(dict.fromkeys(loads))


def generators_reached(function: object) -> list[torch.Generator]:
    """Return the generators that a function reaches as `modules_of` reaches modules, but for those in modules."""
    found: list[torch.Generator] = []
    pending, seen = [function], set[int]()
    while pending:
        item = pending.pop()
        kind = type(item)
        if kind is torch.Generator:
            found.append(cast("torch.Generator", item))
        elif kind in _FUNCTIONS and id(item) not in seen:
            seen.add(id(item))
            pending += _reached(item)
            if kind is types.MethodType:
                pending += getattr(cast("types.MethodType", item).__self__, "__dict__", {}).values()
        elif kind is list or kind is tuple:
            pending += [one for one in cast("list[object]", item) if type(one) is torch.Generator]
    return found


_FUNCTIONS = frozenset({types.FunctionType, types.MethodType, functools.partial})


def tensors_reached(function: object) -> list[Tensor]:
    """Return the tensors that a function reaches as `modules_of` reaches modules, but for those in modules."""
    found: list[Tensor] = []
    pending, seen = [function], set[int]()
    while pending:
        item = pending.pop()
        if isinstance(item, Tensor):
            found.append(item)
        elif id(item) not in seen:
            seen.add(id(item))
            if isinstance(item, types.FunctionType | types.MethodType | functools.partial):
                pending += _reached(item)
            elif isinstance(item, list | tuple):
                pending += [one for one in cast("list[object]", item) if isinstance(one, Tensor)]
    return found


def _closed_over(function: types.FunctionType) -> Iterable[object]:
    for cell in function.__closure__ or ():
        try:
            content = cell.cell_contents
        except ValueError:  # a cell that is not filled yet
            continue
        yield content
