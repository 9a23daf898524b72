"""Runs operators by themselves, on zeros, to record what each of them allocates.

A call runs twice, since libraries initialize themselves in the first run; the second counts. Only operators of torch
run: custom operators may have unknown side effects.

Of a joint graph each kind of call runs, identified by its operator, and by shapes, strides, dtypes and options of its
arguments. Its results are the arguments of later calls: kernels return other strides and dtypes than a graph says.

Missing on purpose: workspaces that depend on values, and those of a compiler's own kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from operator import getitem
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from torchremat._compat.fakes import without_fakes
from torchremat._compat.inductor import known
from torchremat._compat.operators import is_operator, name_of
from torchremat.errors import UnsupportedError
from torchremat.measuring.allocator import record_allocations
from torchremat.measuring.storages import address_of
from torchremat.measuring.traces import AllocationRecorder
from torchremat.measuring.untouched import RandomNumbers
from torchremat.tensors.structure import tensors_in

# They allocate nothing in addition to their results.
_WITHOUT = ("_c10d_functional",)
OF_TORCH = ("aten", "prims", "inductor_prims", "inductor")


class TensorShape(NamedTuple):
    """A tensor without its data: the data from which `made_up` makes one like it."""

    size: list[int]
    stride: list[int]
    dtype: torch.dtype
    device: torch.device

    @property
    def elements(self) -> int:
        """The number of elements that its memory has room for, gaps included."""
        steps = zip(self.size, self.stride, strict=True)
        return 1 + sum((length - 1) * step for length, step in steps) if all(self.size) else 0


class Trials:
    """The calls that have run on one device, by the name that the caller gave each.

    Attributes:
        high_bytes: The peak bytes of each call, its results included.
        storage_bytes: Bytes of the tensors that each returns.
        results: These tensors without data.
        unknown: Operators that could not be run, with the reason.
    """

    def __init__(self, device: torch.device) -> None:
        self.high_bytes: dict[str, int] = {}
        self.storage_bytes: dict[str, list[int]] = {}
        self.results: dict[str, object] = {}
        self.unknown: dict[str, str] = {}
        self._device = device
        self._recorder: AllocationRecorder | None = None
        self._marks: dict[str, tuple[int, int]] = {}

    @contextmanager
    def recorded(self) -> Generator[None]:
        """Let calls run in the block. Generators are restored afterwards."""
        before = RandomNumbers()
        with ExitStack() as stack:
            stack.callback(before.put_back)
            stack.enter_context(without_fakes())
            stack.enter_context(torch.no_grad())
            try:
                self._recorder = stack.enter_context(record_allocations(self._device))
            except UnsupportedError as error:
                self.unknown["all operators"] = str(error)
            yield
        if self._recorder is not None:
            trace, self._recorder = self._recorder.trace, None
            for name, (first, last) in self._marks.items():
                self.high_bytes[name] = trace.rise_bytes_between(first, last)
            self._marks = {}

    def run(self, name: str, operator: str, prepare: Callable[[], Callable[[], object]]) -> None:
        """Run a call, unless one of this name has run.

        Args:
            name: A unique name for the call.
            operator: The operator that it calls.
            prepare: Makes its arguments, and returns the call with them.
        """
        if name in self.storage_bytes or self._recorder is None:
            return
        try:
            call = prepare()
            call()
            first = self._recorder.mark("call")
            result = call()
            self._marks[name] = first, self._recorder.mark("done")
        except Exception as error:  # noqa: BLE001  an operator may reject zeros as arguments in any way
            self.unknown[operator] = str(error).partition("\n")[0]
            return
        self.storage_bytes[name] = [one.untyped_storage().nbytes() for one in tensors_in(result)]
        self.results[name] = shapes_of(result)


def shapes_of(value: object) -> object:
    """Return an operator's arguments or results with shapes in place of tensors, and numbers in place of symbols."""
    if isinstance(value, Tensor):
        size, stride = ([known(one) for one in numbers] for numbers in (value.shape, value.stride()))
        return TensorShape(size, stride, value.dtype, value.device)
    if isinstance(value, list | tuple):
        return [shapes_of(one) for one in cast("list[object]", value)]
    return known(value) if isinstance(value, torch.SymInt) else value


