"""The Python program that Inductor writes around the kernels of a graph, obtained without compiling any kernel.

Inductor passes the generated program to any `GraphLowering.save_output_code` that is set, before loading it; only
loading compiles the kernels. So a graph is given to Inductor with a receiver that ends the compilation there.
"""

from __future__ import annotations

import copy
from collections.abc import Generator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from importlib import import_module
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch.fx import GraphModule, Node

from torchremat._compat.binding import overridden
from torchremat._compat.inductor import bound
from torchremat.errors import UnsupportedError

_COMPILE = "torch._inductor.compile_fx"


@dataclass(frozen=True, kw_only=True)
class Wrapper:
    """The program that Inductor has generated for a graph.

    Attributes:
        code: The program.
        tensors: Size, strides, dtype and device of each input and buffer that has a name in it.
        hints: The values of the symbols in it.
        strides: The strides of the tensors that it returns; None for a result that is no tensor.
        origins: For each buffer the nodes of the graph that it was made for.
    """

    code: str
    tensors: Mapping[str, tuple[list[int], list[int], torch.dtype, torch.device]]
    hints: Mapping[str, int]
    strides: Sequence[tuple[int, ...] | None]
    origins: Mapping[str, Sequence[str]]


class _ProgramReceived(BaseException):
    """The program was received. Not an error: handlers of errors would report it, and keep folders for it."""


def donated(forward: GraphModule, backward: GraphModule, num_fwd_outputs: int) -> list[int]:
    """Return the places of a backward's inputs whose memory it may reuse for its results: nothing else holds them."""
    if not bound("torch._functorch", "config").donated_buffer:
        return []
    (output,) = forward.graph.find_nodes(op="output")
    saved = cast("Sequence[object]", output.args[0])[num_fwd_outputs:]
    sizes = sum(isinstance(one, Node) and not isinstance(one.meta.get("val"), torch.Tensor) for one in saved)
    forward_said = SimpleNamespace(
        num_forward=num_fwd_outputs,
        tensors_saved_for_backwards_slice=slice(num_fwd_outputs, num_fwd_outputs + len(saved) - sizes),
        num_symints_saved_for_bw=sizes,
    )
    collect = bound("torch._functorch._aot_autograd.graph_compile", "collect_bw_donated_buffer_idxs")
    return collect(forward, backward, forward_said)


def wrapper_of(
    graph: GraphModule,
    inputs: Sequence[object],
    *,
    visible: int,
    is_backward: bool = False,
    donated: Sequence[int] = (),
) -> Wrapper:
    """Return the program that Inductor writes for a graph, with the active options and tracing.

    Args:
        graph: The graph, which stays unchanged.
        inputs: Stand-ins for its inputs.
        visible: How many of the first results users see; their strides are kept if Inductor is to keep them.
        is_backward: Whether the graph is a backward's.
        donated: The places of the inputs whose memory results may be written to.

    Raises:
        VersionError: This torch lacks these hooks.
        UnsupportedError: Other code has taken over its compilation, and has not passed on the program.
        Exception: Any error that Inductor finds in the graph.
    """
    lowering = bound("torch._inductor.graph", "GraphLowering")
    virtual = bound("torch._inductor.virtualized", "V")
    config = bound("torch._inductor", "config")
    compile_ = bound(_COMPILE, "compile_fx_inner")
    found: list[Wrapper] = []

    def receive(code: str) -> None:
        found.append(_read(virtual.graph, code))
        raise _ProgramReceived

    tried = copy.deepcopy(graph)
    (output,) = tried.graph.find_nodes(op="output")
    returned = output.args[0]
    keeps_strides = config.bw_outputs_user_visible if is_backward else config.keep_output_stride
    output.meta["user_visible_output_idxs"] = [
        i for i in range(visible if keeps_strides else 0) if isinstance(returned[i], Node)
    ]
    with ExitStack() as stack:
        stack.enter_context(overridden([lowering], save_output_code=staticmethod(receive)))
        stack.enter_context(_noted(donated))
        stack.enter_context(_uncounted())
        stack.enter_context(
            config.patch({"fx_graph_cache": False, "fx_graph_remote_cache": False, "trace.enabled": False})
        )
        # Where users switch caches off, each compilation creates its own folder, and leaves it behind.
        stack.enter_context(overridden([import_module(_COMPILE)], with_fresh_cache_if_config=nullcontext))
        stack.enter_context(suppress(_ProgramReceived))
        compile_(tried, inputs, is_backward=is_backward)
    if not found:
        raise UnsupportedError(
            "Inductor has not offered its program to torchremat: something else has replaced its compilation."
        )
    return found[0]


def extern_kernels() -> object:
    """Return the object through which programs call operators that write to a given result."""
    return bound("torch._inductor.select_algorithm", "extern_kernels")


def _noted(donated: Sequence[int]) -> AbstractContextManager[None]:
    """Record which inputs are donated where Inductor looks for it; AOTAutograd records it there after a split."""
    context = bound("torch._guards", "TracingContext").try_get()
    noted = SimpleNamespace(bw_donated_idxs=list(donated))
    return nullcontext() if context is None else overridden([context], fw_metadata=noted)


@contextmanager
def _uncounted() -> Generator[None]:
    """Leave Inductor's counters as they were: their readers ask about code that runs."""
    counters = bound("torch._dynamo.utils", "counters")
    metrics = vars(import_module("torch._inductor.metrics"))
    before = copy.deepcopy(counters), {name: value for name, value in metrics.items() if isinstance(value, int)}
    try:
        yield
    finally:
        counters.clear()
        counters.update(before[0])
        metrics.update(before[1])


def _read(lowered: Any, code: str) -> Wrapper:
    environment = lowered.sizevars.shape_env
    symbols = environment.backed_var_to_val if hasattr(environment, "backed_var_to_val") else environment.var_to_val
    hints = {str(symbol): int(value) for symbol, value in symbols.items()}

    def numbers(values: Sequence[object]) -> list[int]:
        return [_number(one, hints) for one in values]

    tensors: dict[str, tuple[list[int], list[int], torch.dtype, torch.device]] = {}
    for name, buffer in {**lowered.graph_inputs, **lowered.name_to_buffer}.items():
        with suppress(Exception):  # a result without such a layout is no tensor: lists of results, and None
            layout = buffer.get_layout()
            tensors[name] = numbers(layout.size), numbers(layout.stride), layout.dtype, layout.device
    strides = [
        tuple(numbers(one.get_stride())) if hasattr(one, "get_stride") and one.has_tensor_output() else None
        for one in lowered.graph_outputs
    ]
    origins = {name: [node.name for node in buffer.get_origins()] for name, buffer in lowered.name_to_buffer.items()}
    return Wrapper(code=code, tensors=tensors, hints=hints, strides=strides, origins=origins)


def _number(size: Any, hints: Mapping[str, int]) -> int:
    symbols = getattr(size, "free_symbols", None)
    return int(size.subs({one: hints[str(one)] for one in symbols}) if symbols else size)
