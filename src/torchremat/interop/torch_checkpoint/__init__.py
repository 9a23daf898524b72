"""A drop-in for `torch.utils.checkpoint`: its public names, over torchremat's regions.

    - from torch.utils.checkpoint import checkpoint
    + from torchremat.interop.torch_checkpoint import checkpoint

Signatures, warnings and messages are torch's; errors are torch's `CheckpointError` or one of its subclasses. Every
object that does not affect how a region runs is torch's own, so that `is` and `isinstance` agree on both sides and the
context managers switch both. PyTorch 1.0's form works as well: the module-wide switch `preserve_rng_state`, and
`checkpoint_sequential` with several inputs.

Intended differences: docs/migration.md.

contexts.py   the context managers: `context_fn`, `checkpoint` as a decorator, `GraphExecGroup`
selective.py  a policy in the form of two context managers
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any, cast

import torch
from torch import nn
from torch.utils import checkpoint as torch_checkpoint
from torch.utils.checkpoint import (
    SAC_IGNORED_OPS,
    CheckpointError,
    CheckpointPolicy,
    DefaultDeviceType,
    SelectiveCheckpointContext,
    check_backward_validity,
    detach_variable,
    get_device_states,
    noop_context_fn,
    set_checkpoint_debug_enabled,
    set_checkpoint_early_stop,
    set_device_states,
)

from torchremat._compat.checkpoints import switched
from torchremat._compat.dynamo import outside_graphs
from torchremat._compat.modes import is_recording
from torchremat._compat.transforms import innermost_transform
from torchremat.errors import UnsupportedError, warn
from torchremat.interop.torch_checkpoint.contexts import ContextFn, Contexts, Decorated, GraphExecGroup, run_in_contexts
from torchremat.interop.torch_checkpoint.selective import create_selective_checkpoint_contexts
from torchremat.regions.reentrant import CheckpointFunction
from torchremat.regions.runs import continued
from torchremat.regions.settings import Check, Settings
from torchremat.regions.threads import makes_regions
from torchremat.regions.transforms import new_region

# In torch's order.
__all__ = [
    "checkpoint",
    "checkpoint_sequential",
    "CheckpointError",
    "CheckpointFunction",
    "check_backward_validity",
    "detach_variable",
    "get_device_states",
    "set_device_states",
    "noop_context_fn",
    "set_checkpoint_early_stop",
    "DefaultDeviceType",
    "set_checkpoint_debug_enabled",
    "CheckpointPolicy",
    "SelectiveCheckpointContext",
    "create_selective_checkpoint_contexts",
    "SAC_IGNORED_OPS",
    "GraphExecGroup",
]

# PyTorch 1.0's switch for the whole module: the default of `preserve_rng_state=` in `checkpoint`.
preserve_rng_state = True

_CHECKS: dict[str, Check] = {"default": "metadata", "none": "none"}
_torch_checkpoint = torch_checkpoint.checkpoint
_UNUSED = inspect.Parameter.empty


def checkpoint(
    function: Callable[..., Any] | None = None,
    *args: Any,
    use_reentrant: bool | None = None,
    preserve_rng_state: bool | None = None,
    context_fn: ContextFn = noop_context_fn,
    determinism_check: str = "default",
    debug: bool = False,
    early_stop: bool = True,
    respect_saved_tensors_hooks: bool | None = None,
    **kwargs: Any,
) -> Any:
    """Return `function(*args, **kwargs)`, recomputed in backward: `torch.utils.checkpoint.checkpoint`.

    It takes the arguments of torch 2.14, under older versions as well.

    Args:
        function: Any callable. Without it a decorator is returned.
        args: Its positional arguments.
        use_reentrant: True for a reentrant region, see `torchremat.regions.reentrant`; False for a region of
            `torchremat.checkpoint`. If not given, a warning and True.
        preserve_rng_state: Whether a recompute draws the random numbers of its forward. None for PyTorch 1.0's switch
            of the module, which is on.
        context_fn: Returns two context managers, for the forward and for each recompute.
        determinism_check: `"default"` or `"none"`: `check="metadata"` or `check="none"` of `checkpointed`.
        debug: Whether messages about a difference have the logs of both runs.
        early_stop: Whether a recompute ends at the last tensor that is needed.
        respect_saved_tensors_hooks: Whether outputs kept by a policy go through the saved-tensor hooks around the
            region, for example `save_on_cpu`. None for no, and a `FutureWarning` if any are active.
        kwargs: Keyword arguments of `function`.

    Raises:
        ValueError: An option has an invalid value, or `use_reentrant=True` is combined with an option that it does not
            support.
        UnsupportedError: `respect_saved_tensors_hooks=True`, and the policy is one of torch's own contexts.
    """
    if torch.compiler.is_compiling() or (function is None and not args):
        options: dict[str, Any] = {
            "use_reentrant": use_reentrant,
            "preserve_rng_state": preserve_rng_state,
            "context_fn": context_fn,
            "determinism_check": determinism_check,
            "debug": debug,
            "early_stop": early_stop,
            "respect_saved_tensors_hooks": respect_saved_tensors_hooks,
        }
        if function is None and not args:
            if kwargs:
                raise ValueError("Unexpected keyword arguments: " + ",".join(kwargs))
            return partial(Decorated, checkpoint, options)
        return _in_graph()(function, *args, **_for_torch(**options), **kwargs)
    if use_reentrant is None:
        _warn_of_default("checkpoint", _WILL_RAISE)
        use_reentrant = True
    if not callable(function):
        raise TypeError(f"function: expected a callable, got {type(function).__name__}.")
    preserve = _preserves_by_default() if preserve_rng_state is None else preserve_rng_state
    if use_reentrant:
        is_plain = context_fn is noop_context_fn and debug is False and respect_saved_tensors_hooks is None
        return _run_reentrant(function, preserve, args, kwargs, is_plain=is_plain)
    if context_fn is not noop_context_fn and is_recording():
        # The contexts mark the recorded operators, for torch's own partitioner.
        given = _for_torch(
            use_reentrant=False,
            preserve_rng_state=preserve,
            context_fn=context_fn,
            determinism_check=determinism_check,
            debug=debug,
            early_stop=early_stop,
            respect_saved_tensors_hooks=respect_saved_tensors_hooks,
        )
        return _torch_checkpoint(function, *args, **given, **kwargs)
    stops, debugs = switched(early_stop=bool(early_stop), debug=bool(debug))
    settings = _settings(determinism_check, bool(preserve), stops, debugs)
    return _run(function, settings, context_fn, respect_saved_tensors_hooks, args, kwargs)


_WILL_RAISE = "Starting in PyTorch 2.9, calling checkpoint without use_reentrant will raise an exception."


@lru_cache
def _settings(determinism_check: str, preserve: bool, early_stop: bool, debug: bool) -> Settings:
    if determinism_check not in _CHECKS:
        raise ValueError(f"determinism_check should be one of {list(_CHECKS)}, but got {determinism_check}")
    return Settings(check=_CHECKS[determinism_check], preserve_rng=preserve, early_stop=early_stop, debug=debug)


def _preserves_by_default() -> bool:
    # Programs of PyTorch 1.0 set the switch on the module that they know, which may be torch's: see `install`.
    return preserve_rng_state and bool(vars(torch_checkpoint).get("preserve_rng_state", True))


def _for_torch(
    *,
    context_fn: ContextFn,
    preserve_rng_state: bool | None,
    respect_saved_tensors_hooks: bool | None,
    **options: object,
) -> dict[str, Any]:
    """Return the options for torch's own function, which takes the last one since torch 2.14.

    Raises:
        UnsupportedError: `respect_saved_tensors_hooks` is True, and this torch does not know it.
    """
    if context_fn is not noop_context_fn:
        options["context_fn"] = context_fn
    if preserve_rng_state is not None:
        options["preserve_rng_state"] = preserve_rng_state
    if respect_saved_tensors_hooks and not _TORCH_RESPECTS:
        raise UnsupportedError(
            "respect_saved_tensors_hooks=True: a region in a compiled function, or one that is recorded under a "
            "`context_fn`, is torch's own operator, which knows this option since torch 2.14. Leave it out there."
        )
    if respect_saved_tensors_hooks is not None and _TORCH_RESPECTS:
        options["respect_saved_tensors_hooks"] = respect_saved_tensors_hooks
    return options


_TORCH_RESPECTS = "respect_saved_tensors_hooks" in inspect.signature(_torch_checkpoint).parameters


def _in_graph() -> Callable[..., Any]:
    """Return the function that dynamo takes for torch's own operator, or torch's function if no bytecode is traced."""
    return torch_checkpoint.checkpoint if torch.compiler.is_dynamo_compiling() else _torch_checkpoint


@outside_graphs
def _run_reentrant(
    function: Callable[..., Any],
    preserve: bool,
    args: tuple[object, ...],
    kwargs: Mapping[str, object],
    *,
    is_plain: bool,
) -> object:
    if kwargs:
        raise ValueError("Unexpected keyword arguments: " + ",".join(kwargs))
    if not is_plain:
        raise ValueError(
            "Passing `context_fn`, `debug`, or `respect_saved_tensors_hooks` is only supported when "
            "use_reentrant=False."
        )
    if innermost_transform() is not None:
        raise UnsupportedError(
            "a reentrant region (use_reentrant=True) runs its own backward, which transforms of torch.func do "
            "not see. Pass use_reentrant=False."
        )
    return CheckpointFunction.apply(function, preserve, *args)


@outside_graphs
def _run(
    function: Callable[..., object],
    settings: Settings,
    context_fn: ContextFn,
    respects_hooks: bool | None,
    args: tuple[object, ...],
    kwargs: dict[str, object],
) -> object:
    contexts = None if context_fn is noop_context_fn else Contexts(context_fn)
    if contexts is not None:
        policy = contexts.policy_within_hooks(respects_hooks)
        if policy is not None:
            settings, contexts = replace(settings, policy=policy), None
    if settings.debug and contexts is not None:
        raise ValueError("debug=True is incompatible with non-default context_fn")
    if not makes_regions():
        return function(*args, **kwargs)
    while type(function) is partial and not _has_placeholders(held := cast("partial[object]", function)):
        # The arguments that a partial holds reach the function like arguments of the call: their tensors are inputs.
        args, kwargs, function = (*held.args, *args), {**held.keywords, **kwargs}, held.func
    body = function if contexts is None else partial(run_in_contexts, function, contexts)
    return new_region(settings).call(continued(body), args, kwargs, (function,))


def _has_placeholders(function: partial[object]) -> bool:
    placeholder = getattr(functools, "Placeholder", _UNUSED)  # of Python 3.14
    return any(one is placeholder for one in function.args)


def checkpoint_sequential(
    functions: nn.Sequential | Sequence[Callable[..., Any]],
    segments: int,
    *inputs: Any,
    use_reentrant: bool | None = None,
    **kwargs: Any,
) -> Any:
    """Return the result of `functions`, called in sequence on `inputs`; all but the last segment are recomputed.

    `torch.utils.checkpoint.checkpoint_sequential`, and the PyTorch 1.0 version for several inputs. Segments are as even
    as possible. A tuple that one function returns goes to the next one as it is, like in `nn.Sequential`, if the next
    one takes a single argument; else, or if several inputs were given, as its arguments.

    Args:
        functions: An `nn.Sequential`, or a sequence of modules and functions.
        segments: The number of segments, from 1 to the number of functions.
        inputs: The arguments of the first function; a single one may be given as `input=`.
        use_reentrant: See `checkpoint`. May be the argument after a single input.
        kwargs: `preserve_rng_state`.

    Raises:
        ValueError: `segments` is out of range, or other keyword arguments are given.
    """
    if "input" in kwargs:
        if inputs:
            raise TypeError("checkpoint_sequential() got multiple values for argument 'input'")
        inputs = (kwargs.pop("input"),)
    elif len(inputs) == 2 and use_reentrant is None and (inputs[1] is None or isinstance(inputs[1], bool)):
        inputs, use_reentrant = inputs[:1], inputs[1]
    if not inputs:
        raise TypeError("checkpoint_sequential() missing 1 required positional argument: 'input'")
    if use_reentrant is None:
        _warn_of_default(
            "checkpoint.checkpoint_sequential",
            "In version 2.9 we will raise an exception if use_reentrant is not passed.",
        )
        use_reentrant = True
    preserve = kwargs.pop("preserve_rng_state", _preserves_by_default())
    if kwargs:
        raise ValueError("Unexpected keyword arguments: " + ",".join(kwargs))
    functions = list(functions.children()) if isinstance(functions, nn.Sequential) else list(functions)
    if not 1 <= segments <= max(1, len(functions)):
        raise ValueError(
            f"segments={segments}, but there are {len(functions)} functions: expected 1 to {len(functions)}."
        )
    spread = len(inputs) > 1
    values: Any = inputs if spread else next(iter(inputs))
    size, larger = divmod(len(functions), segments)
    start = 0
    for segment in range(segments):
        end = start + size + (segment < larger)
        # Functions one by one and tuple values one by one: modules and tensors are searched for among a call's
        # arguments.
        is_tuple = isinstance(values, tuple)
        run = partial(_run_segment, is_tuple, spread, end - start, *functions[start:end])
        arguments = cast("tuple[object, ...]", values) if is_tuple else (values,)
        if segment + 1 < segments:
            values = checkpoint(run, *arguments, use_reentrant=use_reentrant, preserve_rng_state=preserve)
        else:
            values = run(*arguments)
        start = end
    return values


def _run_segment(is_tuple: bool, spread: bool, count: int, *functions_and_inputs: Any) -> Any:
    functions, inputs = functions_and_inputs[:count], functions_and_inputs[count:]
    values: Any = inputs if is_tuple else inputs[0]
    for function in functions:
        if isinstance(values, tuple) and _is_taken_apart(function, len(values), spread):
            values = function(*values)
        else:
            values = function(values)
    return values


def _is_taken_apart(function: Callable[..., Any], count: int, spread: bool) -> bool:
    if spread:
        return _takes(function, count) or not _takes(function, 1)
    return not _takes(function, 1) and _takes(function, count)


def _takes(function: Callable[..., Any], count: int) -> bool:
    try:
        signature = inspect.signature(function.forward if isinstance(function, nn.Module) else function)
    except ValueError:  # a built-in one
        return True
    try:
        signature.bind(*range(count))
    except TypeError:
        return False
    return True


def _warn_of_default(name: str, what_happens: str) -> None:
    warn(
        f"torch.utils.{name}: the use_reentrant parameter should be passed explicitly. {what_happens} "
        "use_reentrant=False is recommended, but if you need to preserve the current default behavior, you can pass "
        "use_reentrant=True. Refer to docs for more details on the differences between the two variants."
    )
