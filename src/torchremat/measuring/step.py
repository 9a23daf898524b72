"""The user's training step: its result, the objects that it holds, and steps that use these up.

A step is a callable that runs the forward and returns the loss; the caller runs `backward`. The objects that a step
holds (its model, its batch) are searched in plain sight only: closure cells, defaults, `functools.partial` arguments,
the attributes of the object that a bound method belongs to, and the globals that its own code names. Lists, tuples,
sets and dicts are opened, nested ones too, and objects that are data: a dataclass, a graph, not one that has modules,
optimizers or loaders. Functions among all these are searched in the same way, but for compiled ones; of those of
libraries, only the defaults and the cells.

To plan and to measure, a step is run several times. Lists and dicts that it takes from are restored each time, see
`untouched`; an iterator cannot be.
"""

from __future__ import annotations

import dis
import functools
import inspect
import io
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import chain
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.data import DataLoader, Dataset

from torchremat._compat.dynamo import is_compiled
from torchremat._compat.fabric import as_fabrics_backward
from torchremat.errors import StepError, UnsupportedError, first_of
from torchremat.measuring.optimizers import Optimizer, not_an_optimizer, parameters_of
from torchremat.regions.rehearsals import is_rehearsing
from torchremat.state.code import is_installed, is_library, nested
from torchremat.state.holders import Slots

_ALLOWED = (
    "A step returns its loss: a tensor with one element that requires grad, an object with such a `.loss`, "
    'or a dict with a "loss"'
)


def loss_of(result: object) -> Tensor:
    """Return the loss in a step's result: a scalar tensor, an object with a `.loss`, or a dict with a `"loss"`.

    Raises:
        StepError: The result has no tensor, or the tensor has more than one element, is complex, or does not require
            grad.
    """
    loss = found_loss(result)
    if not isinstance(loss, Tensor):
        raise StepError(f"the step returned {_described(result)}. {_ALLOWED}.")
    if loss.numel() != 1:
        raise StepError(
            f"the step returned a loss of shape {tuple(loss.shape)}, which backward cannot start from. "
            f"{_ALLOWED}; reduce it, for example with `.mean()`."
        )
    if loss.is_complex():
        raise StepError(
            f"the step returned a complex loss ({loss.dtype}), which backward cannot start from. {_ALLOWED}; "
            "take its real part or its absolute value."
        )
    if not loss.requires_grad:
        raise StepError(
            "the step returned a loss that does not require grad, so there is no backward to run. "
            "Look for a `torch.no_grad()` or a `.detach()` in the step, and for parameters with requires_grad=False."
        )
    return loss


def found_loss(result: object) -> object:
    """Return the object that is in the place of the loss in a step's result."""
    if isinstance(result, Mapping):
        return cast(Mapping[object, object], result).get("loss")
    return result if isinstance(result, Tensor) else getattr(result, "loss", None)


def run_backward(loss: Tensor) -> None:
    """Run backward from `loss`.

    Raises:
        StepError: The step has done that already, or has left a `loss_parallel()` that backward needs.
        UnsupportedError: The model is Lightning Fabric's, which has its own backward, and this is no rehearsal.
    """
    try:
        # A rehearsal's gradients are dropped. A training step's gradients must be of the loss as Fabric scales it.
        with as_fabrics_backward() if is_rehearsing() else nullcontext():
            loss.backward()  # pyright: ignore[reportUnknownMemberType]
    except RuntimeError as error:
        if "backward through the graph a second time" in str(error):
            raise StepError(
                "the step has run backward itself, or the loss depends on a graph of an earlier step that has been "
                "freed. Return the loss without calling backward, and build the whole graph anew in each step."
            ) from error
        if "nll_loss_backward" in str(error) and "mixed torch.Tensor and DTensor" in str(error):
            raise StepError(
                "the loss was computed under `loss_parallel()`, which ended before the backward of the loss: both need "
                "it. Call this, and `step` and `backward` in the training loop, inside of `with loss_parallel():`, and "
                "let the step not enter it, since the inner of two ends the outer one."
            ) from error
        if "call `fabric.backward(loss)`" in str(error):
            raise UnsupportedError(
                "Lightning Fabric needs `fabric.backward(loss)` under this precision, which may scale the loss, but "
                "a call of this object runs `loss.backward()`. With `Adaptive`, use the block `with "
                "adaptive.under(batch): fabric.backward(step(model, batch))`; `fit` and `plan` work as they are."
            ) from error
        raise


