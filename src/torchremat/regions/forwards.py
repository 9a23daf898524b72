"""The forward of a wrapped module: an object in its place that is a region, or puts saved tensors into a store."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from functools import partial
from types import FunctionType, MethodType
from typing import cast
from weakref import ref

import torch
from torch import nn

from torchremat._compat.dynamo import TRACES_GET, is_exporting, outside_graphs
from torchremat.errors import UnsupportedError, WrapError, bug
from torchremat.frames import calling_module
from torchremat.regions.compiling import call_in_graph
from torchremat.regions.runs import Scope, continued, is_in_scope, open_choice, run_choice
from torchremat.regions.settings import Settings
from torchremat.regions.threads import makes_regions, thread
from torchremat.regions.transforms import new_region
from torchremat.state.roots import Rooted
from torchremat.stores.offloading import Offload

FORWARD = "forward"
COMPILED = "_compiled_call_impl"
COMPILE = "compile"


class WrappedForward(Rooted):
    """The `forward` of a wrapped module.

    NOTE [ No closure ]
    A closure over the module would be shared by a `deepcopy`, which then runs the original's weights, could not be
    pickled, and would be a cycle with the module. So this is a class at module level with a weak reference; copying and
    pickling go through the module, which both memoize before they come here.

    NOTE [ To others a method ]
    Other libraries take a module's forward apart, wrap it in their own code, and put it together again. So this object
    shows everything that the original forward shows: all attributes, and, if that is a method, a `__func__` that is a
    region with any module it is bound to. Code that unwraps by `__wrapped__` takes off the wrappers of others, above or
    below this one, and never the region: only `unwrap` takes that off.

    NOTE [ A copy of the attributes ]
    Code that makes a module with other parameters (learn2learn's clones, higher's functional modules) copies the
    attributes of the first one, this object among them, and means the copy's forward when it calls the copy. The frame
    of the call says which module that is. Bound to the first one, the copy would run the first one's weights.

    Attributes:
        name: The module's name in the model, "" for the model itself.
        settings: How its calls are recomputed if no scope decides, or the store for the tensors that they save; None if
            they are plain calls then.
        scope: The scope that a call of this module opens, if it is the root of a plan.
        own: The instance attribute from before.
        owner: The object that put it there, for the code that takes it off: copies of the module have the same or an
            equal one.
        runs_code: Whether a call may run more of the user's code than the forward of the module's class.
    """

    def __init__(
        self,
        module: nn.Module,
        name: str,
        settings: Settings | Offload | None,
        scope: Scope | None = None,
        own: Callable[..., object] | None = None,
        owner: object = None,
    ) -> None:
        super().__init__()
        self._module = ref(module)  # See NOTE [ No closure ]
        self.name = name
        self.settings = settings
        self.scope = scope
        self.own = own
        self.owner = owner
        is_plain = (
            settings.policy is None and not settings.guard if isinstance(settings, Settings) else settings is None
        )
        self.runs_code = not is_plain or scope is not None or own is not None
        function = self.function
        self.__doc__ = function.__doc__
        vars(self)["__module__"] = getattr(function, "__module__", None)

    def __call__(self, *args: object, **kwargs: object) -> object:
        """Run the forward, as a region if grad mode is on and it is not exported."""
        if not torch.compiler.is_dynamo_compiling():
            # See NOTE [ A copy of the attributes ]. A module may also call the forward of another one.
            caller = calling_module()
            if caller is not None and caller is not self._module() and vars(caller).get(FORWARD) is self:
                return UnboundForward(self)(caller, *args, **kwargs)
        if not torch.is_grad_enabled() or is_exporting():
            return self.function(*args, **kwargs)
        if torch.compiler.is_dynamo_compiling():
            if isinstance(self.settings, Offload):
                return _run(self, args, kwargs)
            if self.scope is None and self.settings is not None:
                return call_in_graph(self.function, self.settings, partial(_run, self), args, kwargs)
            _refuse_plan(self)
            return self.function(*args, **kwargs)
        return _run(self, args, kwargs)

    @property
    def module(self) -> nn.Module:
        """The wrapped module."""
        module = self._module()
        if module is None:
            raise WrapError(f"the wrapped module `{self.name}` is gone; its forward cannot be called alone.")
        return module

    @property
    def function(self) -> Callable[..., object]:
        """The original forward: the class's, or an attribute of the instance."""
        if self.own is not None:
            return self.own
        return class_forward(self.module)

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.function)

    @property
    def __wrapped__(self) -> Callable[..., object]:
        # See NOTE [ To others a method ]
        own = self.own
        if own is None or not hasattr(own, "__wrapped__"):
            return self.function
        module, inner = self.module, inspect.unwrap(own)
        if inner is forward_of_class(module):
            inner = None
        elif getattr(own, "__self__", None) is module:
            inner = MethodType(inner, module)
        return UnboundForward(WrappedForward(module, self.name, self.settings, self.scope, inner, self.owner))

    @property
    def __func__(self) -> UnboundForward:
        if not hasattr(self.function, "__func__"):
            raise AttributeError("__func__")
        return UnboundForward(self)

    def __getattr__(self, name: str) -> object:  # See NOTE [ To others a method ]
        if name == _SCRIPTED:
            raise _cannot_be_scripted(self.name)
        if name in _OWN or (self.own is None and self._module() is None):
            raise AttributeError(f"the forward of a wrapped module has no attribute {name!r}")
        return getattr(self.function, name)

    def compile(self, *args: object, **kwargs: object) -> None:
        """Compile the module in place as `nn.Module.compile` does, and run what was compiled as the module's forward.

        Dynamo would trace this object, and a plan cannot be followed inside of what it compiles.
        """
        module = self.module
        own = module.__dict__
        del own[COMPILE]
        is_outermost = own.get(FORWARD) is self  # no other library has put something around it
        if is_outermost and self.own is None:
            del own[FORWARD]
        elif is_outermost:
            own[FORWARD] = self.own
        module.compile(*args, **kwargs)
        if is_outermost:
            own[COMPILED] = WrappedForward(module, self.name, self.settings, self.scope, own[COMPILED], self.owner)

    def bound_to(self, module: nn.Module, memo: dict[int, object] | None = None) -> WrappedForward:
        """Return the same for another module, a copy, without sharing any state of the first one."""
        own = self.own
        if isinstance(own, MethodType) and own.__self__ is self._module():
            own = MethodType(own.__func__, module)
        elif memo is not None:
            own = deepcopy(own, memo)
        settings = self.settings
        if memo is not None and isinstance(settings, Settings) and settings.guard:
            settings = replace(settings, guard=deepcopy(settings.guard, memo))
        return WrappedForward(module, self.name, settings, self.scope, own, self.owner)

    def __reduce__(self) -> tuple[object, ...]:
        return (WrappedForward, (self.module, self.name, self.settings, self.scope, self.own, self.owner))

    def __deepcopy__(self, memo: dict[int, object]) -> WrappedForward:
        module = self.module
        copied = memo.get(id(module), module)
        if copied is module:  # copied without its module, like a function; or before it, and asked again then
            return self
        return self.bound_to(cast("nn.Module", copied), memo)

    def __repr__(self) -> str:
        kind = "offloaded" if isinstance(self.settings, Offload) else "as a region"
        return f"<forward of `{self.name}` {kind} by torchremat>"


