"""Calls of modules whose parameters wait in a store, and the order in which parameters come back."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import NamedTuple
from weakref import ReferenceType, ref

from torch import Tensor, nn

from torchremat.errors import UnsupportedError
from torchremat.frames import running
from torchremat.measuring.storages import address_of

# NOTE [ A call that is left without hooks ]
#
# The end of a recompute, a KeyboardInterrupt and any other BaseException that is no Exception leave the modules that
# run, and torch then runs no hooks, not those with `always_call` either. So a call is known by its frame, and is over
# when that is no longer on the stack. This is asked at the next save, module or parameter that comes in: no code of
# ours runs before.


class ModuleRun(NamedTuple):
    """A call of a module.

    Attributes:
        module: The module.
        has_pushed: Whether hooks for its saved tensors were set.
        parameters: The parameters that are in memory for it, by the address of their memory.
        claims: The ids of the parameters that take part.
        frame: Where torch makes the call; None if it is compiled.
    """

    module: nn.Module
    has_pushed: bool
    parameters: dict[int, Tensor]
    claims: list[int]
    frame: FrameType | None

    @property
    def is_over(self) -> bool:
        """Whether it has been left. See NOTE [ A call that is left without hooks ]."""
        return self.frame is not None and all(one is not self.frame for one in running())

    def claim(self, parameter: Tensor, claims: Counter[int]) -> None:
        """Let a parameter take part; `claims` counts in how many calls each does."""
        self.claims.append(id(parameter))
        claims[id(parameter)] += 1

    def add(self, parameter: Tensor) -> None:
        """Take note of a parameter that takes part, and is in memory."""
        self.parameters[address_of(parameter.untyped_storage())] = parameter

    def end(self, claims: Counter[int]) -> None:
        """Let none take part any more."""
        claims.subtract(self.claims)
        self.claims.clear()


class ModuleRuns(threading.local):
    """The calls that run in a thread, innermost last."""

    def __init__(self) -> None:
        self.open: list[ModuleRun] = []


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
