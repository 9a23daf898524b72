"""`module_calls`: the module calls of a step, how they nest, and their storages.

Missing on purpose: calls that `module_stack` cannot see either, and calls in threads other than the block's.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterable
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from torchremat.ambient.global_state import only_watches
from torchremat.measuring.modules import visible_modules
from torchremat.measuring.storages import StorageNumbers
from torchremat.tensors.structure import tensors_in


@dataclass(frozen=True, kw_only=True)
class ModuleCall:
    """One call of a module.

    Attributes:
        name: The module's name; for the model itself the name of its class.
        parent: The number of the call that made it; None if the step did.
        inputs: The storages of its positional and keyword arguments.
        has_grad: Whether grad mode was on.
    """

    name: str
    parent: int | None
    inputs: tuple[int, ...]
    has_grad: bool


class ModuleCalls:
    """The calls so far. Made by `module_calls`.

    Attributes:
        calls: In the order in which they began.
    """

    def __init__(self, numbers: StorageNumbers) -> None:
        self.calls: list[ModuleCall] = []
        self._numbers = numbers
        self._open: list[int] = []
        self._thread = threading.get_ident()

    @property
    def current(self) -> int | None:
        """The number of the innermost call that runs now; None outside of all."""
        return self._open[-1] if self._open else None

    def _enter(self, name: str, args: object, kwargs: object) -> None:
        if threading.get_ident() != self._thread:
            return
        inputs = self._numbers.of(tensors_in((args, kwargs)))
        call = ModuleCall(name=name, parent=self.current, inputs=inputs, has_grad=torch.is_grad_enabled())
        self._open.append(len(self.calls))
        self.calls.append(call)

    def _leave(self, name: str) -> None:
        if threading.get_ident() != self._thread:
            return
        # Not just the last: torch runs no hook of a module that a BaseException leaves, and early stop is one.
        while self._open and self.calls[self._open.pop()].name != name:
            pass


@contextmanager
def module_calls(models: Iterable[nn.Module], numbers: StorageNumbers) -> Generator[ModuleCalls]:
    """Follow the calls of the modules of `models` during the block, through hooks that are removed afterwards."""
    found = ModuleCalls(numbers)
    with ExitStack() as hooks:
        for module, name in names_of(models).items():
            if getattr(module, "_compiled_call_impl", None) is not None:
                continue  # its hooks would be compiled as well
            enter, leave = _hooks(found, name)
            # First in, last out: other hooks of the module run inside its own turn.
            hooks.callback(module.register_forward_pre_hook(enter, prepend=True, with_kwargs=True).remove)
            hooks.callback(module.register_forward_hook(leave, always_call=True).remove)
        yield found


def names_of(models: Iterable[nn.Module]) -> dict[nn.Module, str]:
    """Return the visible modules, each with its first name; the model itself is named after its class."""
    names: dict[nn.Module, str] = {}
    for model in models:
        for name, module in visible_modules(model):
            names.setdefault(module, name or type(model).__name__)
    return names


def _hooks(
    calls: ModuleCalls, name: str
) -> tuple[Callable[[nn.Module, object, object], None], Callable[[nn.Module, object, object], None]]:
    def enter(module: nn.Module, args: object, kwargs: object) -> None:
        calls._enter(name, args, kwargs)

    def leave(module: nn.Module, args: object, output: object) -> None:
        calls._leave(name)

    return only_watches(enter), leave
