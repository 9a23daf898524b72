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
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, TypeVar, cast
from weakref import ref

import torch
from torch import nn

from torchremat._compat.graphs import TRACES_GET, is_exporting, outside_graphs
from torchremat.errors import UnsupportedError, WrapError
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
        module = self.module
        if not TRACES_GET and torch.compiler.is_dynamo_compiling():
            return partial(type(module).forward, module)
        return cast("Callable[..., object]", type(module).forward.__get__(module))

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.function)

    @property
    def __wrapped__(self) -> Callable[..., object]:
        return self.function

    @property
    def __code__(self) -> CodeType:  # torch.export reads the name and the line of a forward from it
        return cast("FunctionType", self.function).__code__

    def __reduce__(self) -> tuple[object, ...]:
        return (WrappedForward, (self.module, self.name, self.settings, self.scope, self.own, self.owner))

    def __deepcopy__(self, memo: dict[int, object]) -> WrappedForward:
        module = self.module
        copied = memo.get(id(module), module)
        own = self.own
        if own is not None and getattr(own, "__self__", None) is module:
            own = own.__func__.__get__(copied)  # pyright: ignore[reportFunctionMemberAccess]
        settings = self.settings
        if isinstance(settings, Settings) and settings.guard:
            settings = replace(settings, guard=deepcopy(settings.guard, memo))
        return WrappedForward(cast("nn.Module", copied), self.name, settings, self.scope, own, self.owner)

    def __repr__(self) -> str:
        kind = "offloaded" if isinstance(self.settings, Offload) else "as a region"
        return f"<forward of `{self.name}` {kind} by torchremat>"


@outside_graphs
def _run(forward: WrappedForward, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
    function = forward.function
    if not makes_regions():
        return function(*args, **kwargs)
    if isinstance(forward.settings, Offload):
        with forward.settings:
            return function(*args, **kwargs)
    if forward.scope is not None:
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


def wrapped_forward(module: nn.Module) -> tuple[str, WrappedForward] | None:
    """Return what `set_forward` has put on a module, and the attribute that it is; None if it has not."""
    for attribute in (_COMPILED, _FORWARD):
        found = module.__dict__.get(attribute)
        if isinstance(found, WrappedForward):
            return attribute, found
    return None


def is_wrapped(module: nn.Module) -> bool:
    """Return whether the module's own forward is a region."""
    return wrapped_forward(module) is not None


def called_attribute(module: nn.Module) -> str:
    """Return the attribute that a call of a module runs: `forward`, or what `module.compile()` has made."""
    return _FORWARD if module.__dict__.get(_COMPILED) is None else _COMPILED


def is_generator(module: nn.Module) -> bool:
    """Return whether a call of the module only makes a generator, whose code runs later."""
    return inspect.isgeneratorfunction(module.__dict__.get(_FORWARD, type(module).forward))


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
    setattr(module, attribute, WrappedForward(module, name, settings, scope, own, owner))
    object.__setattr__(module, _REPLICATE, refuse_data_parallel)


def _check(module: nn.Module, name: str) -> None:
    if is_wrapped(module):
        raise WrapError(_is_wrapped_already(name, module))
    if isinstance(module, torch.jit.ScriptModule):
        raise WrapError(
            f"`{name or type(module).__name__}` is a ScriptModule, whose forward cannot be replaced; wrap it before "
            "scripting."
        )
    if is_generator(module):
        raise WrapError(
            f"`{name or type(module).__name__}`: its forward is a generator, whose code runs when the call has "
            "returned already. Wrap the module that runs it, for one in @skippable the skippable module."
        )


def restore_forward(module: nn.Module) -> None:
    """Give one module back the forward that it had."""
    found = wrapped_forward(module)
    assert found is not None
    attribute, wrapped = found
    del module.__dict__[attribute]
    module.__dict__.pop(_REPLICATE, None)
    if wrapped.own is not None:
        setattr(module, attribute, wrapped.own)


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
    """Give every module of a model back the forward that it had, and return the model."""
    for module in model.modules():
        if is_wrapped(module):
            restore_forward(module)
    return model


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
