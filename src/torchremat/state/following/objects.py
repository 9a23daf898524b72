"""Tensors, modules, containers and other objects that a call reaches, followed into their contents."""

from __future__ import annotations

import functools
import threading
from collections import deque
from collections.abc import Callable, Iterable
from itertools import chain
from operator import attrgetter, itemgetter
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer

from torchremat._compat.modules import cached_weights
from torchremat._compat.sharding import has_fsdp, is_managed
from torchremat.ambient.global_state import WATCHES
from torchremat.state.code import permanent
from torchremat.state.containers import Dict
from torchremat.state.following.code import follow_class
from torchremat.state.foreign import Foreign, ScriptState
from torchremat.state.holders import Container, Slots, ThreadLocal
from torchremat.state.leaves import watch
from torchremat.state.world import LEADS_NOWHERE, Reaching
from torchremat.tensors.parts import attributes_of, is_wrapper

_PARAMETER = frozenset({nn.Parameter})
_own = cast("Callable[[object], Dict]", attrgetter("__dict__"))


def follow_named_tensor(world: Reaching, module: nn.Module, name: str, tensor: Tensor) -> None:
    """Follow a tensor that a module holds by name."""
    if id(tensor) not in world.seen:
        world.seen.add(id(tensor))
        if not tensor.requires_grad and not isinstance(tensor, nn.Parameter):
            world.state.append((module, name, tensor))
        watch_tensor(world, tensor)


def follow_tensor(world: Reaching, tensor: Tensor) -> None:
    """Follow a tensor that is held anywhere else."""
    world.runs_code = True
    if not tensor.requires_grad and not isinstance(tensor, nn.Parameter):
        world.loose.append(tensor)
    watch_tensor(world, tensor)


def watch_tensor(world: Reaching, tensor: Tensor) -> None:
    """Watch the version of a tensor, and follow its attributes."""
    if world.is_named:
        world.named.add(id(tensor))
    if not tensor.is_inference():  # inference tensors have no version, and cannot be written in a forward with grad
        world.tensors.append(tensor)
    follow_attributes(world, tensor)


def reach_arguments(world: Reaching, tensors: Iterable[Tensor]) -> None:
    """Reach the attributes and the classes of tensors among the arguments, which are inputs themselves."""
    for tensor in tensors:
        if id(tensor) in world.seen:
            continue
        if is_wrapper(tensor):
            # Its parts are the memory of an input, which must not be kept alive here; a recompute has an alias of it
            # that has the other attributes.
            world.push(attributes_of(tensor).values())
            follow_class(world, type(tensor))
        else:
            follow_attributes(world, tensor)


def follow_attributes(world: Reaching, tensor: Tensor) -> None:
    """Follow a tensor into its attributes and its class."""
    own = cast("Dict", tensor.__dict__)
    world.dicts.append(own)
    if own:
        world.push(own.values())
    if type(tensor) is not Tensor:
        follow_class(world, type(tensor))


def follow_uninitialized(world: Reaching, _: object) -> None:
    """Note that a lazy module has not made its parameters yet."""
    world.waits = True


def follow_generator(world: Reaching, generator: torch.Generator) -> None:
    """Note a random generator of torch."""
    world.generators.append(generator)


LONG = 1_000  # items of the longest container that is followed wherever it is
_LARGEST_ARRAY = 16 << 10
_TABLES = ("_parameters", "_buffers", "_modules")
_HOOKS = (
    "_forward_pre_hooks", "_forward_pre_hooks_with_kwargs", "_forward_hooks", "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called", "_backward_pre_hooks", "_backward_hooks",
    "_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks",
)  # fmt: skip
tables_of = cast("Callable[[dict[str, Any]], tuple[dict[str, Any], ...]]", itemgetter(*_TABLES, *_HOOKS))
_OF_EVERY_MODULE = [*nn.Module().__dict__]
_COUNT = len(_OF_EVERY_MODULE)

_HEAP_TYPE = 1 << 9  # set for classes written in Python


