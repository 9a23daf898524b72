"""Private state of FSDP2."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache, partial
from types import CodeType, FunctionType
from typing import Protocol, cast
from weakref import ref

import torch
from torch import Tensor, nn

from torchremat._compat.binding import overridden, private
from torchremat.frames import running

# NOTE [ What FSDP2 does to a parameter ]
#
# `fully_shard` splits each parameter into a sharded one, a DTensor, which the optimizer writes, and a gathered one,
# whose storage comes and goes. The modules that use the parameter hold one or the other:
#
#     before the forward of the sharded module        the sharded one
#     from its pre-forward hook to its forward hook   the gathered one
#     after it                                        the sharded one if `reshard_after_forward`, else the gathered one
#     from the hook on the gradient of its outputs    the gathered one
#     when its backward is done                       the sharded one
#
# The gathered one is the same object each time, and gathering does not move its version: writes show only in the
# sharded one.

# NOTE [ Gradients that FSDP2 has not reduced ]
#
# While gradients accumulate (`set_requires_gradient_sync(False)`, or `set_requires_all_reduce(False)`) they are not in
# the `.grad` of the sharded parameters, until a backward that reduces takes them from
#
#     the `.grad` of the gathered parameter      as autograd has written it
#     `unsharded_accumulated_grad`               the same, where it is reduced in another dtype
#     `_partial_reduce_output` of the group      of parts that are reduced, and yet to be summed over replicas

# NOTE [ Operators of FSDP2 ]
#
# Around the forward of a sharded module FSDP2 gathers, copies, casts, frees and marks its work for profilers; its next
# version may do something else. None of that belongs to the code of the model: a recompute in a backward finds
# parameters gathered and does none of it, and a recompute that runs ahead does all of it. FSDP2's work for a module
# runs in a method of two of its classes, the state of the module and the group of its parameters, and neither calls the
# code of the model. So an operator is FSDP2's if such a method is among the frames between the operator and the
# observer of the operators. Other frames of FSDP2 may well have the model's code above them: those of
# `register_fsdp_forward_method`.

_bind = partial(private, needed_for="a region in a module that `fully_shard` has sharded")
_MANAGED = "_is_fsdp_managed_module"
_FSDP_MODULE = "torch.distributed.fsdp._fully_shard._fsdp_state"  # imported by any user of `fully_shard`


class _Info(Protocol):
    module: nn.Module
    param_name: str
    shared_modules: list[nn.Module]
    shared_param_names: list[str]


class _Param(Protocol):
    sharded_param: nn.Parameter
    _sharded_local_tensor: Tensor
    _module_info: _Info
    _param_fqn: str | None
    _unsharded_param: nn.Parameter


class _Communication(Protocol):
    post_forward_order: list[object]


class _Group(Protocol):
    fsdp_params: list[_Param]
    comm_ctx: _Communication
    reduce_grads: bool
    all_reduce_grads: bool
    reshard_after_backward: bool
    _training_state: object
    _post_forward_indices: list[int]

    def reshard(self) -> None: ...


class _FSDPState(Protocol):
    _fsdp_param_groups: list[_Group]


class _Module(Protocol):
    def _get_fsdp_state(self) -> _FSDPState: ...


class Shard:
    """A parameter that FSDP2 has sharded. See NOTE [ What FSDP2 does to a parameter ]."""

    __slots__ = ("_group", "_param")

    def __init__(self, group: _Group, param: _Param) -> None:
        # Weak: the module to which it leads keeps it alive.
        self._group = ref(group)
        self._param = ref(param)

    @property
    def sharded(self) -> nn.Parameter | None:
        """The parameter that the optimizer writes; None if the module was freed."""
        param = self._param()
        return None if param is None else param.sharded_param

    @property
    def local(self) -> Tensor | None:
        """This process's part of the parameter."""
        param = self._param()
        return None if param is None else param._sharded_local_tensor

    @property
    def whole(self) -> Tensor | None:
        """The gathered parameter, whose memory comes and goes; None before the first forward."""
        return getattr(self._param(), "_unsharded_param", None)

    @property
    def name(self) -> str | None:
        """Its name below the outermost sharded module, once that has run."""
        param = self._param()
        return None if param is None else param._param_fqn

    @property
    def is_in_forward(self) -> bool:
        """Whether the sharded module's forward is running: its pre-forward hook has run, its forward hook has not."""
        group = self._group()
        return group is not None and getattr(group._training_state, "name", "") == "FORWARD"


def has_fsdp() -> bool:
    """Return whether FSDP2 was imported at all; otherwise no module is sharded."""
    return _FSDP_MODULE in sys.modules


def is_managed(module: nn.Module) -> bool:
    """Return whether `fully_shard` was called on the module or on one that contains it."""
    return _MANAGED in module.__dict__


def is_sharded(module: nn.Module) -> bool:
    """Return whether `fully_shard` was called on the module itself, so that FSDP2's hooks surround each call of it."""
    return is_managed(module) and isinstance(module, sys.modules["torch.distributed.fsdp"].FSDPModule)


def is_hook_of_fsdp(hook: object) -> bool:
    """Return whether a forward pre-hook is FSDP2's own."""
    return getattr(hook, "__module__", None) == _FSDP_MODULE


def is_dtensor(tensor: Tensor) -> bool:
    """Return whether a tensor is a DTensor."""
    found = sys.modules.get("torch.distributed.tensor")
    return found is not None and isinstance(tensor, found.DTensor)


