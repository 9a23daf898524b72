"""The joint graph of a forward and its backward, as AOTAutograd makes it, read as data.

Bytes are the storage sizes of the graph's fake tensors: a view has no bytes of its own. Workspaces of kernels are
measured. Costs are a roofline in bytes: the bytes that an operator reads and writes, or its flops at a fixed number per
byte, whichever takes longer.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.node import map_arg
from torch.utils.checkpoint import CheckpointPolicy

from torchremat._compat.inductor import is_incoming, known, must_be_in_backward
from torchremat._compat.operators import is_operator, name_of
from torchremat.measuring.flops import formula_of
from torchremat.measuring.storages import address_of
from torchremat.planning.compiling.trials import Workspaces, measured_workspaces, strided, writes
from torchremat.planning.searches.chains import Cost
from torchremat.schedules.dataflow import Operator
from torchremat.schedules.joint import Joint

# Flops that take as long as one byte; accelerators have a higher ratio, because of their matrix units.
_FLOPS_PER_BYTE = {"cpu": 10.0}
_FLOPS_PER_BYTE_ELSEWHERE = 100.0
# Allocators of accelerators round blocks up to a multiple of this.
_BLOCK_BYTES = {"cpu": 1}
_BLOCK_BYTES_ELSEWHERE = 512
# Operators that contain others, whatever these do, and collectives.
_NEVER_AGAIN = ("higher_order", "_c10d_functional")
# The flops that a byte counts as, where flops decide.
_TIE = 1e-3


@dataclass(frozen=True, kw_only=True, eq=False)
class JointReading:
    """A joint graph, read.

    Attributes:
        joint: Its operators and values.
        nodes: For each value the first node that is a tensor of it; absent where no node is.
        flops: By operator.
        device: The device whose bytes count: the one with the most bytes.
        numbers: The values by the addresses of their storages.
        workspaces: Workspaces of kernels: bytes in addition to their results.
        fuses: Whether a compiler fuses several operators of the graph into its own kernels.
    """

    joint: Joint
    nodes: dict[int, Node]
    flops: tuple[int, ...]
    device: torch.device
    numbers: dict[int, int]
    workspaces: Workspaces
    fuses: bool

    def block(self, size: int) -> int:
        """Return the bytes that the allocator gives for a request."""
        return _block(size, self.device)

    def saved(self, forward: Graph, num_fwd_outputs: int) -> frozenset[int]:
        """Return the values that a forward graph returns in addition to its own outputs."""
        output = next(iter(forward.find_nodes(op="output")))
        returned = [node for node in _flat(output.args) if isinstance(node, Node)][num_fwd_outputs:]
        return frozenset(value for node in returned for value in self.values_of(node) if value in self.joint.maker)

    def values_of(self, node: Node) -> list[int]:
        """Return the values of a node's tensors, or of their bases for views."""
        return [self.numbers[address] for address in _addresses(node) if address in self.numbers]


def read_graph(graph: Graph, num_fwd_outputs: int, cost: Cost = "seconds", *, fuses: bool = False) -> JointReading:
    """Return a joint graph as data.

    Args:
        graph: The graph; its nodes have fake tensors for their results.
        num_fwd_outputs: How many of its outputs are the forward's.
        cost: The cost of operators: `"seconds"` by the roofline, or `"flops"`; bytes then only break ties.
        fuses: Whether it is for a compiler that makes its own kernels, as Inductor does.
    """
    values = _Values(graph)
    nodes: dict[int, Node] = {}
    incoming: list[int] = []
    operators: list[Operator] = []
    flops: list[int] = []
    effects: tuple[list[int], list[int]] = ([], [])
    for node in graph.nodes:
        if node.op not in ("placeholder", "call_function"):
            continue
        before = len(values.sizes)
        found = values.of(node)
        if node.op == "placeholder":
            incoming += found if is_incoming(node) else []
        else:
            made = tuple(dict.fromkeys(value for value in found if value >= before))
            written = writes(node)
            if written:  # it must run, even if its result has no reader
                made = (*made, values.effect())
                effects[must_be_in_backward(node)].append(made[-1])
            if made:
                flops.append(_flops(node))
                operators.append(values.operator(node, made, flops[-1], cost, repeats=not written, fuses=fuses))
        if isinstance(node.meta.get("val"), Tensor):
            for value in found:
                nodes.setdefault(value, node)
    output = next(iter(graph.find_nodes(op="output")))
    returned = _flat(output.args)
    given = set(incoming)
    begins = next((i for i, one in enumerate(operators) if not given.isdisjoint(one.inputs)), len(operators))
    joint = Joint(
        operators=tuple(operators),
        size_bytes=tuple(values.sizes),
        outputs=(*_numbered(returned[:num_fwd_outputs], values.numbers), *effects[0]),
        gradients=(*_numbered(returned[num_fwd_outputs:], values.numbers), *effects[1]),
        incoming=tuple(dict.fromkeys(incoming)),
        begins=begins,
    )
    return JointReading(
        joint=joint,
        nodes=nodes,
        flops=tuple(flops),
        device=values.device,
        numbers=values.numbers,
        workspaces=values.workspaces,
        fuses=fuses,
    )


