"""Modules as regions, by name, type or predicate, without editing the model.

A wrapped module has an instance attribute `forward`, a `WrappedForward`, and nothing else about it changes: its class,
its parameters' names, its hooks and its `state_dict` are what they were, and hooks run outside of the region, once.

    attribute of the module               value                       removed by
    `forward`                             WrappedForward              `unwrap`
    `_compiled_call_impl`                 the same, around a module   `unwrap`
                                          that is compiled in place
    `_replicate_for_data_parallel`        refuse_data_parallel        `unwrap`

What `module.compile()` has made runs in the place of the call, and `forward` inside of it. A plan, which cannot be
followed in there, goes around it; `wrap` goes inside, where a region is the compiler's.
"""

from __future__ import annotations

import difflib
import fnmatch
import inspect
from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import partial
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, TypeVar, cast
from weakref import ref

import torch
from torch import nn

from torchremat._compat.graphs import TRACES_GET, is_exporting, outside_graphs
from torchremat.errors import UnsupportedError, WrapError, bug
from torchremat.regions.compiling import call_in_graph
from torchremat.regions.decisions import Policy
from torchremat.regions.runs import Scope, continued, is_in_scope, open_choice, run_choice
from torchremat.regions.settings import Check, Settings
from torchremat.regions.threads import makes_regions
from torchremat.regions.transforms import new_region
from torchremat.stores.offloading import Offload, offload

if TYPE_CHECKING:
    from torchremat.tensors.handles import Store

Pattern = str | type[nn.Module] | Callable[[str, nn.Module], bool]
M = TypeVar("M", bound=nn.Module)

_FORWARD = "forward"
_COMPILED = "_compiled_call_impl"
_REPLICATE = "_replicate_for_data_parallel"


class WrappedForward:
    """The `forward` of a wrapped module.

    NOTE [ No closure ]
    A closure over the module would be shared by a `deepcopy`, which then runs the original's weights, could not be
    pickled, and would be a cycle with the module. So this is a class at module level with a weak reference; copying and
    pickling go through the module, which both memoize before they come here.

    NOTE [ To others a method ]
    Others take a module's forward apart, put something of their own around it, and put it together again. So it shows
    what the forward shows that it stands for: all attributes, and, if it is a method, a `__func__` that is a region
    with whatever module it is bound to. What unwraps by `__wrapped__` takes off what others have put on, above or below
    it, and never the region: that is ours to take off, by `unwrap`.

    Attributes:
        name: The module's name in the model, "" for the model itself.
        settings: How its calls are recomputed if no scope decides, or where to what they save goes; None if they are
            plain calls then.
        scope: The scope that a call of this module opens, if it is the root of a plan.
        own: The attribute that the instance had before.
        owner: What put it there, for whoever takes it off again: copies of the module have the same, or an equal one.
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
        self._module = ref(module)  # See NOTE [ No closure ]
        self.name = name
        self.settings = settings
        self.scope = scope
        self.own = own
        self.owner = owner
        function = self.function
        self.__doc__ = function.__doc__
        vars(self)["__module__"] = getattr(function, "__module__", None)

    def __call__(self, *args: object, **kwargs: object) -> object:
        """Run the forward, as a region if grad mode is on and it is not exported."""
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
        """The forward that was there before: the class's, or an attribute that the instance had."""
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
        if inner is _of_class(module):
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

    def bound_to(self, module: nn.Module, memo: dict[int, object] | None = None) -> WrappedForward:
        """Return the same for another module, a copy: it shares nothing that is the first one's."""
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
        if copied is module:  # it is copied without its module, as functions are; or before it, and is asked again then
            return self
        return self.bound_to(cast("nn.Module", copied), memo)

    def __repr__(self) -> str:
        kind = "offloaded" if isinstance(self.settings, Offload) else "as a region"
        return f"<forward of `{self.name}` {kind} by torchremat>"


class _MissingError(UnsupportedError, AttributeError):
    """What a wrapped forward deliberately lacks; an AttributeError to whoever asks whether it is there."""


# What TorchScript compiles a function with. It would compile it without the region.
_SCRIPTED = "__globals__"


def _cannot_be_scripted(name: str) -> _MissingError:
    words = f"`{name}`" if name else "the model"
    return _MissingError(
        f"{words} is wrapped by torchremat, and torch.jit.script would compile its forward without the region. Call "
        "`torchremat.unwrap(model)` first. To recompute scripted code, wrap a module that calls it and is not scripted "
        "itself, or call it by `torchremat.checkpoint`."
    )


# Not what the forward shows that it stands for, but this here: without them it is not made yet, or no method.
_OWN = frozenset({"_module", "name", "settings", "scope", "own", "owner", "__func__"})


