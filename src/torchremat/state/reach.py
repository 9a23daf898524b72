"""The objects that a call can reach through Python: from its function and its arguments, through all references.

    from                         to
    function                     cells, defaults, attributes; the global names that its code reads; its imports
    Python module                those of its names that this code, or some code that was reached, reads as attributes
    bound method, partial        its object, its function, its arguments
    module                       attributes, parameters, buffers, children, hooks; the code of its class
    user object                  attributes; its class's own, and the methods that some code reached names
    tensor                       attributes
    list, dict, tuple, set       their items
    thread-local                 its attributes in the running thread

Objects of torch, NumPy and Python itself are not followed, except modules, containers, thread-locals and random
generators: `random.uniform` is a method of one. Functions of these libraries are followed only into their cells: a
decorator of theirs holds the user's function there. Code of other installed packages is followed from file to file, but
for methods that do not always run: they are followed within their file. The names of attributes that it reads are not
asked of the classes met, unless it is in the file of one: `x.to` in any package would lead into the `to` of each model.
Of its classes that are no modules, only the objects are followed, and values that code names. For an optimizer its
options are reached; all of its contents are, including an optimizer that it wraps, if it is requested whole.

Missing on purpose: names that are computed at run time, iterators, files, state held by C++. Containers of more than a
thousand items are not followed either, unless they come with the arguments: such a container is a table, and no state
of a forward.
"""

from __future__ import annotations

import argparse
import functools
import threading
import types
import weakref
from collections import UserDict, UserList, deque
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.optim.lr_scheduler import LRScheduler

from torchremat.ambient.global_state import WATCHES
from torchremat.state.code import is_installed, is_library
from torchremat.state.following.code import (
    follow_builtin,
    follow_class,
    follow_file,
    follow_files,
    follow_function,
    follow_method,
    follow_methods,
)
from torchremat.state.following.objects import (
    follow_container,
    follow_dict,
    follow_foreign,
    follow_generator,
    follow_list,
    follow_local,
    follow_module,
    follow_object,
    follow_optimizer,
    follow_ours,
    follow_partial,
    follow_proxy,
    follow_script,
    follow_tables,
    follow_tensor,
    follow_tuple,
    follow_uninitialized,
    watch_tensor,
)
from torchremat.state.foreign import FOREIGN
from torchremat.state.world import LEADS_NOWHERE, Reaching

Visit = Callable[[Reaching, Any], None]


def reach(
    world: Reaching,
    items: Iterable[object],
    *,
    are_arguments: bool = False,
    are_named: bool = False,
    are_whole: bool = False,
) -> None:
    """Follow everything from some roots.

    Args:
        world: The objects reached already; those that are found are added.
        items: The roots.
        are_arguments: Whether they are arguments of the call, in which everything counts.
        are_named: Whether the user has named them as objects that the call writes to.
        are_whole: Whether they are followed whatever their length, and optimizers into their state.

    Raises:
        UnsupportedError: An argument leads to more than 100,000 objects.
    """
    world.is_argument, world.is_named, world.is_whole = are_arguments or are_named, are_named, are_whole
    world.roots += [one for one in items if isinstance(one, nn.Module)]
    pending = world.pending
    pending.extend(items)
    seen, visits = world.seen, _visits
    for item in items if are_named else ():
        if id(item) not in seen and type(item) not in visits and _visit_of(item) is None:  # a named library object
            seen.add(id(item))
            follow_object(world, item)
    while True:
        while pending:
            item = pending.pop()
            kind = type(item)
            if kind in LEADS_NOWHERE:
                continue
            key = id(item)
            if key in seen:
                continue
            visit = visits.get(kind)
            if visit is None:
                visit = _visit_of(item)
                if visit is None:
                    continue
            seen.add(key)
            visit(world, item)
        follow_tables(world)
        follow_methods(world)
        if world.files:
            follow_files(world)
        if not pending:
            break


# By type, the function that follows it.
_visits: dict[type, Visit] = {
    Tensor: follow_tensor,
    nn.Parameter: watch_tensor,
    types.FunctionType: follow_function,
    types.MethodType: follow_method,
    types.BuiltinFunctionType: follow_builtin,
    types.ModuleType: follow_file,
    functools.partial: follow_partial,
    tuple: follow_tuple,
    frozenset: follow_tuple,
    list: follow_list,
    deque: follow_list,
    dict: follow_dict,
    set: follow_list,
    bytearray: follow_list,
    weakref.ProxyType: follow_proxy,
    weakref.CallableProxyType: follow_proxy,
    torch.Generator: follow_generator,
}
# The same for types of users; a type made at run time is freed with its maker.
_users: weakref.WeakKeyDictionary[type, Visit] = weakref.WeakKeyDictionary()
# Types of Python and torch in which users keep their state.
_OPEN = (LRScheduler, types.SimpleNamespace, argparse.Namespace, UserDict, UserList, functools.partialmethod)
_OPEN_FILES = "torch.distributed.algorithms."  # of communication hooks, and of what averages models
_CONTAINERS = (dict, list, deque, set, bytearray, tuple, frozenset)


_BY_BASE: tuple[tuple[Any, Visit], ...] = (
    ((UninitializedParameter, UninitializedBuffer), follow_uninitialized),
    (torch.jit.ScriptModule, follow_script),
    (nn.Module, follow_module),
    (nn.Parameter, watch_tensor),
    (Tensor, follow_tensor),
    (torch.Generator, follow_generator),
    (torch.optim.Optimizer, follow_optimizer),
    (type, follow_class),
    (functools.partial, follow_partial),
    (FOREIGN, follow_foreign),
    (threading.local, follow_local),
)


def _visit_of(item: object) -> Visit | None:
    kind = type(item)
    if hasattr(kind, WATCHES):  # read from the class: an object might run user code
        return None
    found = _users.get(kind) or _classify(kind)
    if found is None:
        LEADS_NOWHERE.add(kind)
    elif is_library(kind.__module__):
        _visits[kind] = found
    else:
        _users[kind] = found
    return found


def _classify(kind: type) -> Visit | None:
    for types_, visit in _BY_BASE:
        if issubclass(kind, types_):
            return visit
    if issubclass(kind, _CONTAINERS):
        return follow_container
    if kind.__module__.startswith("torchremat."):
        return follow_ours
    if issubclass(kind, types.ModuleType) and (is_library(kind.__module__) or is_installed(kind.__module__)):
        return follow_file
    if hasattr(kind, "__wrapped__") or kind is type(functools.lru_cache(len)):
        return follow_object
    if issubclass(kind, _OPEN) or kind.__module__.startswith(_OPEN_FILES) or not is_library(kind.__module__):
        return follow_object
    return None


def tensors_inside(objects: list[object]) -> list[Tensor]:
    """Return the tensors that objects among the arguments of a call hold now."""
    world = Reaching()
    reach(world, objects, are_arguments=True)
    return world.tensors