class _Values:
    """The values of a graph: its storages, numbered in the order in which they appear."""

    def __init__(self, graph: Graph) -> None:
        self.device = _device_of(graph)
        self.workspaces = measured_workspaces(graph, self.device)
        self.numbers: dict[int, int] = {}  # by address
        self.sizes: list[int] = []

    def of(self, node: Node) -> list[int]:
        """Return the values of the tensors that a node makes."""
        tensors = strided(node)
        return [self._number(*one) for one in zip(tensors, self.workspaces.made_by(node, tensors), strict=True)]

    def _number(self, tensor: Tensor, size: int) -> int:
        found = self.numbers.setdefault(address_of(tensor.untyped_storage()), len(self.sizes))
        if found == len(self.sizes):
            self.sizes.append(_block(size, self.device) if tensor.device == self.device else 0)
        return found

    def effect(self) -> int:
        """Return a new value without bytes."""
        self.sizes.append(0)
        return len(self.sizes) - 1

    def operator(
        self, node: Node, made: tuple[int, ...], flops: int, cost: Cost, *, repeats: bool, fuses: bool
    ) -> Operator:
        """Return a node as an operator that makes some values, and that may run again if it `repeats`."""
        inputs = tuple(dict.fromkeys(value for one in node.all_input_nodes for value in self.of(one)))
        moved = sum(self.sizes[value] for value in {*inputs, *made})
        return Operator(
            name=node.name,
            inputs=inputs,
            outputs=made,
            cost=_cost(flops, moved, self.device, cost) if repeats and _may_run_again(node) else math.inf,
            workspace_bytes=self.workspaces.of(node, sum(self.sizes[value] for value in made)),
            fuses=fuses and _fuses(node),
        )


def _block(size: int, device: torch.device) -> int:
    block_bytes = _BLOCK_BYTES.get(device.type, _BLOCK_BYTES_ELSEWHERE)
    return -(-size // block_bytes) * block_bytes


def _cost(flops: int, moved_bytes: int, device: torch.device, cost: Cost) -> float:
    if cost == "flops":
        return flops + moved_bytes * _TIE
    return max(float(moved_bytes), flops / _FLOPS_PER_BYTE.get(device.type, _FLOPS_PER_BYTE_ELSEWHERE))


def _numbered(returned: Sequence[object], numbers: dict[int, int]) -> tuple[int, ...]:
    found = [address for node in returned if isinstance(node, Node) for address in _addresses(node)]
    return tuple(dict.fromkeys(numbers[address] for address in found))


def _flat(arguments: object) -> list[object]:
    if isinstance(arguments, Iterable) and not isinstance(arguments, str):
        return [leaf for one in arguments for leaf in _flat(one)]
    return [arguments]


def _addresses(node: Node) -> Iterator[int]:
    for tensor in strided(node):
        yield address_of(tensor.untyped_storage())


def _device_of(graph: Graph) -> torch.device:
    """The device with the most bytes."""
    total: dict[torch.device, int] = {}
    for node in graph.nodes:
        for tensor in strided(node):
            total[tensor.device] = total.get(tensor.device, 0) + known(tensor.untyped_storage().nbytes())
    return max(total, key=lambda device: total[device], default=torch.device("cpu"))


def _may_run_again(node: Node) -> bool:
    """Whether an operator repeats its result, without side effects."""
    if not is_operator(node.target) or node.meta.get("recompute") is CheckpointPolicy.MUST_SAVE:
        return False
    return name_of(node.target).namespace not in _NEVER_AGAIN and not _draws(node)


def _draws(node: Node) -> bool:
    """Whether an operator draws random numbers; attention does only with dropout."""
    target = cast("Any", node.target)
    if torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    arguments = target._schema.arguments
    names = [argument.name for argument in arguments]
    if "dropout_p" not in names:
        return True
    place = names.index("dropout_p")
    given = node.args[place] if place < len(node.args) else node.kwargs.get("dropout_p", arguments[place].default_value)
    return bool(given != 0.0)


def _fuses(node: Node) -> bool:
    tags = getattr(node.target, "tags", ())
    return torch.Tag.pointwise in tags or torch.Tag.reduction in tags


def _flops(node: Node) -> int:
    formula = formula_of(node.target)  # pyright: ignore[reportArgumentType]: that of a call is callable
    if formula is None:
        return 0

    def stand_in(one: Node) -> Any:
        return one.meta.get("val")

    args = cast("tuple[object, ...]", map_arg(node.args, stand_in))
    kwargs = cast("dict[str, object]", map_arg(node.kwargs, stand_in))
    return known(formula(*args, **kwargs, out_val=node.meta.get("val")))
