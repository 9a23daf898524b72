"""What a call can reach through Python: from its function and its arguments, through everything that these hold.

    from                         to
    function                     cells, defaults, attributes; the global names that its code reads
    bound method, partial        its object, its function, its arguments
    module                       attributes, parameters, buffers, children, hooks; the code of its class
    object of the user's         attributes; its class's own, and the methods that some code reached names
    tensor                       attributes
    list, dict, tuple, set       what is in them

Objects of torch, NumPy and Python itself are not looked into, but for modules, containers and random generators.
Functions of these are followed into their cells alone: a decorator of theirs holds the user's function there. Code of
other installed packages is followed within its file, and of their classes that are no modules only the objects are. Of
an optimizer the options are reached, and whatever it holds, one that it wraps included, if it is asked for whole.

Missing on purpose: the attributes of Python modules, iterators, files, what C++ holds. Neither are containers of more
than a thousand items followed, unless they come with the arguments: that is a table, and no state of a forward.
"""

from __future__ import annotations

import argparse
import functools
import types
import weakref
from collections import UserDict, UserList, deque
from collections.abc import Callable, Iterable
from operator import attrgetter, itemgetter
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.optim.lr_scheduler import LRScheduler

from torchremat._compat.modules import cached_weights, hooks_of_all_modules
from torchremat._compat.sharding import has_fsdp, is_managed
from torchremat.ambient.surroundings import WATCHES
from torchremat.errors import UnsupportedError
from torchremat.state.code import class_code, is_installed, is_library, is_library_class, permanent, reads_of
from torchremat.state.holders import FOREIGN, Bindings, ClassData, Container, Foreign, Holder, Slots, contents_of
from torchremat.state.sharding import WatchedShard, watch
from torchremat.tensors.parts import attributes_of, is_wrapper

_MOST_ITEMS = 100_000
_LONG = 1_000
_LARGEST_ARRAY = 16 << 10

_TABLES = ("_parameters", "_buffers", "_modules")
_HOOKS = (
    "_forward_pre_hooks", "_forward_pre_hooks_with_kwargs", "_forward_hooks", "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called", "_backward_pre_hooks", "_backward_hooks",
    "_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks",
)  # fmt: skip
_tables = cast("Callable[[dict[str, Any]], tuple[dict[str, Any], ...]]", itemgetter(*_TABLES, *_HOOKS))
_OF_EVERY_MODULE = frozenset(nn.Module().__dict__)

Dict = dict[Any, Any]
Visit = Callable[["World", Any], None]