def _described(result: object) -> str:
    if result is None:
        return "None (is a `return` missing?)"
    kind = type(result).__name__
    if isinstance(result, Mapping):
        return f"a {kind} with the keys {list(cast(Mapping[object, object], result))!r}, and no tensor at 'loss'"
    if isinstance(result, tuple | list):
        return f"a {kind} of {len(cast(tuple[object, ...], result))}"
    return f"a {kind}: {result!r:.80}"


_CALLED = (FunctionType, MethodType, functools.partial)


@dataclass(frozen=True, kw_only=True, eq=False)
class Holdings:
    """The modules and tensors that a step holds, each once, in the order found."""

    modules: tuple[nn.Module, ...]
    tensors: tuple[Tensor, ...]


def holdings_of(step: object) -> Holdings:
    """Return the modules and tensors that `step` holds in plain sight; its modules are not opened."""
    modules: dict[int, nn.Module] = {}
    tensors: dict[int, Tensor] = {}
    seen: set[int] = set()
    waiting: list[object] = list(_held_by(step))
    while waiting:
        value = waiting.pop(0)
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, nn.Module):
            modules[id(value)] = value
        elif isinstance(value, Tensor):
            tensors[id(value)] = value
        elif isinstance(value, Mapping):
            waiting += cast(Mapping[object, object], value).values()
        elif isinstance(value, list | tuple | set | frozenset):
            waiting += cast(list[object], value)
        elif isinstance(value, _CALLED) and not is_compiled(value):  # hooks of what it has would compile it again
            waiting += (held for _, held in held_by(value, _globals_of(step)))
        else:
            tensors.update((id(one), one) for one in _tensors_of_data(value))
    return Holdings(modules=tuple(modules.values()), tensors=tuple(tensors.values()))


_MOST_OBJECTS = 1_000  # of one that is data; a dataset has more
_NO_LEAD = (type(None), bool, int, float, complex, str, bytes, torch.Size, torch.dtype, torch.device)
_NO_DATA = (Optimizer, DataLoader, Dataset, torch.Generator, ModuleType)


def _tensors_of_data(value: object) -> list[Tensor]:
    """Return the tensors of an object that is data, as a batch is; none if it leads to code, or to what gives data."""
    found: list[Tensor] = []
    waiting, seen = [value], dict[int, object]()
    while waiting:
        one = waiting.pop()
        if id(one) in seen or isinstance(one, _NO_LEAD):
            continue
        seen[id(one)] = one  # which keeps its id
        if isinstance(one, Tensor):
            found.append(one)
        elif callable(one) or is_iterator(one) or isinstance(one, _NO_DATA) or len(seen) > _MOST_OBJECTS:
            return []
        elif isinstance(one, Mapping):
            waiting += cast(Mapping[object, object], one).values()
        elif isinstance(one, list | tuple | set | frozenset):
            waiting += cast(list[object], one)
        else:
            slots = Slots.of(one)
            waiting += [] if slots is None else slots.values()
            waiting += cast("dict[str, object]", getattr(one, "__dict__", {})).values()
    return found


