"""What kernels allocate beside their results: each kind of call in a joint graph, run by itself on made-up tensors.

A call is known by its operator, and by shapes, strides, dtypes and options of its arguments. The allocator's events
between two marks say how high it went. It runs twice, since the first time libraries set themselves up. What it
returns is what later calls are given: kernels return other strides and dtypes than a graph says they do. Only the
operators of torch are run: what those of others do beside their result, nobody knows.

Missing on purpose: what a compiler's own kernels take, and workspace that depends on values, which are zeros here.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from torchremat._compat.fakes import without_fakes
from torchremat._compat.inductor import known
from torchremat._compat.operators import is_operator, name_of
from torchremat.errors import UnsupportedError
from torchremat.measuring.allocator import AllocationRecorder, record_allocations
from torchremat.measuring.tracker import address_of
from torchremat.measuring.untouched import RandomNumbers
from torchremat.tensors.structure import tensors_in

_OF_TORCH = ("aten", "prims", "inductor_prims")
# They allocate nothing beside their results.
_WITHOUT = ("_c10d_functional",)


@dataclass(frozen=True, kw_only=True)
class Workspaces:
    """The kernels of a graph.

    Attributes:
        high_bytes: The most that each call allocates, its results included.
        storage_bytes: Of the tensors that each returns.
        unknown: Operators that could not be run, with the reason.
    """

    high_bytes: Mapping[str, int] = field(default_factory=dict[str, int])
    storage_bytes: Mapping[str, list[int]] = field(default_factory=dict[str, list[int]])
    unknown: Mapping[str, str] = field(default_factory=dict[str, str])

    def of(self, node: Node, made_bytes: int) -> int:
        """Return what a call allocates beside the results of `made_bytes`."""
        return max(0, self.high_bytes.get(_described(node), 0) - made_bytes) if self.high_bytes else 0

    def made_by(self, node: Node, tensors: Sequence[Tensor]) -> list[int]:
        """Return the bytes of the storages of what a call returns; `tensors` is what the graph has in their place."""
        real = self.storage_bytes.get(_described(node)) if node.op == "call_function" else None
        said = [known(one.untyped_storage().nbytes()) for one in tensors]
        return said if real is None or len(real) != len(said) else real


def measured_workspaces(graph: Graph, device: torch.device) -> Workspaces:
    """Run each kind of call once, and return what the allocator of a device saw.

    At any time there are the arguments and results of one call, beside what is there already. Generators are
    afterwards what they were before.
    """
    before = RandomNumbers()
    try:
        with without_fakes(), torch.no_grad(), record_allocations(device) as recorder:
            calls = _Calls(recorder)
            for node in graph.nodes:
                calls.add(node)
    except UnsupportedError as error:
        return Workspaces(unknown={"all operators": str(error)})
    finally:
        before.put_back()
    trace = recorder.trace
    high = {
        call: trace.peak_bytes_between(first, last) - trace.live_bytes_at(first)
        for call, (first, last) in calls.marks.items()
    }
    return Workspaces(high_bytes=high, storage_bytes=calls.storage_bytes, unknown=calls.unknown)


class _Calls:
    """The calls that have run.

    Attributes:
        marks: Around each.
        storage_bytes: Of the tensors that each has returned.
        unknown: The operators of those that have not.
    """

    def __init__(self, recorder: AllocationRecorder) -> None:
        self.marks: dict[str, tuple[int, int]] = {}
        self.storage_bytes: dict[str, list[int]] = {}
        self.unknown: dict[str, str] = {}
        self._recorder = recorder
        self._results: dict[str, object] = {}  # without data

    def add(self, node: Node) -> None:
        """Run a call unless it is known, or does nothing."""
        if node.op != "call_function" or not is_operator(node.target) or _is_view(node):
            return
        space, call = name_of(node.target).namespace, _described(node)
        if space in _OF_TORCH and call not in self.marks:
            try:
                self._run(node, call)
            except Exception as error:  # noqa: BLE001  whatever an operator finds wrong with arguments that are zeros
                self.unknown[str(node.target)] = str(error).partition("\n")[0]
        elif space not in (*_OF_TORCH, *_WITHOUT):
            self.unknown[str(node.target)] = "it is not torch's own"

    def _run(self, node: Node, call: str) -> None:
        real: dict[Node, object] = {}

        def made(one: Node) -> Any:
            return real.setdefault(one, _made_up(self._value(one)))

        args = cast("tuple[object, ...]", map_arg(node.args, made))
        kwargs = cast("dict[str, object]", map_arg(node.kwargs, made))
        function = cast("Any", node.target)
        function(*args, **kwargs)
        first = self._recorder.mark("call")
        result = function(*args, **kwargs)
        self.marks[call] = first, self._recorder.mark("done")
        self.storage_bytes[call] = [one.untyped_storage().nbytes() for one in tensors_in(result)]
        self._results[call] = _shapes(result)

    def _value(self, node: Node) -> Any:
        """The shapes that a call has returned, or else those that the graph says it does."""
        if node.target is operator.getitem:
            return self._value(cast("Node", node.args[0]))[node.args[1]]
        known_result = self._results.get(_described(node)) if is_operator(node.target) else None
        return _shapes(node.meta.get("val")) if known_result is None else known_result


class _Shape(NamedTuple):
    size: list[int]
    stride: list[int]
    dtype: torch.dtype
    device: torch.device


def _shapes(value: object) -> object:
    """Return what an operator takes or makes with shapes in the place of tensors, and numbers in that of symbols."""
    if isinstance(value, Tensor):
        size, stride = ([known(one) for one in numbers] for numbers in (value.shape, value.stride()))
        return _Shape(size, stride, value.dtype, value.device)
    if isinstance(value, list | tuple):
        return [_shapes(one) for one in cast("list[object]", value)]
    return known(value) if isinstance(value, torch.SymInt) else value


def _made_up(value: object) -> object:
    if not isinstance(value, _Shape):
        return value
    steps = zip(value.size, value.stride, strict=True)
    elements = 1 + sum((length - 1) * step for length, step in steps) if all(value.size) else 0
    return torch.zeros(elements, dtype=value.dtype, device=value.device).as_strided(value.size, value.stride)


def _described(node: Node) -> str:
    return f"{node.target}{map_arg((node.args, dict(node.kwargs)), _description)}"  # pyright: ignore[reportArgumentType]: its types are those of graphs


def _description(node: Node) -> Any:
    shapes = _shapes(node.meta.get("val"))
    return str(tuple(shapes) if isinstance(shapes, _Shape) else shapes)


def _is_view(node: Node) -> bool:
    """Whether a call makes no storage of its own and writes to none."""
    if getattr(getattr(node.target, "_schema", None), "is_mutable", False):
        return False
    given = {address_of(one.untyped_storage()) for other in node.all_input_nodes for one in _strided(other)}
    return all(address_of(one.untyped_storage()) in given for one in _strided(node))


def _strided(node: Node) -> list[Tensor]:
    return [one for one in tensors_in(node.meta.get("val")) if one.layout is torch.strided]
