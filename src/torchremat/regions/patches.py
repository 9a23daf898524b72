"""The attributes that wrapping puts on a module, and takes off again.

A wrapped module has an instance attribute `forward`, a `WrappedForward`, and nothing else about it changes: its class,
its parameters' names, its hooks and its `state_dict` stay the same, and hooks run outside of the region, once.

    attribute of the module               value                       removed by
    `forward`                             WrappedForward              `unwrap`
    `_compiled_call_impl`                 the same, around a module   `unwrap`
                                          that is compiled in place
    `compile`                             `WrappedForward.compile`,   `unwrap`
                                          where a plan decides
    `_replicate_for_data_parallel`        refuse_data_parallel        `unwrap`

The callable made by `module.compile()` runs in place of the call, and `forward` inside of it. A plan cannot be followed
inside it and goes around it, also if it was there before; `wrap` goes inside, where the compiler makes the region.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import MethodType
from typing import cast

import torch
from torch import nn

from torchremat.errors import UnsupportedError, WrapError, first_of
from torchremat.regions.forwards import (
    COMPILE,
    COMPILED,
    FORWARD,
    UnboundForward,
    WrappedForward,
    class_forward,
    forward_of_class,
)
from torchremat.regions.runs import Scope
from torchremat.regions.settings import Settings
from torchremat.stores.offloading import Offload

_REPLICATE = "_replicate_for_data_parallel"


def refuse_data_parallel(*_: object) -> object:
    """Raise: DataParallel copies a module's attributes, so its replicas would run the original's weights."""
    raise UnsupportedError(
        "torch.nn.DataParallel cannot replicate a model that torchremat has wrapped; use DistributedDataParallel, or "
        "unwrap it first."
    )


def wrapped_forward(module: nn.Module) -> tuple[str, WrappedForward] | None:
    """Return the name and value of the attribute that `set_forward` has put on a module; None without one."""
    for attribute in (COMPILED, FORWARD):
        found = module.__dict__.get(attribute)
        if isinstance(found, WrappedForward):
            return attribute, found
        # Rebound, as accelerate leaves it after removing its own wrapper.
        if type(found) is MethodType and isinstance(found.__func__, UnboundForward) and found.__self__ is module:
            return attribute, found.__func__.bound_to(module)
    return None


def forward_under(module: nn.Module) -> WrappedForward | None:
    """Return the wrapper that `set_forward` has put on a module, also if another library has wrapped it since."""
    on_top = wrapped_forward(module)
    if on_top is not None:
        return on_top[1]
    found: object = module.__dict__.get(FORWARD)
    seen: set[int] = set()
    while found is not None and id(found) not in seen:
        if isinstance(found, UnboundForward):
            return found.forward
        if isinstance(found, WrappedForward):
            return found
        seen.add(id(found))
        found = getattr(found, "__wrapped__", None)
    return None


def scopes_on(model: nn.Module) -> list[Scope]:
    """Return the scopes of plans that `set_forward` has put on the modules of a model."""
    forwards = [forward_under(module) for module in model.modules()]
    return [one.scope for one in forwards if one is not None and one.scope is not None]


def count_elsewhere(model: nn.Module) -> None:
    """Tell the scopes on a model that their owner counts other bytes in addition to this model's."""
    for scope in scopes_on(model):
        scope.counted_elsewhere()


def is_wrapped(module: nn.Module) -> bool:
    """Return whether the module's own forward is a region, even if another library has wrapped it since."""
    return forward_under(module) is not None


def called_attribute(module: nn.Module) -> str:
    """Return the attribute that a call of a module runs: `forward`, or the one that `module.compile()` has set."""
    return FORWARD if module.__dict__.get(COMPILED) is None else COMPILED


def is_generator(module: nn.Module) -> bool:
    """Return whether a call of the module only makes a generator, whose code runs later."""
    forward = module.__dict__.get(FORWARD)
    if forward is None:
        forward = forward_of_class(module)
        forward = getattr(forward, "__func__", forward)  # of a static or class method
    called = vars(type(forward)).get("__call__")  # of an object
    return inspect.isgeneratorfunction(forward) or inspect.isgeneratorfunction(called)