def _held_by(step: object) -> Iterator[object]:
    """Yield the values that `step` holds, containers unopened."""
    if isinstance(step, nn.Module):
        yield step
    elif isinstance(step, functools.partial):
        partial = cast("functools.partial[object]", step)
        yield from partial.args
        yield from partial.keywords.values()
        yield from _held_by(partial.func)
    elif isinstance(step, MethodType):
        yield from _held_by(step.__self__)
        yield from _held_by(step.__func__)
    elif isinstance(step, FunctionType):
        yield from (held for _, held in held_by_function(step))
    else:
        yield from getattr(step, "__dict__", {}).values()


def held_by_function(function: FunctionType, home: object = None) -> Iterator[tuple[str, object]]:
    """Yield the defaults of a function, what its cells hold, and the globals that it reads, with their names in it.

    Args:
        function: The function.
        home: The globals of the step that holds the function, whose file is the user's. If not given, every file is.
    """
    code = function.__code__
    defaults = function.__defaults__ or ()
    names = code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount]
    yield from zip(names, defaults, strict=True)
    yield from (function.__kwdefaults__ or {}).items()
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # an empty cell
            continue
    module = cast("str | None", function.__globals__.get("__name__"))
    if home is None or home is function.__globals__ or not (is_library(module) or is_installed(module)):
        yield from ((name, function.__globals__[name]) for name in global_names(code) if name in function.__globals__)


@functools.lru_cache(maxsize=256)
def global_names(code: CodeType) -> tuple[str, ...]:
    """Return the names of the globals that a function's own code reads, including lambdas written inside it."""
    # Not `co_names`: that lists attributes too, and the `x` of `self.x` is not the global `x`.
    instructions = chain.from_iterable(map(dis.get_instructions, nested(code)))
    names = (cast(str, one.argval) for one in instructions if one.opname in ("LOAD_GLOBAL", "LOAD_NAME"))
    return tuple(dict.fromkeys(names))


def used_up(step: object, error: Exception, runs: int) -> StepError:
    """Return the error for a step that has run and finds nothing more to run on.

    Args:
        step: The step.
        error: The error that it raised.
        runs: How often it has run before.
    """
    ran = {0: "", 1: "ran once, and then "}.get(runs, f"ran {runs} times, and then ")
    if isinstance(error, StopIteration):
        names = ", ".join(dict.fromkeys(f"`{name}`" for name, one in held_within(step) if is_iterator(one)))
        found = f"took from an iterator that has ended{f' ({names})' if names else ''}"
        advice = "Take the batch before, and let the step hold it: `batch = next(loader)`."
    else:
        found = f"raised {type(error).__name__}: {error}"
        advice = "It seems to consume its input: let it take from a copy, such as `dict(batch).pop(...)`."
    return StepError(f"the step {ran}{found}. It is run several times here. {advice}")


def held_within(function: object) -> Iterator[tuple[str, object]]:
    """Yield the objects that a callable and the functions that it holds have in plain sight."""
    waiting, seen = [function], set[int]()
    while waiting:
        one = waiting.pop()
        if id(one) not in seen:
            seen.add(id(one))
            held = list(held_by(one, None if one is function else _globals_of(function)))
            yield from held
            waiting += [inner for _, inner in held if isinstance(inner, _CALLED)]


def held_by(function: object, home: object) -> Iterator[tuple[str, object]]:
    """Yield the objects that a callable holds in plain sight, with their names in its code.

    Args:
        function: The callable.
        home: As for `held_by_function`.
    """
    if isinstance(function, functools.partial):
        partial = cast("functools.partial[object]", function)
        yield from ((f"argument {place}", one) for place, one in enumerate(partial.args))
        yield from partial.keywords.items()
        yield from held_by(partial.func, home)
    elif isinstance(function, FunctionType):
        yield from held_by_function(function, home)
    else:
        method = function if isinstance(function, MethodType) else getattr(function, "__call__", None)  # noqa: B004
        code = getattr(getattr(method, "__func__", None), "__code__", None)
        if isinstance(method, MethodType) and isinstance(code, CodeType):
            own = cast("dict[str, object]", getattr(method.__self__, "__dict__", {}))
            names = set(chain.from_iterable(inner.co_names for inner in nested(code)))
            yield from ((name, own[name]) for name in names if name in own)
            yield from held_by(method.__func__, home)


