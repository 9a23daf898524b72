"""Keeps dynamo out of a function, or lets it in, and recognises the frames that enter compiled code."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextvars import Context, ContextVar
from functools import partial
from types import CodeType, FunctionType, MethodType
from typing import Any, ParamSpec, TypeVar, cast

import torch
from torch import nn

from torchremat._compat.binding import RELEASE, private
from torchremat.frames import TORCH, runs_in

T = TypeVar("T")
P = ParamSpec("P")
F = TypeVar("F", bound=Callable[..., object])


_bind = partial(private, needed_for="staying out of compiled graphs")
_set_strategy: Callable[[CodeType, object], None] = _bind("_C._dynamo.eval_frame.set_code_exec_strategy")
_Strategy: Callable[[object, object], object] = _bind("_C._dynamo.eval_frame._FrameExecStrategy")
_SKIP = _bind("_C._dynamo.eval_frame._FrameAction.SKIP")
_DEFAULT = _bind("_C._dynamo.eval_frame._FrameAction.DEFAULT")
_bind("compiler._is_exporting_flag")

# In torch 2.11, dynamo takes `torch.compiler.is_exporting()` for True wherever it traces; in 2.13 it reads the same
# flag. A function of ours would add one more call to each call of a wrapped module.
is_exporting = cast("Callable[[], bool]", partial(getattr, torch.compiler, "_is_exporting_flag"))
"""Returns whether torch.export runs."""

is_traced: Callable[[], bool] = private("_C._is_tracing", needed_for="staying out of traces of TorchScript")
"""Returns whether `torch.jit.trace` runs; `torch.jit.is_tracing` takes twice as long."""

TRACES_GET = RELEASE >= (2, 13)
"""Whether dynamo traces `function.__get__`, which makes a method; that of torch 2.11 cannot make one at all."""

_NOT_SET: object = private("utils._config_module._UNSET_SENTINEL", needed_for="telling settings of compilers apart")


def is_compilers(variable: ContextVar[object]) -> bool:
    """Return whether a context variable has a setting of torch's compilers, or what they derive from settings.

    The first `torch.compile` of a process leaves some 200 of them behind.
    """
    if variable.name.startswith("torch."):
        return True
    try:
        return Context().run(variable.get) is _NOT_SET  # its default, which is not that of any other code
    except LookupError:
        return False


def _leave_alone(function: Callable[..., object], inside: object) -> None:
    """Let dynamo never begin a graph at `function`, and do `inside` with what it calls."""
    _set_strategy(cast("FunctionType", function).__code__, _Strategy(_SKIP, inside))


def outside_graphs(function: Callable[P, T]) -> Callable[P, T]:
    """Keep dynamo out of `function` and what it calls: inside `torch.compile` a call of it breaks the graph.

    Like `torch.compiler.disable`, but without a wrapper, which takes longer than the rest of a region's overhead before
    its forward.
    """
    _leave_alone(function, _SKIP)
    cast("Any", function)._torchdynamo_disable = True
    return function


def only_in_graphs(function: Callable[P, T]) -> Callable[P, T]:
    """Let dynamo trace `function` where a graph calls it, and leave it alone where it is called after a break."""
    _leave_alone(function, _DEFAULT)
    return function


def traced_as(replacement: Callable[..., object]) -> Callable[[F], F]:
    """Let dynamo trace `replacement` wherever it meets the decorated function, which itself stays unchanged.

    If dynamo gives a graph up and runs it as Python, it leaves the function and everything that it calls alone.
    """

    def decorate(function: F) -> F:
        cast("Any", function)._torchdynamo_inline = replacement
        _leave_alone(function, _SKIP)
        return function

    return decorate


def backend_name() -> str:
    """Return the name of the backend of the running trace."""
    dynamo = sys.modules["torch._dynamo"]  # dynamo is the caller, so it is imported
    backend = dynamo.symbolic_convert.InstructionTranslator.current_tx().output.compiler_fn
    return str(getattr(getattr(backend, "_torchdynamo_orig_backend", backend), "compiler_name", ""))


def uses_partitioner() -> bool:
    """Return whether the backend of the running trace is known to split off a backward graph.

    Other backends may run the traced graph as it is.
    """
    return backend_name() == "inductor" or backend_name().startswith("aot_")


# Dynamo runs it while tracing, and treats its result as a constant.
uses_partitioner._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]


_FILE = TORCH + os.path.join("_dynamo", "eval_frame.py")
_OF_FUNCTIONS = ("_TorchDynamoContext",)
_NAMES = (*_OF_FUNCTIONS, "OptimizedModule")


def enters_compiled_code(code: CodeType) -> bool:
    """Return whether a frame with this code enters compiled code."""
    return code.co_filename == _FILE and code.co_qualname.startswith(_NAMES)


def runs_compiled_code() -> bool:
    """Return whether compiled code is on the caller's stack; it runs eagerly there, since a mode is on."""
    return "torch._dynamo" in sys.modules and runs_in(_FILE, _NAMES)


def is_called_compiled() -> bool:
    """Return whether a compiled function calls the caller, which runs eagerly, since a mode is on."""
    return "torch._dynamo" in sys.modules and runs_in(_FILE, _OF_FUNCTIONS)


def is_compiled(item: object) -> bool:
    """Return whether calls of a function or module run compiled code, whatever other code has put around it."""
    if not isinstance(item, nn.Module):
        return compiled_from(item) is not None
    if type(item).__name__ in ("OptimizedModule", "CompiledModule") or is_compiled_in_place(item):
        return True  # torch's class is in dynamo, which need not be imported, and the other one is ours
    own = item.__dict__.get("forward")
    return compiled_from(type(item).forward if own is None else own) is not None


def compiled_from(item: object) -> Callable[..., object] | None:
    """Return the function that a function runs compiled; None if it is not compiled."""
    for _ in range(_MOST_AROUND):
        if isinstance(item, MethodType | staticmethod | classmethod):
            item = cast("MethodType", item).__func__
        elif isinstance(item, partial):
            item = cast("partial[object]", item).func
        elif isinstance(item, FunctionType):
            own = item.__dict__
            if "_torchdynamo_orig_callable" in own and "_torchdynamo_disable" not in own:
                return own["_torchdynamo_orig_callable"]
            item = own.get("__wrapped__")
        elif type(item).__module__.startswith("torchremat."):
            item = getattr(item, "function", None)  # what one of our callables is around
        else:
            break
    return None


_MOST_AROUND = 100  # a function may say that it is around itself


def is_compiled_in_place(module: nn.Module) -> bool:
    """Return whether calls of a module run compiled code by `module.compile()`."""
    return getattr(module, "_compiled_call_impl", None) is not None
