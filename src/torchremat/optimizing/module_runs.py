"""Modules whose parameters wait in a store: their calls, in which order these come back, and which models cannot."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any, NamedTuple
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn

from torchremat._compat.autograd import (
    current_graph_task,
    pop_saved_tensor_hooks,
    push_saved_tensor_hooks,
    top_saved_tensor_hooks,
)
from torchremat._compat.data_parallel import data_parallel_around
from torchremat._compat.dynamo import is_compiled
from torchremat._compat.modes import except_traced
from torchremat._compat.sharding import is_managed
from torchremat._compat.transforms import is_transformed
from torchremat.ambient.hidden import hiding
from torchremat.errors import UnsupportedError
from torchremat.frames import MODULE_CALL, module_of, running
from torchremat.measuring.communication import is_reduced_in_buckets

# NOTE [ A call that is left without hooks ]
#
# The end of a recompute, a KeyboardInterrupt and any other BaseException that is no Exception leave the modules that
# run, and torch then runs no hooks, not those with `always_call` either. So a call is known by its frame, and is over
# when that is no longer on the stack. This is asked at the next save, module or parameter that comes in: no code of
# ours runs before. A frame that was held till then would keep the inputs of its call, so only its address is
# known. That may be the address of a later call of the same module: when this one begins, the other is over.

_OURS = __name__.partition(".")[0] + "."


class ModuleRun(NamedTuple):
    """A call of a module.

    Attributes:
        hooks: Those for saved tensors that were set for it; None if none were.
        parameters: The parameters that are in memory for it.
        claims: The ids of the parameters that take part.
        frame: The address of the frame where torch makes the call; None if it is compiled.
    """

    module: nn.Module
    hooks: SetHooks | None
    parameters: list[Tensor]
    claims: list[int]
    frame: int | None

    def is_over(self, begins: FrameType | None) -> bool:
        """Whether it has been left, now that a call `begins`. See NOTE [ A call that is left without hooks ]."""
        return self.frame is not None and not any(
            id(one) == self.frame and one is not begins and one.f_code is MODULE_CALL and module_of(one) is self.module
            for one in running()
        )

    def claim(self, parameter: Tensor, claims: Counter[int]) -> None:
        """Let a parameter take part; `claims` counts in how many calls each does."""
        self.claims.append(id(parameter))
        claims[id(parameter)] += 1

    def end(self, claims: Counter[int]) -> None:
        """Let none take part any more."""
        claims.subtract(self.claims)
        self.claims.clear()


class ModuleRuns(threading.local):
    """The calls that run in a thread, innermost last.

    Attributes:
        open: The calls.
        lost: Hooks of calls that are over, which lie below those of others, or below a backward.
    """

    def __init__(self) -> None:
        self.open: list[ModuleRun] = []
        self.lost: list[SetHooks] = []

    def end_hooks(self, hooks: SetHooks | None) -> None:
        """Take the hooks of a call that is over away, and those that could not be before."""
        self.lost += [] if hooks is None else [hooks]
        task = current_graph_task()
        while self.lost:
            pack, own_task = self.lost[-1]
            top = top_saved_tensor_hooks(True)
            if task >= 0 > own_task or (task == own_task and top is not None and not _is_of(top[0], pack)):
                break  # a backward begins with the hooks of its thread, and leaves them as they were
            if task == own_task and top is not None:
                pop_saved_tensor_hooks()
            self.lost.pop()


class SetHooks(NamedTuple):
    """Hooks for saved tensors that are set.

    Attributes:
        pack: The first of them.
        task: The backward in which they were set, -1 for none.
    """

    pack: Callable[[Tensor], object]
    task: int


def _is_of(found: object, pack: object) -> bool:
    # The block of other hooks, left by an interrupt, takes away what lies on top of them: those that hand on to them.
    return found is pack or (isinstance(pack, partial) and pack.func is _pack_copy and pack.args[0] is found)


def set_hooks(pack: Callable[[Tensor], object], unpack: Callable[[Any], Tensor]) -> SetHooks | None:
    """Set hooks for saved tensors as a module begins, where `pack` and `unpack` are an offload's own.

    Other hooks decide what is kept of what they are given: a region keeps nothing, and what others keep stays.
    See NOTE [ What is handed back to autograd ].
    """
    top = top_saved_tensor_hooks(True)
    if top is None:
        hooks = None if is_transformed() else (except_traced(pack), unpack)
    elif _module_of(top[1]).startswith(_OURS) or (isinstance(top[0], partial) and top[0].func is _pack_copy):
        hooks = None
    else:
        hooks = partial(_pack_copy, top[0]), top[1]
    if hooks is None:
        return None
    push_saved_tensor_hooks(*hooks)
    return SetHooks(hooks[0], current_graph_task())


def _pack_copy(pack: Callable[[Tensor], object], tensor: Tensor) -> object:
    if type(tensor) is nn.Parameter:
        with hiding():
            tensor = nn.Parameter(tensor.detach(), tensor.requires_grad)
    return pack(tensor)


def _module_of(hook: object) -> str:
    return _module_of(hook.func) if isinstance(hook, partial) else str(getattr(hook, "__module__", ""))


class ReturnOrder:
    """In which order parameters come back, as learned from the steps before."""

    def __init__(self) -> None:
        self._last: tuple[int, bool] | None = None
        self._next: dict[tuple[int, bool], ReferenceType[Tensor]] = {}

    def after(self, parameter: Tensor, *, in_backward: bool) -> Tensor | None:
        """Take note of a parameter, and return the one that came after it last time."""
        if self._last is not None:
            self._next[self._last] = ref(parameter)
        self._last = id(parameter), in_backward
        found = self._next.get(self._last)
        return None if found is None else found()


class _CannotBeScriptedError(UnsupportedError, AttributeError):
    """An AttributeError, so that `hasattr` is False."""


class ModuleHook:
    """A hook of a module. That of a copy does nothing: the parameters of a copied model are in memory."""

    def __init__(self, run: Callable[[nn.Module], None] | None = None) -> None:
        self._run = run

    @property
    def __name__(self) -> str:
        """What torch.jit.script asks for first."""
        raise _CannotBeScriptedError(
            "torchremat.offload_parameters keeps parameters of this model in a store, and scripted code would read "
            "them without asking for them. Script the model after `remove()` of the offload."
        )

    @property
    def is_active(self) -> bool:
        """Whether it does anything."""
        return self._run is not None

    def __call__(self, module: nn.Module, *_: object) -> None:
        """Run, as torch calls it."""
        if self._run is not None:
            self._run(module)

    def __deepcopy__(self, memo: dict[int, object]) -> ModuleHook:
        return ModuleHook()

    def __reduce__(self) -> tuple[type[ModuleHook], tuple[()]]:
        return ModuleHook, ()


def keeps_in_store(model: nn.Module) -> bool:
    """Return whether parameters of a model wait in a store while their modules do not run."""
    hooks = [hook for module in model.modules() for hook in module._forward_pre_hooks.values()]
    return any(isinstance(one, ModuleHook) and one.is_active for one in hooks)


def check_around(module: nn.Module) -> None:
    """Raise if a module that begins to run was sharded, or put into DistributedDataParallel, after the offload."""
    around = data_parallel_around()
    if is_managed(module) or (around is not None and any(module is inside for inside in around.modules())):
        raise UnsupportedError(
            f"a {type(module).__name__} was put into {'fully_shard' if around is None else 'DistributedDataParallel'} "
            "after torchremat.offload_parameters, which cannot move what is sharded or reduced. Call `remove()` of the "
            "offload before."
        )


def check_in_memory(module: nn.Module) -> None:
    """Raise if parameters of a module wait in a store: they count in plans of whole models only."""
    if keeps_in_store(module):
        raise UnsupportedError(
            "parameters of this stage wait in a store (torchremat.offload_parameters), and plans of stages count all "
            "of them as in memory. Plan and apply first, and call it then; or call `remove()`."
        )


def check_model(model: nn.Module, given: list[nn.Module] | None) -> None:
    """Raise if the parameters of a model, or of some modules of it, cannot wait in a store.

    Raises:
        UnsupportedError: See `offload_parameters`.
    """
    modules = list(model.modules())
    unknown = [type(module).__name__ for module in given or () if all(module is not known for known in modules)]
    if unknown:
        raise UnsupportedError(f"offload_parameters(modules=...): a {unknown[0]} is no module of the model.")
    for module in modules:
        if is_compiled(module) or isinstance(module, torch.jit.ScriptModule):
            raise UnsupportedError(
                f"offload_parameters: a {type(module).__name__} is compiled, and its code reads parameters without "
                "asking for them. Use the plain module."
            )
    if keeps_in_store(model):
        raise UnsupportedError("offload_parameters: parameters of this model are in a store already.")
    parameters = list(model.named_parameters())
    if is_reduced_in_buckets(parameter for _, parameter in parameters):
        raise UnsupportedError(
            "offload_parameters: a DistributedDataParallel has these parameters, and reads them in C++. FSDP2 keeps a "
            "shard of each in every process."
        )
    for name, parameter in parameters:
        if type(parameter) is not nn.Parameter:
            raise UnsupportedError(
                f"offload_parameters: {name} is a {type(parameter).__name__}, whose memory belongs to its class. Only "
                "plain parameters can wait in a store."
            )