class UnboundForward:
    """The function of a wrapped module's forward: it takes the module first. See NOTE [ To others a method ].

    Deliberately without `__wrapped__`: what unwraps has to stop here.
    """

    def __init__(self, forward: WrappedForward) -> None:
        function = forward.function
        # `functools.wraps` puts these among the attributes of what others put around it, so nobody else may have them.
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
            WrapError: It is a copy of the wrapped module, which guards objects of its own.
        """
        forward = self.forward
        if forward._module() is module:
            return forward
        if isinstance(forward.settings, Settings) and forward.settings.guard:
            raise WrapError(
                f"`{forward.name or type(module).__name__}` was wrapped with `guard=`, its forward was bound anew by "
                "another library, and then copied: the copy would guard the objects of the original. Copy it first "
                "and wrap the copy, or `torchremat.unwrap` the copy."
            )
        return forward.bound_to(module)

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self._torchremat_function)

    def __getattr__(self, name: str) -> object:
        if name == "__name__":
            # A method is pickled by its function's name, and would come back as the class's forward: no region.
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
        return self  # as functions are: it takes the weights of the module that it is given

    def __repr__(self) -> str:
        return f"{self.forward!r}, unbound"


@outside_graphs
def _run(forward: WrappedForward, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
    function = forward.function
    if not makes_regions():
        return function(*args, **kwargs)
    if isinstance(forward.settings, Offload):
        with forward.settings:
            return function(*args, **kwargs)
    if forward.scope is not None:
        forward.scope.begun(forward.module)
        return forward.scope.run(function, *args, **kwargs)
    choice = open_choice(forward.name)
    if choice is not None:
        return run_choice(choice, function, forward.module, args, kwargs)
    if forward.settings is None:
        return function(*args, **kwargs)
    body = continued(function)
    return new_region(forward.settings, forward.name).call(body, args, kwargs, [forward.module])


@outside_graphs
def _refuse_plan(forward: WrappedForward) -> None:
    if forward.scope is not None or is_in_scope():
        name = f"`{forward.name}`" if forward.name else "the model"
        raise UnsupportedError(
            f"{name} runs by a plan, which cannot be followed inside a compiled function: its regions are runs of "
            "several calls. Plan a model of compiled blocks instead: replace its blocks by `torch.compile(block)`, "
            "then plan; or `wrap` the blocks and compile the model."
        )


def refuse_data_parallel(*_: object) -> object:
    """Raise: DataParallel copies a module's attributes, so its replicas would run the original's weights."""
    raise UnsupportedError(
        "torch.nn.DataParallel cannot replicate a model that torchremat has wrapped; use DistributedDataParallel, or "
        "unwrap it first."
    )


def class_forward(module: nn.Module) -> Callable[..., object]:
    """Return the forward that the class of a module has, as the module would find it.

    The way of Python: what has a `__get__` binds, be it a function, a static or class method or something else, and
    every other object is called as it is.
    """
    found = _of_class(module)
    if isinstance(found, staticmethod | classmethod):
        return type(module).forward  # the same, and dynamo can trace it
    if isinstance(found, FunctionType) and not TRACES_GET and torch.compiler.is_dynamo_compiling():
        return partial(found, module)
    bind = getattr(type(found), "__get__", None)
    return cast("Callable[..., object]", found if bind is None else bind(found, module, type(module)))


def _of_class(module: nn.Module) -> object:
    for kind in type(module).__mro__:
        if _FORWARD in kind.__dict__:
            return kind.__dict__[_FORWARD]
    raise bug(f"{type(module).__name__} has no forward, which every module has")


def wrapped_forward(module: nn.Module) -> tuple[str, WrappedForward] | None:
    """Return what `set_forward` has put on a module, and the attribute that it is; None if it has not."""
    for attribute in (_COMPILED, _FORWARD):
        found = module.__dict__.get(attribute)
        if isinstance(found, WrappedForward):
            return attribute, found
        # Bound anew, as accelerate leaves it when it has taken off its own.
        if type(found) is MethodType and isinstance(found.__func__, UnboundForward) and found.__self__ is module:
            return attribute, found.__func__.bound_to(module)
    return None


def forward_under(module: nn.Module) -> WrappedForward | None:
    """Return what `set_forward` has put on a module, or the same under what another library has put around it since."""
    on_top = wrapped_forward(module)
    if on_top is not None:
        return on_top[1]
    found: object = module.__dict__.get(_FORWARD)
    seen: set[int] = set()
    while found is not None and id(found) not in seen:
        if isinstance(found, UnboundForward):
            return found.forward
        if isinstance(found, WrappedForward):
            return found
        seen.add(id(found))
        found = getattr(found, "__wrapped__", None)
    return None


def is_wrapped(module: nn.Module) -> bool:
    """Return whether the module's own forward is a region, though others may have put something around it since."""
    return forward_under(module) is not None