def shards_anything() -> bool:
    """Return whether this process has sharded modules, so that operators may be FSDP2's own."""
    return has_fsdp() and bool(_all_states())


def is_run_by_fsdp(watcher: CodeType | None) -> bool:
    """Return whether the running code is FSDP2's own work. See NOTE [ Operators of FSDP2 ].

    Args:
        watcher: The code in whose frame everything observed runs; None without such a frame.
    """
    own = _own_code()
    for frame in running():
        code = frame.f_code
        if code is watcher:
            return False
        if id(code) in own:  # the hash of code covers all of its contents
            return True
    return False


@cache
def _own_code() -> frozenset[int]:
    classes = (
        _bind("distributed.fsdp._fully_shard._fsdp_state.FSDPState"),
        _bind("distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup"),
    )
    methods = [inspect.unwrap(one) for each in classes for one in vars(each).values() if callable(one)]
    return frozenset(id(one.__code__) for one in methods if isinstance(one, FunctionType))


def _groups_of(state: _FSDPState | None) -> list[_Group]:
    if hasattr(state, "_fsdp_param_groups"):
        return cast("_FSDPState", state)._fsdp_param_groups
    one = getattr(state, "_fsdp_param_group", None)  # torch 2.12 and older; the states of others have neither
    return [] if one is None else [one]


def _groups_in(modules: Iterable[nn.Module]) -> Iterator[_Group]:
    for module in modules if has_fsdp() else ():
        if is_sharded(module):
            yield from _groups_of(cast("_Module", module)._get_fsdp_state())


def _unreduced(modules: Iterable[nn.Module]) -> Iterator[tuple[str, object, str]]:
    """Yield the places of unreduced gradients: parameter name, owner, and attribute."""
    for group in _groups_in(modules):
        yield "parameters together", group, "_partial_reduce_output"
        for param in group.fsdp_params:
            name = param._param_fqn or param._module_info.param_name
            yield name, param, "unsharded_accumulated_grad"
            if hasattr(param, "_unsharded_param"):  # it exists from the first forward on
                yield name, param._unsharded_param, "grad"


def unreduced_gradients(modules: Iterable[nn.Module]) -> dict[str, Tensor]:
    """Return the gradients accumulated for sharded modules. See NOTE [ Gradients that FSDP2 has not reduced ]."""
    found = ((name, getattr(owner, place, None)) for name, owner, place in _unreduced(modules))
    return {name: gradient for name, gradient in found if gradient is not None}


@contextmanager
def unreduced_gradients_aside(modules: Sequence[nn.Module]) -> Generator[None]:
    """Set these gradients aside for the block, with zeros in their place; gradients added in the block are dropped."""
    aside = [(owner, place, getattr(owner, place, None)) for _, owner, place in _unreduced(modules)]
    try:
        for owner, place, gradient in aside:
            if gradient is not None:
                setattr(owner, place, torch.zeros_like(gradient))
        yield
    finally:
        for _, owner, place in _unreduced(modules):
            setattr(owner, place, None)
        for owner, place, gradient in aside:
            setattr(owner, place, gradient)


def unreduced_gradients_again(modules: Sequence[nn.Module]) -> Callable[[], None]:
    """Return a function that restores the gradients that are there now."""
    now = [(owner, place, getattr(owner, place, None)) for _, owner, place in _unreduced(modules)]

    def again() -> None:
        for owner, place, gradient in now:
            setattr(owner, place, gradient)

    return again


def communicators(modules: Iterable[nn.Module]) -> Iterator[object]:
    """Yield what gathers parameters and reduces gradients of sharded modules: objects and hooks of the user's."""
    names = ("_all_gather_comm", "_reduce_scatter_comm", "_all_reduce_hook")
    yield from (getattr(group, name, None) for group in _groups_in(modules) for name in names)


def adds_gradients_up(modules: Iterable[nn.Module]) -> bool:
    """Return whether the next backward of some modules leaves gradients that FSDP2 has not reduced."""
    return any(not (group.reduce_grads and group.all_reduce_grads) for group in _groups_in(modules))


def reducing(modules: Iterable[nn.Module]) -> AbstractContextManager[None]:
    """Return a context in which each backward of some modules reduces gradients."""
    return overridden(_groups_in(modules), reduce_grads=True, all_reduce_grads=True)


def reshard(modules: Iterable[nn.Module]) -> None:
    """Bring the sharded ones of some modules to the state after a backward, for forwards without a backward.

    Such a forward leaves parameters gathered, at least those of the outermost module, and leaves its modules among
    those that the next backward gathers ahead.
    """
    for group in _groups_in(modules):
        if not hasattr(group.comm_ctx, "post_forward_order"):  # it exists from the first forward on
            continue
        if group.reshard_after_backward:
            group.reshard()
        group.comm_ctx.post_forward_order.clear()
        group._post_forward_indices.clear()


@cache
def _all_states() -> Mapping[nn.Module, Callable[[], _FSDPState | None]]:
    states = _bind("distributed._composable_state._module_state_mapping")
    return cast("Mapping[nn.Module, Callable[[], _FSDPState | None]]", states)


def all_shards() -> Iterator[tuple[nn.Module, str, Shard]]:
    """Yield each parameter that FSDP2 has sharded in this process, with each of its modules and names."""
    for reference in list(_all_states().values()):
        for group in _groups_of(reference()):
            for param in group.fsdp_params:
                shard = Shard(group, param)
                info = param._module_info
                yield info.module, info.param_name, shard
                for module, name in zip(info.shared_modules, info.shared_param_names, strict=True):
                    yield module, name, shard
