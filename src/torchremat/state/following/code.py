"""Code that a call reaches: functions with their cells and the names that they read, classes with their methods."""

from __future__ import annotations

import sys
import types
from collections.abc import Set
from contextlib import suppress
from importlib.util import resolve_name
from typing import cast

import torch
from torch import nn

from torchremat.ambient.global_state import WATCHES
from torchremat.state.code import ClassCode, class_code, is_installed, is_library, is_library_class, reads_of
from torchremat.state.containers import Dict
from torchremat.state.holders import ClassData, ClassValues, LaterNames, contents_of
from torchremat.state.world import Reaching

# Types that a function may close over without running code by name.
PASSIVE = frozenset({type(None), bool, int, float, complex, str, bytes, torch.dtype})


def follow_function(world: Reaching, function: types.FunctionType) -> None:
    """Follow a function into its cells, defaults and attributes, and the global names that it reads."""
    own: Dict = function.__dict__
    if WATCHES in own:
        return
    space: Dict = function.__globals__
    file = space.get("__name__")
    if is_library(file):
        # A decorator holds the user's function there; its other contents are the library's own.
        world.push([one for one in contents_of(function.__closure__ or ()) if callable(one)])
        return
    reads = reads_of(function.__code__)
    if function.__closure__:
        world.bindings.cells += function.__closure__
        contents = contents_of(function.__closure__)
        _follow_values(world, contents, reads.attributes)
        if not PASSIVE.issuperset(map(type, contents)):
            world.runs_code = True
    world.bindings.functions.append(function)
    world.dicts.append(own)
    if own or function.__defaults__ or function.__kwdefaults__:
        world.runs_code = True
        world.push([*own.values(), *(function.__defaults__ or ()), function.__kwdefaults__])
    if file in world.homes or not is_installed(file):
        world.called |= reads.attributes
        world.passes_versions |= reads.passes_versions
    if reads.sets_generators:
        world.sets_generators = True
    if id(function) in world.in_file:
        if reads.names:
            _follow_in_file(world, space, reads.names)
    else:
        if reads.imports:
            names = _imported(space, reads.imports)
            world.imports += names
            _follow_values(world, [*map(sys.modules.get, names)], reads.attributes)
        if reads.names:
            _follow_values(world, world.bindings.add_names(space, reads.names), reads.attributes)
    if reads.names or reads.stores:
        world.runs_code = True


def _follow_in_file(world: Reaching, space: Dict, names: tuple[str, ...]) -> None:
    """Follow what names in a method of a package are bound to, and functions named there, within their file."""
    file = space.get("__name__")
    names = tuple(
        [
            name
            for name in names
            if not isinstance(one := space.get(name), types.ModuleType) and getattr(one, "__module__", file) == file
        ]
    )
    if names:
        values = world.bindings.add_names(space, names)
        world.in_file.update(map(id, values))
        world.pending += values


def _follow_values(world: Reaching, values: list[object], attributes: Set[str]) -> None:
    """Follow what names in some code are bound to; of Python modules, the names that the code reads as attributes."""
    values = [*values]
    seen: set[int] = set()
    while values:
        one = values.pop()
        if not isinstance(one, types.ModuleType) or not _is_file(type(one)):
            world.pending.append(one)
            if isinstance(one, type) and is_installed(one.__module__) and not issubclass(one, nn.Module):
                _follow_names(world, one, attributes)
            continue
        if id(one) in seen:
            continue
        seen.add(id(one))
        # Not by `getattr`: some modules import others when they are asked for an attribute.
        space = vars(one)
        wanted = attributes & space.keys()
        if is_library(one.__name__):
            # Its own names are no state, but random numbers are: `numpy.random.rand` is bound to a generator.
            values += [value for value in map(space.get, wanted) if isinstance(value, _LEADS_ON)]
        else:
            world.namespaces.append(one)
            world.rest.append(LaterNames(space))
            values += world.bindings.add_names(space, tuple(wanted))


