"""Code that a call reaches: functions with their cells and the names that they read, classes with their methods."""

from __future__ import annotations

import types
from typing import cast

import torch
from torch import nn

from torchremat.ambient.global_state import WATCHES
from torchremat.state.code import class_code, is_installed, is_library, is_library_class, reads_of
from torchremat.state.containers import Dict
from torchremat.state.holders import ClassData, contents_of
from torchremat.state.world import World

# Types that a function may close over without running code by name.
_PASSIVE = frozenset({type(None), bool, int, float, complex, str, bytes, torch.dtype})
_PLAIN = _PASSIVE | {types.ModuleType}


def follow_function(world: World, function: types.FunctionType) -> None:
    """Follow a function into its cells, defaults and attributes, and the global names that it reads."""
    if WATCHES in function.__dict__:
        return
    if is_library(function.__globals__.get("__name__")):
        # A decorator holds the user's function there; its other contents are the library's own.
        world.push([one for one in contents_of(function.__closure__ or ()) if callable(one)])
        return
    if function.__closure__:
        world.bindings.cells += function.__closure__
        contents = contents_of(function.__closure__)
        world.pending += contents
        if not _PASSIVE.issuperset(map(type, contents)):
            world.runs_code = True
    world.bindings.functions.append(function)
    own = cast("Dict", function.__dict__)
    world.dicts.append(own)
    if own or function.__defaults__ or function.__kwdefaults__:
        world.runs_code = True
        world.push([*own.values(), *(function.__defaults__ or ()), function.__kwdefaults__])
    reads = reads_of(function.__code__)
    world.called |= reads.attributes
    if reads.sets_generators:
        world.sets_generators = True
    if reads.names:
        _global_names(world, function.__globals__, reads.names)
    if reads.names or reads.stores:
        world.runs_code = True


def _global_names(world: World, space: Dict, names: tuple[str, ...]) -> None:
    name = space.get("__name__")
    if is_installed(name):
        # From file to file, packages lead to each other, and to objects unrelated to a forward.
        values = [*map(space.get, names)]
        names = tuple([one for one, value in zip(names, values, strict=True) if _is_of(name, value)])
    world.pending += world.bindings.add_names(space, names)


def _is_of(name: object, value: object) -> bool:
    # Some of their modules import others when they are asked for an attribute.
    return not isinstance(value, types.ModuleType) and getattr(value, "__module__", name) == name


def follow_method(world: World, method: types.MethodType) -> None:
    """Follow a bound method to its object and its function."""
    world.runs_code = True
    world.pending += (method.__self__, method.__func__)


def follow_class(world: World, kind: type) -> None:
    """Follow a user class into its own data, and note that its methods may be called."""
    if kind not in world.classes and not is_library_class(kind):
        if is_installed(kind.__module__) and not issubclass(kind, nn.Module):
            return  # in classes that packages make to hold values, only the values count
        code = class_code(kind)
        world.classes[kind] = code, set()
        for owner, names in code.data:
            one = owner()
            if (one is not None and id(one) not in world.seen) or one is kind:
                world.seen.add(id(one))
                data = ClassData(cast("type", one), names)
                world.rest.append(data)
                world.pending += data.values()


def follow_methods(world: World) -> None:
    """Follow those methods of the classes met that some code names."""
    for code, followed in list(world.classes.values()):
        wanted = (code.always | (world.called & code.methods.keys())) - followed
        followed |= wanted
        for name in wanted:
            world.pending += [one for found in code.methods[name] if (one := found()) is not None]


def plain_cells(function: object) -> list[object] | None:
    """Return the contents of a function's cells, if it obviously reaches nothing else that has state.

    Returns:
        Numbers, strings and Python modules, since most functions hold nothing else; None if more is possible.
    """
    if type(function) is not types.FunctionType or function.__defaults__ or function.__kwdefaults__:
        return None
    reads = reads_of(function.__code__)
    for name in reads.names:
        if type(function.__globals__.get(name)) is not types.ModuleType:
            return None
    contents: list[object] = []
    if function.__closure__:
        contents = contents_of(function.__closure__)
        if reads.stores or not _PLAIN.issuperset(map(type, contents)):
            return None
    return None if function.__dict__ else contents