class World:
    """What can be reached from some roots.

    Attributes:
        dicts: Attributes, tables of modules, dicts: whatever is one.
        rest: The other holders, by kind.
        bindings: What cells, names and defaults mean, and which classes objects have.
        tensors: Those that count their versions. The recompute of a region is told if one was written.
        modules: Each once.
        roots: Those among the roots themselves.
        optimizers: Each once.
        proxied: What weak proxies stand for that were met whole; they are not followed.
        generators: torch's random generators.
        state: Tensors without grad that a module holds by name and may write to, other than parameters.
        loose: Tensors without grad elsewhere.
        named: By id, the tensors inside of what the user has named.
        shards: The parameters that FSDP2 has sharded.
        waits: Whether a lazy module was reached that has not made its parameters yet.
        sets_generators: Whether some code may set the state of a random generator.
        runs_code: Whether some code of the user's may change something that it reaches, or throw a switch.
    """

    __slots__ = (
        "_called",
        "_classes",
        "_has_cached",
        "_is_argument",
        "_is_named",
        "_is_whole",
        "_pending",
        "_seen",
        "bindings",
        "dicts",
        "generators",
        "loose",
        "modules",
        "named",
        "optimizers",
        "proxied",
        "rest",
        "roots",
        "runs_code",
        "sets_generators",
        "shards",
        "state",
        "tensors",
        "waits",
    )

    def __init__(self) -> None:
        self.dicts: list[Dict] = []
        self.rest: list[Holder] = []
        self.bindings = Bindings()
        self.tensors: list[Tensor] = []
        self.modules: list[nn.Module] = []
        self.roots: list[nn.Module] = []
        self.optimizers: list[torch.optim.Optimizer] = []
        self.proxied: list[object] = []
        self.generators: list[torch.Generator] = []
        self.state: list[tuple[nn.Module, str, Tensor]] = []
        self.loose: list[Tensor] = []
        self.named: set[int] = set()
        self.shards: list[WatchedShard] = []
        self.waits = False
        self.sets_generators = False
        self.runs_code = False
        self._seen: set[int] = set()
        self._pending: list[object] = []
        self._called: set[str] = set()
        self._classes: dict[type, set[str]] = {}  # with the names of the methods that have been followed
        self._has_cached = False
        self._is_argument = False
        self._is_named = False
        self._is_whole = False

    def end(self) -> None:
        """Add what belongs to all that was reached."""
        if self.modules:
            self.dicts += hooks_of_all_modules
        if self.bindings:
            self.rest.append(self.bindings)

    def skip(self, item: object) -> None:
        """Leave one object alone."""
        self._seen.add(id(item))

    def skip_all_of(self, other: World) -> None:
        """Leave alone whatever another has reached."""
        self._seen |= other._seen

    @property
    def is_inert(self) -> bool:
        """Whether nothing that was reached can be changed by the call, since only modules of torch run in it."""
        reached = self.rest or self.loose or self.generators or self._classes or self.shards
        return not (self.runs_code or reached or any(hooks_of_all_modules))

    def reach(
        self,
        items: Iterable[object],
        *,
        are_arguments: bool = False,
        are_named: bool = False,
        are_whole: bool = False,
    ) -> None:
        """Follow everything from some roots.

        Args:
            items: The roots.
            are_arguments: Whether they are arguments of the call, in which everything counts.
            are_named: Whether the user has named them as what the call writes to.
            are_whole: Whether they are followed however long they are, and optimizers into their state.

        Raises:
            UnsupportedError: More than 100,000 objects hang on an argument.
        """
        self._is_argument, self._is_named, self._is_whole = are_arguments or are_named, are_named, are_whole
        self.roots += [one for one in items if isinstance(one, nn.Module)]
        pending = self._pending
        pending.extend(items)
        seen, visits = self._seen, _visits
        for item in items if are_named else ():
            if id(item) not in seen and visits.get(type(item), _visit_of(item)) is None:  # a library's, and named
                seen.add(id(item))
                self._object(item)
        while True:
            while pending:
                item = pending.pop()
                visit = visits.get(type(item), _missing)
                if visit is None:
                    continue
                key = id(item)
                if key in seen:
                    continue
                if visit is _missing:
                    visit = _visit_of(item)
                    if visit is None:
                        continue
                seen.add(key)
                visit(self, item)
            self._follow_methods()
            if not pending:
                break

    def _push(self, items: Iterable[object]) -> None:
        visits = _visits
        self._pending += [one for one in items if visits.get(type(one), _missing) is not None]
        if len(self._seen) > _MOST_ITEMS and self._is_argument:
            raise UnsupportedError(
                f"more than {_MOST_ITEMS:,} objects hang on a region's arguments; whether the forward changes one "
                "cannot be watched. Pass what the function needs of them."
            )

    # ------------------------------------------------------------------------------------------------------- code

    def _function(self, function: types.FunctionType) -> None:
        if WATCHES in function.__dict__:
            return
        if is_library(function.__globals__.get("__name__")):
            # A decorator has the user's function there; what else it keeps is its own.
            self._push([one for one in contents_of(function.__closure__ or ()) if callable(one)])
            return
        if function.__closure__:
            self.bindings.cells += function.__closure__
            contents = contents_of(function.__closure__)
            self._push(contents)
            if not _PASSIVE.issuperset(map(type, contents)):
                self.runs_code = True
        self.bindings.functions.append(function)
        own = cast("Dict", function.__dict__)
        self.dicts.append(own)
        if own or function.__defaults__ or function.__kwdefaults__:
            self.runs_code = True
            self._push([*own.values(), *(function.__defaults__ or ()), function.__kwdefaults__])
        reads = reads_of(function.__code__)
        self._called |= reads.attributes
        if reads.sets_generators:
            self.sets_generators = True
        if reads.names:
            self._global_names(function.__globals__, reads.names)
        if reads.names or reads.stores:
            self.runs_code = True

    def _global_names(self, space: Dict, names: tuple[str, ...]) -> None:
        name = space.get("__name__")
        if is_installed(name):
            # From file to file, packages lead to each other, and to what has nothing to do with a forward.
            own = [one for one in names if getattr(space.get(one), "__module__", name) == name]
            names = tuple([one for one in own if not isinstance(space.get(one), types.ModuleType)])
        self._push(self.bindings.add_names(space, names))

    def _method(self, method: types.MethodType) -> None:
        self.runs_code = True
        self._pending += (method.__self__, method.__func__)

    def _partial(self, partial: functools.partial[object]) -> None:
        self.runs_code = True
        self._pending += (partial.func, *partial.args)
        self._dict(partial.keywords)

    def _class(self, kind: type) -> None:
        if kind not in self._classes and not is_library_class(kind):
            if is_installed(kind.__module__) and not issubclass(kind, nn.Module):
                return  # of what packages make to hold values, the values count
            self._classes[kind] = set()
            for owner, names in class_code(kind).data:
                one = owner()
                if (one is not None and id(one) not in self._seen) or one is kind:
                    self._seen.add(id(one))
                    data = ClassData(cast("type", one), names)
                    self.rest.append(data)
                    self._push(data.values())

    def _follow_methods(self) -> None:
        """Follow the methods of the classes that have been met, as far as any code names them."""
        for kind, followed in list(self._classes.items()):
            code = class_code(kind)
            wanted = (code.always | (self._called & code.methods.keys())) - followed
            followed |= wanted
            for name in wanted:
                self._pending += [one for found in code.methods[name] if (one := found()) is not None]

    # ---------------------------------------------------------------------------------------------------- objects

    def _module(self, module: nn.Module) -> None:
        self.modules.append(module)
        own = module.__dict__
        dicts = self.dicts
        dicts.append(own)
        try:
            tables = _tables(own)
        except KeyError:  # its class does not call `nn.Module.__init__`, or has come from an old file
            tables = tuple([own.get(name, {}) for name in (*_TABLES, *_HOOKS)])
        parameters, buffers, children = tables[:3]
        if parameters and has_fsdp() and is_managed(module):
            parameters = self._sharded(module, parameters)
            dicts += tables[1:]
        else:
            dicts += tables
        if parameters:
            self._parameters([one for one in parameters.values() if one is not None])
        if buffers:
            for name, one in buffers.items():
                if isinstance(one, UninitializedBuffer):
                    self.waits = True
                elif one is not None:
                    self._named_tensor(module, name, one)
        if children:
            self._pending += [one for one in children.values() if one is not None]
            if "parametrizations" in children and not self._has_cached:
                self._has_cached = True
                self._push(self.bindings.add_names(*cached_weights))
        if any(tables[3:]):
            self.runs_code = True
            for one in tables[3:]:
                self._push(one.values())
        if len(own) > len(_OF_EVERY_MODULE):
            visits = _visits
            for name in own.keys() - _OF_EVERY_MODULE:
                value = own[name]
                if visits.get(type(value), _missing) is None:
                    continue
                if isinstance(value, Tensor):
                    self._named_tensor(module, name, value)
                else:
                    self._pending.append(value)
        self.bindings.objects.append(module)
        self.bindings.owners.append(module)
        kind = type(module)
        if kind not in permanent and kind not in self._classes:
            self._class(kind)

    def _parameters(self, parameters: list[Tensor]) -> None:
        if _PARAMETER.issuperset(map(type, parameters)) and not self._is_named:
            # By far the most tensors. One that is met twice is watched twice.
            self.tensors += parameters
            attributes: list[Dict] = [*map(_attributes_of, parameters)]
            self.dicts += attributes
            for own in filter(None, attributes):
                self._push(own.values())
        else:
            self._pending += parameters

    def _sharded(self, module: nn.Module, parameters: dict[str, Any]) -> dict[str, Any]:
        """Watch the shards of a module, whose parameters FSDP exchanges in a recompute as in the forward."""
        shards = watch(module)
        self.shards += shards
        managed = {one.name for one in shards}
        return {name: one for name, one in parameters.items() if name not in managed}

    def _script(self, module: torch.jit.ScriptModule) -> None:
        # Its state is C++'s: it can be watched, and not be exchanged.
        self.modules.append(module)
        self._pending += [*module.parameters(recurse=False), *module.buffers(recurse=False), *module.children()]

    def _named_tensor(self, module: nn.Module, name: str, tensor: Tensor) -> None:
        if id(tensor) not in self._seen:
            self._seen.add(id(tensor))
            if not tensor.requires_grad and not isinstance(tensor, nn.Parameter):
                self.state.append((module, name, tensor))
            self._watch(tensor)

    def _tensor(self, tensor: Tensor) -> None:
        self.runs_code = True
        if not tensor.requires_grad and not isinstance(tensor, nn.Parameter):
            self.loose.append(tensor)
        self._watch(tensor)

    def _watch(self, tensor: Tensor) -> None:
        if self._is_named:
            self.named.add(id(tensor))
        if not tensor.is_inference():  # those have no version, and cannot be written in a forward with grad
            self.tensors.append(tensor)
        self._attributes(tensor)

    def arguments(self, tensors: Iterable[Tensor]) -> None:
        """Reach the attributes and the classes of tensors among the arguments, which are inputs themselves."""
        for tensor in tensors:
            if id(tensor) in self._seen:
                continue
            if is_wrapper(tensor):
                # Its parts are the memory of an input, which is not to be held here; a recompute has an alias of it
                # that has the other attributes.
                self._push(attributes_of(tensor).values())
                self._class(type(tensor))
            else:
                self._attributes(tensor)

    def _attributes(self, tensor: Tensor) -> None:
        own = cast("Dict", tensor.__dict__)
        self.dicts.append(own)
        if own:
            self._push(own.values())
        if type(tensor) is not Tensor:
            self._class(type(tensor))

    def _parameter(self, tensor: Tensor) -> None:
        # As `_watch`, for by far the most tensors.
        self.tensors.append(tensor)
        own = cast("Dict", tensor.__dict__)
        self.dicts.append(own)
        if own:
            self._push(own.values())
        if self._is_named:
            self.named.add(id(tensor))

    def _uninitialized(self, _: object) -> None:
        self.waits = True

    def _generator(self, generator: torch.Generator) -> None:
        self.generators.append(generator)

    def _foreign(self, item: object) -> None:
        held = Foreign.of(item)
        if held is not None and (
            self._is_named
            or self._is_whole
            or not isinstance(item, np.ndarray)
            or (not self._is_argument and item.nbytes <= _LARGEST_ARRAY)
        ):
            self.rest.append(held)

    def _dict(self, item: Dict) -> None:
        self.runs_code = True
        if len(item) <= _LONG or self._is_argument or self._is_whole:
            self.dicts.append(item)
            self._push(dict.values(item))  # a subclass may make its values when it is asked

    def _list(self, item: list[object] | deque[object]) -> None:
        if len(item) <= _LONG or self._is_argument or self._is_whole:
            self.rest.append(Container(item))
            self._push(_elements(item))

    def _flat(self, item: set[object] | bytearray) -> None:
        if len(item) <= _LONG or self._is_argument or self._is_whole:
            self.rest.append(Container(item))
            if isinstance(item, set):
                self._push(_elements(item))

    def _tuple(self, item: Iterable[object]) -> None:
        self._push(item)

    def _object(self, item: object) -> None:
        own = cast("Dict | None", getattr(item, "__dict__", None))
        if type(own) is dict:
            if WATCHES in own:
                return
            self.bindings.owners.append(item)
            self._dict(own)
        slots = Slots.of(item)
        if slots is not None:
            self.rest.append(slots)
            self._push(slots.values())
        if type(item).__flags__ & _HEAP_TYPE:
            self.bindings.objects.append(item)
        self._class(type(item))

    def _container(self, item: object) -> None:
        """A subclass of a container: what is in it, and its attributes."""
        if isinstance(item, dict):
            self._dict(cast("Dict", item))
        elif isinstance(item, list | deque):
            self._list(cast("list[object]", item))
        elif isinstance(item, set | bytearray):
            self._flat(cast("set[object]", item))
        else:
            self._push(_elements(cast("Iterable[object]", item)))
        self._object(item)

    def _optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Its options, and not what it keeps of parameters: that it has for steps, and in great number."""
        self.runs_code = True
        self.optimizers.append(optimizer)
        if self._is_whole:
            self._object(optimizer)
            return
        groups = cast("list[Dict]", optimizer.param_groups)
        self.rest.append(Container(groups))
        self.dicts += groups

    def _proxy(self, proxy: Any) -> None:
        if self._is_whole:
            try:
                self.proxied.append(proxy.__reduce_ex__.__self__)  # what it stands for has this method
            except ReferenceError:  # it is gone
                return

    def _ours(self, item: object) -> None:
        """A callable of this package, around the user's."""
        self.runs_code = True
        slots = Slots.of(item)
        own = {**getattr(item, "__dict__", {}), **(slots.read() if slots is not None else {})}
        self._pending += [own[name] for name in ("body", "own", "function") if name in own]
        if "_module" in own:  # of a wrapped module's forward, which holds it weakly
            self._pending.append(cast("Callable[[], object]", own["_module"])())


