"""Workspaces of kernels: each kind of call in a joint graph, run by itself.

A call is identified by its operator, and by shapes, strides, dtypes and options of its arguments. Its results are the
arguments of later calls: kernels return other strides and dtypes than a graph says.

Missing on purpose: workspaces of a compiler's own kernels.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from torchremat._compat.inductor import known
from torchremat._compat.operators import is_operator, name_of
from torchremat.measuring.storages import address_of
from torchremat.planning.compiling.trials import OF_TORCH, TensorShape, Trials, made_up, shapes_of
from torchremat.tensors.structure import tensors_in

# They allocate nothing in addition to their results.
_WITHOUT = ("_c10d_functional",)


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
    if node.target is operator.getitem:
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
    if getattr(getattr(node.target, "_schema", None), "is_mutable", False):
        return False
    given = {address_of(one.untyped_storage()) for other in node.all_input_nodes for one in _strided(other)}
    return all(address_of(one.untyped_storage()) in given for one in _strided(node))


def _strided(node: Node) -> list[Tensor]:
    return [one for one in tensors_in(node.meta.get("val")) if one.layout is torch.strided]