class _MissingError(UnsupportedError, AttributeError):
    """An attribute that a wrapped forward deliberately lacks; an AttributeError, so that `hasattr` is False."""


# Attributes by which TorchScript compiles a function. It would compile the function without the region.
_SCRIPTED = "__globals__"


def _cannot_be_scripted(name: str) -> _MissingError:
    words = f"`{name}`" if name else "the model"
    return _MissingError(
        f"{words} is wrapped by torchremat, and torch.jit.script would compile its forward without the region. Call "
        "`torchremat.unwrap(model)` first. To recompute scripted code, wrap a module that calls it and is not scripted "
        "itself, or call it by `torchremat.checkpoint`."
    )


# Attributes of this object, not of the original forward: without them it is not initialized yet, or is no method.
_OWN = frozenset({"_module", "name", "settings", "scope", "own", "owner", "runs_code", "root", "__func__"})


class UnboundForward:
    """The function of a wrapped module's forward: it takes the module first. See NOTE [ To others a method ].

    Deliberately without `__wrapped__`: code that unwraps has to stop here.
    """

    def __init__(self, forward: WrappedForward) -> None:
        function = forward.function
        # `functools.wraps` copies these into the attributes of other libraries' wrappers, so no other object may have
        # them.
        self._torchremat_forward = forward
        self._torchremat_function = getattr(function, "__func__", function)
        self.__doc__ = function.__doc__
        vars(self)["__module__"] = getattr(function, "__module__", None)

    @property
    def forward(self) -> WrappedForward:
        """The wrapped module's forward."""
        return self._torchremat_forward

    def __call__(self, module: nn.Module, /, *args: object, **kwargs: object) -> object:
        """Run the forward of that module, as the wrapped module's own."""
        return self.bound_to(module)(*args, **kwargs)

    def bound_to(self, module: nn.Module) -> WrappedForward:
        """Return the forward of a module.

        Raises:
            WrapError: It is a copy of the wrapped module, which guards its own objects.
        """
        forward = self.forward
        if forward._module() is module:
            return forward
        if isinstance(forward.settings, Settings) and forward.settings.guard:
            raise WrapError(
                f"`{forward.name or type(module).__name__}` was wrapped with `guard=`, and other code has given its "
                "forward to a copy of it, which would guard the objects of the original. Copy it first and wrap the "
                "copy, or `torchremat.unwrap` the copy."
            )
        return forward.bound_to(module)

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self._torchremat_function)

    def __getattr__(self, name: str) -> object:
        if name == "__name__":
            # A method is pickled by its function's name, and would come back as the class's forward, without the
            # region.
            raise _MissingError(
                f"the wrapped forward of `{self.forward.name}` was bound anew by another library, and so cannot be "
                "pickled. Call `torchremat.unwrap(model)` first, and wrap what was unpickled."
            )
        if name == _SCRIPTED:
            raise _cannot_be_scripted(self.forward.name)
        if name in {"_torchremat_forward", "_torchremat_function", "__wrapped__"}:
            raise AttributeError(f"the function of a wrapped forward has no attribute {name!r}")
        return getattr(self._torchremat_function, name)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, UnboundForward) and other.forward is self._torchremat_forward

    def __hash__(self) -> int:
        return hash(id(self.forward))

    def __deepcopy__(self, memo: dict[int, object]) -> UnboundForward:
        return self  # like a function: it uses the weights of the module that it is given

    def __repr__(self) -> str:
        return f"{self.forward!r}, unbound"