def called_attribute(module: nn.Module) -> str:
    """Return the attribute that a call of a module runs: `forward`, or what `module.compile()` has made."""
    return _FORWARD if module.__dict__.get(_COMPILED) is None else _COMPILED


def is_generator(module: nn.Module) -> bool:
    """Return whether a call of the module only makes a generator, whose code runs later."""
    forward = module.__dict__.get(_FORWARD)
    if forward is None:
        forward = _of_class(module)
        forward = getattr(forward, "__func__", forward)  # of a static or class method
    called = vars(type(forward)).get("__call__")  # of an object
    return inspect.isgeneratorfunction(forward) or inspect.isgeneratorfunction(called)


def set_forward(
    module: nn.Module,
    name: str,
    settings: Settings | Offload | None,
    scope: Scope | None = None,
    attribute: str = _FORWARD,
    owner: object = None,
) -> None:
    """Make the calls of one module regions or offloaded, as `settings` or the scope that is open says."""
    _check(module, name)
    own = cast("Callable[..., object] | None", module.__dict__.get(attribute))
    # Not by `setattr`, which classes may have changed: what is to be there is an attribute of the instance.
    module.__dict__[attribute] = WrappedForward(module, name, settings, scope, own, owner)
    module.__dict__[_REPLICATE] = refuse_data_parallel


def _check(module: nn.Module, name: str) -> None:
    if is_wrapped(module):
        raise WrapError(_is_wrapped_already(name, module))
    words = f"`{name or type(module).__name__}`"
    if isinstance(module, torch.jit.ScriptModule):
        raise WrapError(
            f"{words} is a ScriptModule, whose forward cannot be replaced. Wrap the module that calls it, or call it "
            "by `torchremat.checkpoint`."
        )
    if is_generator(module):
        raise WrapError(
            f"{words}: its forward is a generator, whose code runs when the call has returned already. Wrap the module "
            "that runs it, for one in @skippable the skippable module."
        )
    if not is_replaceable(module):
        raise WrapError(
            f"{words}: its forward is a {type(_of_class(module)).__name__} of the class {type(module).__name__}, which "
            "an attribute of the instance cannot replace. Wrap the module that calls it, call it by "
            "`torchremat.checkpoint`, or make the forward a method that calls what the property returns."
        )
    if _of_class(module) is _UNIMPLEMENTED and _FORWARD not in module.__dict__ and _calls_otherwise(module):
        raise WrapError(
            f"{words}: the class {type(module).__name__} has a `__call__` and no forward, so nothing of it would be a "
            "region. Rename its `__call__` to `forward`."
        )


def can_be_wrapped(module: nn.Module) -> bool:
    """Return whether a module has a forward of its own that `set_forward` can replace."""
    if _of_class(module) is _UNIMPLEMENTED and _FORWARD not in module.__dict__:
        return False
    try:
        _check(module, "")
    except WrapError:
        return False
    return True


def is_replaceable(module: nn.Module) -> bool:
    """Return whether an attribute of a module is its forward; a property of its class is found before that."""
    kind = type(_of_class(module))
    is_data = hasattr(kind, "__set__") or hasattr(kind, "__delete__")
    if not is_data and _FORWARD not in module.__dict__:
        # What keeps its value in the instance, as a cached property does, would find ours there and call it.
        class_forward(module)
    return not is_data


_UNIMPLEMENTED = nn.Module.forward


def _calls_otherwise(module: nn.Module) -> bool:
    return type(module).__call__ is not nn.Module.__call__


def restore_forward(module: nn.Module) -> None:
    """Give one module back the forward that it had."""
    found = wrapped_forward(module)
    assert found is not None
    attribute, wrapped = found
    del module.__dict__[attribute]
    module.__dict__.pop(_REPLICATE, None)
    if wrapped.own is not None:
        module.__dict__[attribute] = wrapped.own