def follow_partial(world: Reaching, partial: functools.partial[object]) -> None:
    """Follow a partial into its function and its arguments."""
    world.runs_code = True
    world.partials.append(partial)
    world.pending += (partial.func, *partial.args)
    follow_dict(world, partial.keywords)


def follow_module(world: Reaching, module: nn.Module) -> None:
    """Follow a module into its attributes, buffers, children and class; `follow_tables` follows its other tables."""
    world.met.append(module)
    own = module.__dict__
    buffers, children = own.get("_buffers"), own.get("_modules")
    if buffers:
        for name, one in buffers.items():
            if isinstance(one, UninitializedBuffer):
                world.waits = True
            elif one is not None:
                follow_named_tensor(world, module, name, one)
    if children:
        world.pending += [one for one in children.values() if one is not None]
        if "parametrizations" in children and not world.has_cached:
            world.has_cached = True
            world.push(world.bindings.add_names(*cached_weights))
    names = [*own]
    if len(names) > _COUNT:
        # They come first, unless a class sets attributes before it calls `nn.Module.__init__`.
        for name in names[_COUNT:] if names[:_COUNT] == _OF_EVERY_MODULE else own.keys() - _OF_EVERY_MODULE:
            value = own[name]
            if type(value) in LEADS_NOWHERE:
                continue
            if isinstance(value, Tensor):
                follow_named_tensor(world, module, name, value)
            else:
                world.pending.append(value)
    kind = type(module)
    if kind not in permanent and kind not in world.classes:
        follow_class(world, kind)


def follow_tables(world: Reaching) -> None:
    """Follow the parameters and the hooks of all modules that were met since the last time, in C."""
    modules, world.met = world.met, []
    if not modules:
        return
    world.modules += modules
    world.bindings.objects += modules
    world.bindings.owners += modules
    owns = [*map(_own, modules)]
    try:
        tables = [*map(tables_of, owns)]
    except KeyError:  # a class does not call `nn.Module.__init__`, or a module was loaded from an old file
        tables = [tuple([own.get(name, {}) for name in (*_TABLES, *_HOOKS)]) for own in owns]
    by_name = [*zip(*tables, strict=True)]
    parameters: list[Dict] = [*by_name[0]]
    dicts = world.dicts
    dicts += owns
    dicts += chain.from_iterable(by_name[1:])
    if has_fsdp():
        parameters = [_without_shards(world, one, own) for one, own in zip(modules, parameters, strict=True)]
    else:
        dicts += parameters
    each: list[Any] = [one for own in parameters for one in own.values() if one is not None]
    if world.is_named or not _PARAMETER.issuperset(map(type, each)):
        world.pending += each
    else:
        # By far the most tensors. A tensor met twice is watched twice.
        world.tensors += each
        attributes: list[Dict] = [*map(_own, each)]
        dicts += attributes
        for own in filter(None, attributes):
            world.push(own.values())
    hooks: list[Dict] = [*filter(None, chain.from_iterable(by_name[len(_TABLES) :]))]
    if hooks:
        world.runs_code = True
        for own in hooks:
            world.push(own.values())


def _without_shards(world: Reaching, module: nn.Module, parameters: Dict) -> Dict:
    """Watch the shards of a module, whose parameters FSDP swaps in a recompute as in the forward."""
    if not (parameters and is_managed(module)):
        world.dicts.append(parameters)
        return parameters
    shards = watch(module)
    world.shards += shards
    managed = {one.name for one in shards}
    return {name: one for name, one in parameters.items() if name not in managed}


def follow_script(world: Reaching, module: torch.jit.ScriptModule) -> None:
    """Follow a scripted module into its parameters, attributes, buffers and children."""
    world.modules.append(module)
    state = ScriptState(module)
    world.rest.append(state)
    for name, one in state.read().items():
        if isinstance(one, Tensor):
            follow_named_tensor(world, module, name, one)
    world.pending += [*module.parameters(recurse=False), *module.children()]


