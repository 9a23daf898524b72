"""`module_stack`: the running module at any time of a step.

In forward (and in a recompute) it is the module whose call is innermost. In backward no module runs; there it is the
module whose output received its gradient last: the running nodes are its own until the next module's output receives
one.

Missing on purpose: modules called by `.forward(...)` instead of `model(...)`, since hooks do not run for them, the
inside of scripted and compiled modules, and modules compiled in place (`module.compile()`), whose hooks would be
compiled as well.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterable
from contextlib import ExitStack, contextmanager
from typing import cast

import torch
from torch import nn

from torchremat._compat.dynamo import is_compiled, is_compiled_in_place
from torchremat.ambient.global_state import only_watches
from torchremat.measuring.storages import tensors_in
from torchremat.regions.patches import is_generator

OUTSIDE = ""
_NODE_KEY = "torchremat.module"


class ModuleStack:
    """Knows the running module; each thread has its own. Made by `module_stack`."""

    def __init__(self, on_change: Callable[[str], object]) -> None:
        self._on_change = on_change
        self._thread = _RunningModules()

    @property
    def current(self) -> str:
        """The name of the running module; the root has its class name, and outside all modules the name is empty."""
        return self._thread.running[-1] if self._thread.running else self._thread.backward

    def _enter(self, name: str) -> None:
        self._thread.running.append(name)
        self._on_change(name)

    def _leave(self, name: str) -> None:
        running = self._thread.running
        # Not just the last: torch runs no hook of a module that a BaseException leaves, and early stop is one.
        if name in running:
            while running.pop() != name:
                pass
        self._on_change(self.current)

    def _gradient_arrived(self, name: str) -> None:
        self._thread.running.clear()  # left over from an early stop, as above
        self._thread.backward = name
        self._on_change(name)


class _RunningModules(threading.local):
    def __init__(self) -> None:
        self.running: list[str] = []
        self.backward = OUTSIDE


def _ignored(name: str) -> None:
    """Ignore a change of the running module."""


@contextmanager
def module_stack(
    models: nn.Module | Iterable[nn.Module], on_change: Callable[[str], object] = _ignored
) -> Generator[ModuleStack]:
    """Track the running module of `models` during the block, through hooks that are removed afterwards.

    Args:
        models: The model, or several. A module with two names has the first.
        on_change: Called with the name of the module that runs from now on.
    """
    roots = [models] if isinstance(models, nn.Module) else list(models)
    names: dict[nn.Module, str] = {}
    for root in roots:
        for name, module in visible_modules(root):
            if not is_compiled_in_place(module):
                names.setdefault(module, name or type(root).__name__)
    stack = ModuleStack(on_change)
    with ExitStack() as hooks:
        for module, name in names.items():
            enter, leave = _hooks(stack, name)
            # First in, last out: other hooks of the module run inside its own turn.
            hooks.callback(module.register_forward_pre_hook(only_watches(enter), prepend=True).remove)
            hooks.callback(module.register_forward_hook(leave, always_call=True).remove)
        yield stack


def visible_modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the modules whose calls hooks can see, with their names.

    Not modules inside compiled or scripted ones, nor modules whose code runs after the call.
    """
    result: list[tuple[str, nn.Module]] = []
    hidden: set[int] = set()
    for name, module in model.named_modules():
        if id(module) in hidden or isinstance(module, torch.jit.ScriptModule) or is_generator(module):
            continue
        result.append((name, module))
        if is_compiled(module):
            hidden.update(id(inner) for inner in module.modules() if inner is not module)
    return result


def has_compiled(model: nn.Module) -> bool:
    """Return whether a module of the model is compiled."""
    return any(map(is_compiled, model.modules()))


def _hooks(
    stack: ModuleStack, name: str
) -> tuple[Callable[[nn.Module, object], None], Callable[[nn.Module, object, object], None]]:
    def enter(module: nn.Module, args: object) -> None:
        stack._enter(name)

    def gradient_arrived(gradients: object) -> None:
        stack._gradient_arrived(name)

    def leave(module: nn.Module, args: object, output: object) -> None:
        for tensor in tensors_in(output):
            node = tensor.grad_fn
            if node is None:
                continue
            metadata = cast(dict[str, object], node.metadata)  # a property; torch's types say a method
            # The innermost module that returned this tensor hooks its node first, and keeps it. A hook of a node,
            # unlike a full backward hook of the module, puts nothing into the graph.
            if _NODE_KEY not in metadata:
                metadata[_NODE_KEY] = name
                node.register_prehook(gradient_arrived)
        stack._leave(name)

    return enter, leave
