"""Calls of modules whose parameters wait in a store, and the order in which parameters come back."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple
from weakref import ReferenceType, ref

from torch import Tensor, nn

from torchremat.errors import UnsupportedError
from torchremat.measuring.storages import address_of
from torchremat.regions.threads import Now, thread

# NOTE [ A call that is left without hooks ]
#
# A recompute that has all it needs leaves the modules that run by a BaseException, and torch then runs no hooks, not
# those with `always_call` either. So a call is known by the recompute in which it was made, and is over when another
# one runs that is not nested in it, or none.


class ModuleRun(NamedTuple):
    """A call of a module.

    Attributes:
        has_pushed: Whether hooks for its saved tensors were set.
        parameters: The parameters that are in memory for it, by the address of their memory.
        claims: The ids of the parameters that take part.
        now: The state of the recompute in which it was made, or of the thread.
    """

    module: nn.Module
    has_pushed: bool
    parameters: dict[int, Tensor]
    claims: list[int]
    now: Now

    @property
    def is_over(self) -> bool:
        """Whether its recompute has ended. See NOTE [ A call that is left without hooks ]."""
        now = thread.now
        return self.now is not now and self.now.recomputing >= max(now.recomputing, 1)

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