def wrap(
    model: M,
    modules: Pattern,
    *,
    every: int = 1,
    store: Store | None = None,
    check: Check = "metadata",
    check_every: int = 1,
    preserve_rng: bool = True,
    early_stop: bool = True,
    guard: Sequence[object] = (),
    debug: bool = False,
    policy: Policy | None = None,
) -> M:
    """Make calls of some modules of a model regions, or with `store` offloaded, and return the model.

    Args:
        model: The model; only attributes of the instances named below change, see `unwrap`.
        modules: A glob over names as `named_modules()` has them (`"layers.*"` means the children of `layers`, not
            theirs: a `*` does not match a dot), a type, or a predicate of name and module.
        every: Wrap the first of each `every` matches, in the order of `named_modules()`.
        store: Where what autograd saves in these calls goes, instead of being recomputed; see `offload`. They share a
            catalog: what several of them save is stored once. A compiled function is broken by such a call.
        check: See `checkpointed`.
        check_every: See `checkpointed`; every module counts its own calls.
        preserve_rng: See `checkpointed`.
        early_stop: See `checkpointed`.
        guard: See `checkpointed`.
        debug: See `checkpointed`.
        policy: See `checkpointed`.

    Raises:
        WrapError: Nothing matches (the message has the closest names), a match is wrapped already, or an option of
            recomputing is given together with a store.
    """
    settings = Settings(
        check=check,
        check_every=check_every,
        preserve_rng=preserve_rng,
        early_stop=early_stop,
        guard=guard,
        debug=debug,
        policy=policy,
    )
    if not isinstance(every, int) or isinstance(every, bool) or every < 1:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise WrapError(f"every={every!r}: an int of at least 1 is needed.")
    found = matching(model, modules)[::every]
    for name, module in found:
        _check(module, name)
    offloads = None if store is None else offload(store)
    if offloads is not None and settings != Settings():
        raise WrapError(
            "store=: what goes to a store is not recomputed, so `check`, `check_every`, `preserve_rng`, `early_stop`, "
            "`guard`, `debug` and `policy` mean nothing; leave them out."
        )
    for name, module in found:
        set_forward(module, name, offloads or replace(settings))  # each takes turns of its own
    return model


def unwrap(model: M) -> M:
    """Give every module of a model back the forward that it had, and return the model.

    Raises:
        WrapError: Another library has put something around the forward of one since; nothing has changed.
    """
    check_uncovered(model)
    for module in model.modules():
        if is_wrapped(module):
            restore_forward(module)
    return model


def check_uncovered(model: nn.Module) -> None:
    """Raise a WrapError if others have put something around forwards that `set_forward` has put on a model."""
    covered = [
        f"`{name}`" if name else "the model"
        for name, module in model.named_modules()
        if wrapped_forward(module) is None and forward_under(module) is not None
    ]
    if covered:
        raise WrapError(
            f"since it was wrapped, another library has put something around the forward of {', '.join(covered[:3])}"
            f"{', ...' if len(covered) > 3 else ''}, which would go on calling the region. Take that off first; for "
            "accelerate by `accelerator.unwrap_model(model, keep_fp32_wrapper=False)`."
        )


def matching(model: nn.Module, pattern: Pattern) -> list[tuple[str, nn.Module]]:
    """Return the modules that a pattern matches, with their names, in the order of `named_modules()`.

    Raises:
        WrapError: None does.
    """
    if not isinstance(model, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]: users are not type-checked
        raise WrapError(f"model: a torch.nn.Module is needed, got {type(model).__name__}.")
    named = list(model.named_modules())
    if isinstance(pattern, str):
        matches = [(name, module) for name, module in named if _glob(name, pattern)]
    elif isinstance(pattern, type):
        if not issubclass(pattern, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise WrapError(f"modules={pattern.__name__}: a type of module is needed.")
        matches = [(name, module) for name, module in named if isinstance(module, pattern)]
    elif callable(pattern):  # pyright: ignore[reportUnnecessaryComparison]
        matches = [(name, module) for name, module in named if pattern(name, module)]
    else:
        raise WrapError(f"modules={pattern!r}: a glob over names, a type, or a predicate of name and module is needed.")
    if not matches:
        raise WrapError(_no_match(pattern, named))
    return matches


def _is_wrapped_already(name: str, module: nn.Module) -> str:
    return f"`{name or type(module).__name__}` is wrapped already; unwrap it or remove its plan first."


def _glob(name: str, pattern: str) -> bool:
    if not name:
        return not pattern  # the model itself, which `fnmatch` finds under "*" as well
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(map(fnmatch.fnmatchcase, parts, wanted))


def _no_match(pattern: Pattern, named: Iterable[tuple[str, nn.Module]]) -> str:
    if isinstance(pattern, str):
        names = [name for name, _ in named]
        close = difflib.get_close_matches(pattern, names, n=3, cutoff=0.3)
        found = close or names[1:4] or ["none, the model has no children"]
        return f"no module is named {pattern!r}. Closest names: {', '.join(found)}."
    kinds = sorted({type(module).__name__ for _, module in named})
    if isinstance(pattern, type):
        close = difflib.get_close_matches(pattern.__name__, kinds, n=3, cutoff=0.3)
        return f"no module is a {pattern.__name__}. Closest types: {', '.join(close) or ', '.join(kinds[:3])}."
    name = getattr(pattern, "__name__", pattern)
    return f"the predicate {name!r} matched none of the model's modules, of types {', '.join(kinds)}."