def set_forward(
    module: nn.Module,
    name: str,
    settings: Settings | Offload | None,
    scope: Scope | None = None,
    attribute: str = FORWARD,
    owner: object = None,
) -> None:
    """Make the calls of one module regions or offloaded, as `settings` or the open scope says."""
    check_replaceable(module, name)
    own = cast("Callable[..., object] | None", module.__dict__.get(attribute))
    # Not by `setattr`, which classes may override: the result must be an attribute of the instance.
    forward = module.__dict__[attribute] = WrappedForward(module, name, settings, scope, own, owner)
    if attribute == FORWARD and settings is None and scope is None and type(module).compile is nn.Module.compile:
        module.__dict__[COMPILE] = forward.compile
    module.__dict__[_REPLICATE] = refuse_data_parallel


def check_replaceable(module: nn.Module, name: str) -> None:
    """Raise a WrapError that says why the forward of a module cannot be replaced, if it cannot."""
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
        kind = type(forward_of_class(module)).__name__
        raise WrapError(
            f"{words}: its forward is a {kind} of the class {type(module).__name__}, which an attribute of the "
            "instance cannot replace. Wrap the module that calls it, call it by `torchremat.checkpoint`, or make the "
            "forward a method that calls what the property returns."
        )
    if forward_of_class(module) is _UNIMPLEMENTED and FORWARD not in module.__dict__ and _calls_otherwise(module):
        raise WrapError(
            f"{words}: the class {type(module).__name__} has a `__call__` and no forward, so nothing of it would be a "
            "region. Rename its `__call__` to `forward`."
        )


def can_be_wrapped(module: nn.Module) -> bool:
    """Return whether a module has its own forward that `set_forward` can replace."""
    if forward_of_class(module) is _UNIMPLEMENTED and FORWARD not in module.__dict__:
        return False
    try:
        check_replaceable(module, "")
    except WrapError:
        return False
    return True


def is_replaceable(module: nn.Module) -> bool:
    """Return whether an attribute of a module is its forward; a property of its class is found before that."""
    kind = type(forward_of_class(module))
    is_data = hasattr(kind, "__set__") or hasattr(kind, "__delete__")
    if not is_data and FORWARD not in module.__dict__:
        # A descriptor that keeps its value in the instance, like a cached property, would find ours there and call it.
        class_forward(module)
    return not is_data


_UNIMPLEMENTED = nn.Module.forward


def _calls_otherwise(module: nn.Module) -> bool:
    return type(module).__call__ is not nn.Module.__call__


class ForwardOwner:
    """What has put forwards on modules, if it has to know that one is taken off."""

    def leave(self, module: nn.Module) -> None:
        """Undo what belongs to the forward of a module; an error that it raises leaves the forward on."""


def restore_forward(module: nn.Module) -> None:
    """Restore the original forward of one module."""
    found = wrapped_forward(module)
    assert found is not None
    attribute, wrapped = found
    if isinstance(wrapped.owner, ForwardOwner):
        wrapped.owner.leave(module)
    del module.__dict__[attribute]
    module.__dict__.pop(_REPLICATE, None)
    module.__dict__.pop(COMPILE, None)
    if wrapped.own is not None:
        module.__dict__[attribute] = wrapped.own


def check_uncovered(model: nn.Module) -> None:
    """Raise a WrapError if another library has wrapped forwards that `set_forward` has put on a model."""
    covered = [
        f"`{name}`" if name else "the model"
        for name, module in model.named_modules()
        if wrapped_forward(module) is None and forward_under(module) is not None
    ]
    if covered:
        raise WrapError(
            "since it was wrapped, another library has put something around the forward of "
            f"{first_of(covered)}, which would go on calling the region. "
            "Remove that first; for accelerate by `accelerator.unwrap_model(model, keep_fp32_wrapper=False)`."
        )


def _is_wrapped_already(name: str, module: nn.Module) -> str:
    return f"`{name or type(module).__name__}` is wrapped already; unwrap it or remove its plan first."