_HEAP_TYPE = 1 << 9  # of a class that is written in Python
# By type, what follows it; None for what has no state, and leads nowhere.
_visits: dict[type, Visit | None] = dict.fromkeys(
    (
        type(None), bool, int, float, complex, str, bytes, slice, range, type(Ellipsis), types.ModuleType,
        types.BuiltinFunctionType, types.CodeType, torch.dtype, torch.device, torch.layout, torch.memory_format,
        torch.Size, np.dtype, object, property,
    )
)  # fmt: skip
_visits |= {
    Tensor: World._tensor,
    nn.Parameter: World._parameter,
    types.FunctionType: World._function,
    types.MethodType: World._method,
    functools.partial: World._partial,
    tuple: World._tuple,
    frozenset: World._tuple,
    list: World._list,
    deque: World._list,
    dict: World._dict,
    set: World._flat,
    bytearray: World._flat,
    weakref.ProxyType: World._proxy,
    weakref.CallableProxyType: World._proxy,
    torch.Generator: World._generator,
}
_PARAMETER = frozenset({nn.Parameter})
_attributes_of = cast("Callable[[Tensor], Dict]", attrgetter("__dict__"))
# What a function may close over, and yet run nothing by its name.
_PASSIVE = frozenset({type(None), bool, int, float, complex, str, bytes, torch.dtype})
_PLAIN = _PASSIVE | {types.ModuleType}
# Of Python's own and of torch's, what people keep their state in.
_OPEN = (LRScheduler, types.SimpleNamespace, argparse.Namespace, UserDict, UserList, functools.partialmethod)
_CONTAINERS = (dict, list, deque, set, bytearray, tuple, frozenset)