def made_up(value: object) -> object:
    """Return zeros of a shape; anything else as it is."""
    if not isinstance(value, TensorShape):
        return value
    return torch.zeros(value.elements, dtype=value.dtype, device=value.device).as_strided(value.size, value.stride)


class Workspaces(Trials):
    """The kernels of a graph, by the calls that have run."""

    def of(self, node: Node, made_bytes: int) -> int:
        """Return the bytes that a call allocates in addition to its results of `made_bytes`."""
        return max(0, self.high_bytes.get(_described(node), 0) - made_bytes) if self.high_bytes else 0

    def made_by(self, node: Node, tensors: Sequence[Tensor]) -> list[int]:
        """Return the storage bytes of a call's results; `tensors` are the graph's fakes for them."""
        real = self.storage_bytes.get(_described(node)) if node.op == "call_function" else None
        said = [known(one.untyped_storage().nbytes()) for one in tensors]
        return said if real is None or len(real) != len(said) else real


def measured_workspaces(graph: Graph, device: torch.device) -> Workspaces:
    """Run each kind of call once, and return the workspaces that the device's allocator recorded.

    At any time only the arguments and results of one call are live in addition to existing tensors.
    """
    trials = Workspaces(device)
    with trials.recorded():
        for node in graph.nodes:
            _try(node, trials)
    return trials


def _try(node: Node, trials: Trials) -> None:
    """Run a call unless it is known, or does nothing."""
    if node.op != "call_function" or not is_operator(node.target) or _is_view(node):
        return
    space = name_of(node.target).namespace
    if space in OF_TORCH:
        real: dict[Node, object] = {}

        def made(one: Node) -> Any:
            return real.setdefault(one, made_up(_value(one, trials)))

        def prepare() -> Callable[[], object]:
            args = cast("tuple[object, ...]", map_arg(node.args, made))
            kwargs = cast("dict[str, object]", map_arg(node.kwargs, made))
            return partial(cast("Any", node.target), *args, **kwargs)

        trials.run(_described(node), str(node.target), prepare)
    elif space not in _WITHOUT:
        trials.unknown[str(node.target)] = "it is not torch's own"


def _value(node: Node, trials: Trials) -> Any:
    """The shapes that a call has returned, or else the shapes in the graph."""
    if node.target is getitem:
        return _value(cast("Node", node.args[0]), trials)[node.args[1]]
    known_result = trials.results.get(_described(node)) if is_operator(node.target) else None
    return shapes_of(node.meta.get("val")) if known_result is None else known_result


def _described(node: Node) -> str:
    return f"{node.target}{map_arg((node.args, dict(node.kwargs)), _description)}"  # pyright: ignore[reportArgumentType]: its types are those of graphs


def _description(node: Node) -> Any:
    shapes = shapes_of(node.meta.get("val"))
    return str(tuple(shapes) if isinstance(shapes, TensorShape) else shapes)


def _is_view(node: Node) -> bool:
    """Whether a call makes no new storage and writes to none."""
    if writes(node):
        return False
    given = {address_of(one.untyped_storage()) for other in node.all_input_nodes for one in strided(other)}
    return all(address_of(one.untyped_storage()) in given for one in strided(node))


def writes(node: Node) -> bool:
    """Return whether a call writes to one of its arguments."""
    return bool(getattr(getattr(node.target, "_schema", None), "is_mutable", False))


def strided(node: Node) -> list[Tensor]:
    """Return the tensors with a storage that a node makes."""
    return [one for one in tensors_in(node.meta.get("val")) if one.layout is torch.strided]