@outside_graphs
def _run(forward: WrappedForward, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
    module, settings = forward.module, forward.settings
    function = class_forward(module) if forward.own is None else forward.own
    if not makes_regions():
        return function(*args, **kwargs)
    if isinstance(settings, Offload):
        with settings:
            return function(*args, **kwargs)
    if forward.scope is not None:
        forward.scope.begun(module, args, kwargs)
        return forward.scope.run(function, *args, **kwargs)
    if thread.now.scopes:
        choice = open_choice(forward.name)
        if choice is not None:
            return run_choice(choice, function, module, args, kwargs)
        if settings is not None:
            function = continued(function)
    if settings is None:
        return function(*args, **kwargs)
    return new_region(settings, forward.name).call(function, args, kwargs, (module,))


@outside_graphs
def _refuse_plan(forward: WrappedForward) -> None:
    if forward.scope is not None or is_in_scope():
        name = f"`{forward.name}`" if forward.name else "the model"
        raise UnsupportedError(
            f"{name} runs by a plan, which cannot be followed inside a compiled function: its regions are runs of "
            "several calls. Plan a model of compiled blocks instead: replace its blocks by `torch.compile(block)`, "
            "then plan; or `wrap` the blocks and compile the model."
        )


def class_forward(module: nn.Module) -> Callable[..., object]:
    """Return the forward that the class of a module has, as the module would find it.

    As Python does: an object with a `__get__` binds, be it a function, a static or class method or something else, and
    every other object is called as it is.
    """
    found = forward_of_class(module)
    if isinstance(found, staticmethod | classmethod):
        return type(module).forward  # the same, and dynamo can trace it
    if isinstance(found, FunctionType) and not TRACES_GET and torch.compiler.is_dynamo_compiling():
        return partial(found, module)
    bind = getattr(type(found), "__get__", None)
    return cast("Callable[..., object]", found if bind is None else bind(found, module, type(module)))


def forward_of_class(module: nn.Module) -> object:
    """Return the class attribute `forward` of a module, unbound."""
    for kind in type(module).__mro__:
        if FORWARD in kind.__dict__:
            return kind.__dict__[FORWARD]
    raise bug(f"{type(module).__name__} has no forward, which every module has")