def _follow_names(world: Reaching, kind: type, attributes: Set[str]) -> None:
    """Follow the values that a class of a package has under some names, as a class of options has."""
    for one in kind.__mro__:
        names = tuple(attributes & vars(one).keys()) if is_installed(one.__module__) else ()
        values = [value for name in names if not callable(value := vars(one)[name]) and not hasattr(value, "__get__")]
        if values:
            world.rest.append(ClassValues(one, names))
            world.push(values)


def _is_file(kind: type) -> bool:
    # Modules of a class of the user's may have other state.
    return kind is types.ModuleType or is_library(kind.__module__) or is_installed(kind.__module__)


def _imported(space: Dict, imports: tuple[tuple[str, int], ...]) -> list[str]:
    """Return the names of the Python modules that code imports when it runs."""
    found: list[str] = []
    for name, dots in imports:
        with suppress(ImportError):  # of a relative import, in code that belongs to no package
            full = resolve_name("." * dots + name, space.get("__package__")) if dots else name
            parts = full.split(".")
            found += [".".join(parts[:end]) for end in range(1, len(parts) + 1)]
    return found


def follow_file(world: Reaching, file: types.ModuleType) -> None:
    """Follow a Python module that was met otherwise: the names that some code reads as attributes are followed."""
    world.files.append(file)


def follow_files(world: Reaching) -> None:
    """Follow those names of the Python modules met that some code names."""
    if len(world.called) > world.asked:
        world.asked = len(world.called)
        _follow_values(world, [*world.files], world.called)


_LEADS_ON = (types.ModuleType, types.MethodType, types.BuiltinMethodType)


def follow_builtin(world: Reaching, builtin: types.BuiltinMethodType) -> None:
    """Follow a method of an object in C, as `list.append`, to its object."""
    world.push([builtin.__self__])


def follow_method(world: Reaching, method: types.MethodType) -> None:
    """Follow a bound method to its object and its function."""
    world.runs_code = True
    world.pending += (method.__func__, method.__self__)  # first the object, whose file its class tells


def follow_class(world: Reaching, kind: type) -> None:
    """Follow a user class into its own data, and note that its methods may be called."""
    if kind not in world.classes and not is_library_class(kind):
        if is_installed(kind.__module__) and not issubclass(kind, nn.Module):
            return  # in classes that packages make to hold values, only the values count
        code = class_code(kind)
        world.classes[kind] = code, set()
        world.homes.add(kind.__module__)
        for owner, names in code.data:
            one = owner()
            if (one is not None and id(one) not in world.seen) or one is kind:
                world.seen.add(id(one))
                data = ClassData(cast("type", one), names)
                world.rest.append(data)
                values = data.values()
                if is_installed(one.__module__):
                    world.methods += [value for value in values if type(value) is types.FunctionType]
                    values = [value for value in values if type(value) is not types.FunctionType]
                world.pending += values


def follow_methods(world: Reaching) -> None:
    """Follow the methods of the classes met that always run; if none is left, those that some code may name.

    A name says little: `x.to` may mean that of any class. So these methods of a package are followed within their file;
    from file to file they would lead through half of what is installed.
    """
    for code, followed in [*world.classes.values()]:
        if wanted := code.always - followed:
            world.pending += _methods(code, wanted)
            followed |= wanted
    if world.pending:
        return
    found, world.methods = world.methods, []
    for code, followed in [*world.classes.values()]:
        if wanted := (world.called & code.methods.keys()) - followed:
            found += _methods(code, wanted)
            followed |= wanted
    if found:
        world.pending += found
        world.in_file.update([id(one) for one in found if is_installed(one.__module__)])


def _methods(code: ClassCode, names: Set[str]) -> list[types.FunctionType]:
    return [one for name in names for method in code.methods[name] if (one := method()) is not None]