def follow_foreign(world: Reaching, item: object) -> None:
    """Note an object whose state lives outside of Python."""
    held = Foreign.of(item)
    if held is not None and (
        world.is_named
        or world.is_whole
        or not isinstance(item, np.ndarray)
        or (not world.is_argument and item.nbytes <= _LARGEST_ARRAY)
    ):
        world.rest.append(held)


def follow_dict(world: Reaching, item: Dict) -> None:
    """Follow a dict into its values."""
    world.runs_code = True
    if len(item) <= LONG or world.is_argument or world.is_whole:
        world.dicts.append(item)
        world.push(dict.values(item))  # a subclass may create its values when it is asked
    else:
        world.tables.append(item)


def follow_list(world: Reaching, item: list[object] | deque[object] | set[object] | bytearray) -> None:
    """Follow a list, deque or set into its items; note a bytearray."""
    if len(item) <= LONG or world.is_argument or world.is_whole:
        world.rest.append(Container(item))
        world.push(_elements(item))
    else:
        world.tables.append(item)


def follow_tuple(world: Reaching, item: Iterable[object]) -> None:
    """Follow an immutable container into its items."""
    world.push(item)


def follow_object(world: Reaching, item: object) -> None:
    """Follow a user object into its attributes and its class."""
    if world.leaves_iterators and hasattr(type(item), "__next__"):
        return
    try:
        own = cast("Dict", object.__getattribute__(item, "__dict__"))  # a class may have its own, which is user code
    except AttributeError:
        own = None
    if type(own) is dict:
        if WATCHES in own:
            return
        world.bindings.owners.append(item)
        follow_dict(world, own)
    slots = Slots.of(item)
    if slots is not None:
        world.rest.append(slots)
        world.push(slots.values())
    if type(item).__flags__ & _HEAP_TYPE:
        world.bindings.objects.append(item)
    follow_class(world, type(item))


def follow_local(world: Reaching, item: threading.local) -> None:
    """Follow a thread's own attributes of an object into their values."""
    world.runs_code = True
    held = ThreadLocal(item)
    world.rest.append(held)
    world.push(held.values())
    follow_class(world, type(item))


def follow_container(world: Reaching, item: object) -> None:
    """Follow a subclass of a container into its items and its attributes."""
    if isinstance(item, dict):
        follow_dict(world, cast("Dict", item))
    elif isinstance(item, list | deque | set | bytearray):
        follow_list(world, cast("list[object]", item))
    else:
        world.push(_elements(cast("Iterable[object]", item)))
    follow_object(world, item)


def follow_optimizer(world: Reaching, optimizer: torch.optim.Optimizer) -> None:
    """Follow an optimizer into its options, not into its state for parameters, which is large and only for steps."""
    world.runs_code = True
    world.optimizers.append(optimizer)
    if world.is_whole:
        follow_object(world, optimizer)
        return
    groups = cast("list[Dict]", optimizer.param_groups)
    world.rest.append(Container(groups))
    world.dicts += groups


def follow_proxy(world: Reaching, proxy: Any) -> None:
    """Note the target of a weak proxy."""
    if world.is_whole:
        try:
            world.proxied.append(proxy.__reduce_ex__.__self__)  # the target has this method
        except ReferenceError:  # the target was freed
            return


def follow_ours(world: Reaching, item: object) -> None:
    """Follow a callable of this package to the user's callable that it wraps.

    What it runs itself changes nothing that is reached. If it says so in `runs_code`, it wraps no code but a module's.
    """
    slots = Slots.of(item)
    own = {**getattr(item, "__dict__", {}), **(slots.read() if slots is not None else {})}
    if own.get("runs_code", True):
        world.runs_code = True
    world.pending += [own[name] for name in ("body", "own", "function") if name in own]
    if "_module" in own:  # of a wrapped module's forward, which holds the module weakly
        world.pending.append(cast("Callable[[], object]", own["_module"])())


def _elements(item: Iterable[object]) -> Iterable[object]:
    """Return the items of a container, by the iterator of the built-in class."""
    for kind in (list, deque, set, tuple, frozenset):
        if isinstance(item, kind):
            return cast("type[Any]", kind).__iter__(item)
    return ()