def _globals_of(step: object) -> object:
    while isinstance(step, functools.partial):
        step = cast("functools.partial[object]", step).func
    return getattr(step, "__globals__", {})


def is_iterator(value: object) -> bool:
    """Return whether a value is used up by iteration."""
    # A file is one too; steps write to theirs.
    return hasattr(type(value), "__next__") and not isinstance(value, io.IOBase)


def check_arguments(step: object, model: object, optimizer: object, *, needs_model: bool) -> None:
    """Raise if a step, a model or an optimizer is of the wrong kind, or the step cannot be called with the model.

    Raises:
        StepError: The step cannot be called with the model, or without arguments if no model is given.
    """
    check_kinds(step, model, optimizer, needs_model=needs_model)
    if model is None:
        check_takes(step, "step()")
    else:
        check_takes(step, "step(model)", model)


def check_takes(step: object, call: str, *args: object) -> None:
    """Raise if a step cannot be called with some arguments.

    Args:
        step: The step.
        call: The call as text, for the message.
        args: The arguments.

    Raises:
        StepError: It cannot.
    """
    try:
        signature = inspect.signature(cast("Callable[..., object]", step))
    except (TypeError, ValueError):  # some C callables have no signature
        return
    try:
        signature.bind(*args)
    except TypeError as error:
        raise StepError(f"step: it is called as `{call}`, which {step!r:.80} does not take: {error}.") from error


def check_kinds(step: object, model: object, optimizer: object, *, needs_model: bool) -> None:
    """Raise if a step, a model or an optimizer is of the wrong kind.

    Raises:
        StepError: It is.
    """
    if not isinstance(model, nn.Module) and (needs_model or model is not None):
        raise StepError(f"model: expected a torch.nn.Module, got {type(model).__name__}.")
    if not callable(step):
        raise StepError(f"step: expected a function that returns the loss, got {type(step).__name__}.")
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        raise StepError(not_an_optimizer(optimizer))


def check_steps_on(optimizer: torch.optim.Optimizer, tensors: Iterable[Tensor]) -> None:
    """Raise if an optimizer has none of the tensors that it should step on.

    Raises:
        StepError: It has none of them.
    """
    steps_on = parameters_of([optimizer])
    if {id(one) for one in steps_on}.isdisjoint(map(id, tensors)):
        raise StepError(
            f"optimizer: none of its {len(steps_on)} parameters is one of the model's, so it would train nothing of "
            "this step. Pass the model's optimizer, and make it after calls that replace parameters, such as "
            "`fully_shard`."
        )


def check_materialised(model: nn.Module, *, needs_values: bool = True) -> None:
    """Raise if a parameter or buffer of `model` has no values to run with, or no shape.

    Args:
        model: The model.
        needs_values: Whether one on the meta device is an error.

    Raises:
        StepError: A parameter is on the meta device, or one of them belongs to a lazy module that has not run yet. The
            message counts them. Buffers may be there alone: code may leave those that nothing reads without values.
    """
    named = [*model.named_parameters(), *model.named_buffers()]
    lazy = [name for name, tensor in named if is_lazy(tensor)]
    meta = [name for name, tensor in named if not is_lazy(tensor) and tensor.device == torch.device("meta")]
    if needs_values and any(name in meta for name, _ in model.named_parameters()):
        raise StepError(
            f"{len(meta)} parameters or buffers are on the meta device ({first_of(meta)}), so the step cannot run. "
            'Materialise the model first: `model.to_empty(device="cpu")`, then load or initialise its weights. '
            "Or plan it without running it, `on='meta'`."
        )
    if lazy:
        raise StepError(
            f"{len(lazy)} parameters or buffers of the model have no shape yet ({first_of(lazy)}). "
            "Run the model once, without grad, before it is measured."
        )
