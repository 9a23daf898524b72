"""`module_stack` and `module_calls`: the running module at any time of a step, and the calls of modules, nested.

In forward (and in a recompute) the running module is the one whose call is innermost. In backward no module runs; there
it is the module whose output received its gradient last: the running nodes are its own until the next module's output
receives one.

Missing on purpose: modules called by `.forward(...)` instead of `model(...)`, since hooks do not run for them, the
inside of scripted modules and of compiled code, and modules compiled in place (`module.compile()`), whose hooks would
be compiled as well.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Generator, Iterable
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache, partial
from itertools import chain
from types import FunctionType, MethodType
from typing import Self, cast

import torch
from torch import nn

from torchremat._compat.accelerators import accelerator_of
from torchremat._compat.dynamo import compiled_from, is_compiled, is_compiled_in_place
from torchremat.ambient.global_state import only_watches
from torchremat.errors import UnsupportedError
from torchremat.frames import calling_module
from torchremat.measuring.storages import StorageNumbers
from torchremat.regions.forwards import class_forward
from torchremat.regions.patches import called_attribute, is_generator, is_replaceable
from torchremat.state.code import reads_of
from torchremat.tensors.structure import tensors_in

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

    def _enter(self, name: str, given: object) -> None:
        self._thread.running.append(name)
        self._on_change(name)

    def _leave(self, name: str, output: object) -> None:
        for tensor in tensors_in(output):
            node = tensor.grad_fn
            if node is None:
                continue
            metadata = cast(dict[str, object], node.metadata)  # a property; torch's types say a method
            # The innermost module that returned this tensor hooks its node first, and keeps it. A hook of a node,
            # unlike a full backward hook of the module, puts nothing into the graph.
            if _NODE_KEY not in metadata:
                metadata[_NODE_KEY] = name
                node.register_prehook(partial(self._gradient_arrived, name))
        running = self._thread.running
        # Not just the last: torch runs no hook of a module that a BaseException leaves, and early stop is one.
        if name in running:
            while running.pop() != name:
                pass
        self._on_change(self.current)

    def _gradient_arrived(self, name: str, gradients: object) -> None:
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
    stack = ModuleStack(on_change)
    with _hooked([models] if isinstance(models, nn.Module) else models, stack._enter, stack._leave):
        yield stack


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
    """The calls so far in the thread of the block. Made by `module_calls`.

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

    def _enter(self, name: str, given: object) -> None:
        if threading.get_ident() != self._thread:
            return
        inputs = self._numbers.of(tensors_in(given))
        call = ModuleCall(name=name, parent=self.current, inputs=inputs, has_grad=torch.is_grad_enabled())
        self._open.append(len(self.calls))
        self.calls.append(call)

    def _leave(self, name: str, output: object) -> None:
        # Not just the last, as in `ModuleStack`.
        while threading.get_ident() == self._thread and self._open and self.calls[self._open.pop()].name != name:
            pass


@contextmanager
def module_calls(models: Iterable[nn.Module], numbers: StorageNumbers) -> Generator[ModuleCalls]:
    """Follow the calls of the modules of `models` during the block, through hooks that are removed afterwards."""
    calls = ModuleCalls(numbers)
    with _hooked(models, calls._enter, calls._leave):
        yield calls


@contextmanager
def _hooked(
    models: Iterable[nn.Module], enter: Callable[[str, object], None], leave: Callable[[str, object], None]
) -> Generator[None]:
    """Call `enter` with the name and the arguments of each call of a module, and `leave` with its name and output."""

    def hooks(name: str) -> tuple[Callable[[object, object, object], None], Callable[[object, object, object], None]]:
        return lambda _, args, kwargs: enter(name, (args, kwargs)), lambda _, args, output: leave(name, output)

    with ExitStack() as stack:
        for module, name in names_of(models).items():
            if is_compiled_in_place(module):
                continue
            before, after = hooks(name)
            # First in, last out: other hooks of the module run inside its own turn.
            handle = module.register_forward_pre_hook(only_watches(before), prepend=True, with_kwargs=True)
            stack.callback(handle.remove)
            stack.callback(module.register_forward_hook(after, always_call=True).remove)
        yield


@contextmanager
def intercepted(model: nn.Module, run: Callable[..., object]) -> Generator[None]:
    """Route the forward of every module of the model through `run(name, module, function, args, kwargs)`.

    A module compiled by `module.compile()` is routed as a whole, since dynamo would trace anything put inside it.
    """
    changed: list[tuple[nn.Module, str, object]] = []
    try:
        for name, module in visible_modules(model):
            if not is_replaceable(module):
                continue  # a part of its caller
            attribute = called_attribute(module)
            own = module.__dict__.get(attribute)
            changed.append((module, attribute, own))
            module.__dict__[attribute] = _Intercepted(name, module, attribute, own, run)
        yield
    finally:
        for module, attribute, own in changed:
            if own is None:
                module.__dict__.pop(attribute, None)
            else:
                module.__dict__[attribute] = own


class _Intercepted:
    """The forward of a module, routed. See NOTE [ A copy of the attributes ]."""

    # What a call reaches is found by the name `function`, as of all our callables that wrap one of the user's.
    __slots__ = ("_attribute", "_is_class_forward", "_name", "_run", "function", "module")

    def __init__(
        self,
        name: str,
        module: nn.Module,
        attribute: str,
        own: Callable[..., object] | None,
        run: Callable[..., object],
    ) -> None:
        self._name, self.module, self._attribute, self._run = name, module, attribute, run
        self.function = class_forward(module) if own is None else own
        self._is_class_forward = own is None

    def __call__(self, *args: object, **kwargs: object) -> object:
        """Run the forward of the module that is called: a copy of the attributes may have this object as well."""
        if torch.compiler.is_dynamo_compiling():
            return self.function(*args, **kwargs)  # a part of the compiled function that calls it
        caller = calling_module() if self._is_class_forward else None
        if caller is not None and caller is not self.module and vars(caller).get(self._attribute) is self:
            return self._run(self._name, caller, class_forward(caller), args, kwargs)
        return self._run(self._name, self.module, self.function, args, kwargs)

    def __deepcopy__(self, memo: object) -> Self:
        """A deep copy of a module has this object, as it has any function that it finds among the attributes."""
        return self