def _elements(item: Iterable[object]) -> Iterable[object]:
    """Return what a container holds, by the iterator of the built-in class."""
    for kind in (list, deque, set, tuple, frozenset):
        if isinstance(item, kind):
            return cast("type[Any]", kind).__iter__(item)
    return ()


def _missing(world: World, item: object) -> None:
    """Stands for a type that has not been met."""


def _visit_of(item: object) -> Visit | None:
    kind = type(item)
    if hasattr(kind, WATCHES):  # asked of the class: an object might run code of the user's
        return None
    found = _classify(kind)
    # Types that are made at run time go with whoever made them.
    if found is None or is_library(kind.__module__):
        _visits[kind] = found
    return found


def _classify(kind: type) -> Visit | None:
    for types_, visit in _BY_BASE:
        if issubclass(kind, types_):
            return visit
    if issubclass(kind, _CONTAINERS):
        return World._container
    if kind.__module__.startswith("torchremat."):
        return World._ours
    if hasattr(kind, "__wrapped__") or kind is type(functools.lru_cache(len)):
        return World._object
    if issubclass(kind, _OPEN) or not is_library(kind.__module__):
        return World._object
    return None


_BY_BASE: tuple[tuple[Any, Visit], ...] = (
    ((UninitializedParameter, UninitializedBuffer), World._uninitialized),
    (torch.jit.ScriptModule, World._script),
    (nn.Module, World._module),
    (nn.Parameter, World._parameter),
    (Tensor, World._tensor),
    (torch.Generator, World._generator),
    (torch.optim.Optimizer, World._optimizer),
    (type, World._class),
    (functools.partial, World._partial),
    (FOREIGN, World._foreign),
)


def plain_cells(function: object) -> list[object] | None:
    """Return what the cells of a function hold, if it is plain that nothing else that it reaches has a state.

    Returns:
        Numbers, strings and Python modules, as most functions hold nothing else; None if there may be more.
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


def tensors_inside(objects: list[object]) -> list[Tensor]:
    """Return the tensors that objects among the arguments of a call hold now."""
    world = World()
    world.reach(objects, are_arguments=True)
    return world.tensors