def names_of(models: Iterable[nn.Module]) -> dict[nn.Module, str]:
    """Return the visible modules, each with its first name; the model itself is named after its class."""
    names: dict[nn.Module, str] = {}
    for model in models:
        for name, module in visible_modules(model):
            names.setdefault(module, name or type(model).__name__)
    return names


def visible_modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the modules whose calls hooks can see, with their names.

    Not modules inside compiled or scripted ones or called by compiled functions, nor modules whose code runs after the
    call.
    """
    result: list[tuple[str, nn.Module]] = []
    methods = _compiled_methods(model)
    called = chain(*(_called_by(method, module) for module, each in methods.items() for method in each))
    hidden = {inner for module in called for inner in module.modules()}
    for name, module in model.named_modules():
        if module in hidden or isinstance(module, torch.jit.ScriptModule) or is_generator(module):
            continue
        result.append((name, module))
        if is_compiled(module):
            hidden.update(inner for inner in module.modules() if inner is not module)
    return result


def has_compiled(model: nn.Module) -> bool:
    """Return whether a module of the model is compiled, or a method of one."""
    return any(map(is_compiled, model.modules())) or bool(_compiled_methods(model))


def _compiled_methods(model: nn.Module) -> dict[nn.Module, list[Callable[..., object]]]:
    """Return the functions that modules of a model run compiled, by module: those of attributes and of its class."""
    if "torch._dynamo" not in sys.modules:
        return {}
    of_class = cache(_compiled_of_class)  # for this call: a class may be changed later
    found = ((module, _compiled_among(vars(module).values()) + of_class(type(module))) for module in model.modules())
    return {module: methods for module, methods in found if methods}


def _compiled_of_class(kind: type) -> list[Callable[..., object]]:
    return [method for own in kind.__mro__ if own not in _ALL_MODULES for method in _compiled_among(vars(own).values())]


def _compiled_among(values: Iterable[object]) -> list[Callable[..., object]]:
    """Return what runs compiled of the functions among some values, and in lists among these."""
    every = [*values]
    if _MAY_RUN.isdisjoint(map(type, every)):
        return []  # as for most modules
    every += chain(*(cast("Iterable[object]", each) for each in every if type(each) in _LISTS))
    functions = (each for each in every if type(each) in _FUNCTIONS)
    return [function for function in map(compiled_from, functions) if function is not None]


_LISTS = frozenset({list, tuple})
_FUNCTIONS = frozenset({FunctionType, MethodType, partial, staticmethod, classmethod})
_MAY_RUN = _LISTS | _FUNCTIONS
_ALL_MODULES = nn.Module.__mro__


def _called_by(method: Callable[..., object], module: nn.Module) -> list[nn.Module]:
    """Return the children of a module, or of the one whose method it is, that a function names in its code.

    Or that methods of the same class name, which it calls.
    """
    owner: object = getattr(method, "__self__", module)
    waiting, read = list[object]([method]), set[str]()
    while waiting:
        function = getattr(waiting[-1], "__func__", waiting.pop())
        if isinstance(function, FunctionType):
            new = reads_of(function.__code__).attributes - read
            read |= new
            own = ((getattr(type(owner), name, None), getattr(nn.Module, name, None)) for name in new)
            waiting += [attribute for attribute, of_all in own if attribute is not of_all]
    children = owner._modules if isinstance(owner, nn.Module) else {}
    return [child for name, child in children.items() if name in read and child is not None]


class OwnThread:
    """The thread that created it, for one run of a step there.

    A step may call modules in their own threads, as a `Pipe` does, or two towers in a pool. The history of a device's
    allocator covers all threads. torch's profiler, which records the CPU's allocator, covers only the thread that
    started it and autograd's own, and modes see one thread alone. A report of such a step would be too low, so it is
    refused.
    """

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self._elsewhere: str | None = None

    def note(self, module: str) -> None:
        """Note that a module, by its name, is called in this thread."""
        if module and self._elsewhere is None and not self.is_here():
            self._elsewhere = module

    def is_here(self) -> bool:
        """Return whether the current thread is the recorded one, or one of autograd's, which Python has not started."""
        return threading.get_ident() == self._thread or threading.current_thread().name.startswith("Dummy-")

    def check(self, device: torch.device) -> None:
        """Raise an error if a module was called in another thread whose allocations on a device are not recorded.

        Raises:
            UnsupportedError: One was.
        """
        if self._elsewhere is not None and accelerator_of(device).records == "profiler":
            raise _in_threads(f"`{self._elsewhere}`", f"What other threads allocate on {device}, torch does not tell")

    def check_here(self, name: str) -> None:
        """Raise an error if the current thread, which calls a module to plan, is not the recorded one.

        Raises:
            UnsupportedError: It is not.
        """
        if not self.is_here():
            raise _in_threads(name, "A plan follows one thread")


def _in_threads(name: str, why: str) -> UnsupportedError:
    return UnsupportedError(
        f"the step calls {name} in a thread of its own. {why}, so the figures of the step would be wrong. Let the "
        "step call its modules in one thread; the stages of a `Pipe` are planned and measured by "
        "`torchremat.pipeline.plan_stages`."
    )
