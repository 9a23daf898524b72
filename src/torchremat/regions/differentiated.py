"""The calls of a derivative: those of a region, and the backward through them.

See NOTE [ The derivative of a region ].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import compress
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from torchremat._compat.autograd import (
    current_node,
    notes_of,
    pop_saved_tensor_hooks,
    push_saved_tensor_hooks,
    top_saved_tensor_hooks,
)
from torchremat.errors import CheckpointError, UnsupportedError
from torchremat.regions.calls import Body, Call
from torchremat.regions.restoring import exchange_of
from torchremat.regions.threads import Deriving, thread

if TYPE_CHECKING:
    from torchremat._compat.autograd import Pack, Unpack

Gradients = tuple[Tensor | None, ...]

Output = tuple[int, int]
"""An output of a region: the number of the call, and its place among the tensors that this returns."""

Place = tuple[Output, int]
"""A node: the output from which it is found, and its place among the nodes behind that one."""


class Behind(NamedTuple):
    """What gradients pass in a region from one of its nodes on, as a backward finds it.

    Attributes:
        inside: For each node that is found, whether its edges lead to nodes of the region.
        followed: The same, whether the backward follows them.
    """

    inside: list[list[bool]]
    followed: list[list[bool]]


def nodes_behind(node: Node, inside: Callable[[int, Node], Sequence[bool]]) -> list[Node]:
    """Return a node of a region and those that its gradients reach there, in an order that is the same in each run.

    Args:
        node: The node.
        inside: Returns whether the edges of a node lead to nodes of the region, from its place and the node.
    """
    order = [node]
    found = {node}
    for place, one in enumerate(order):
        for (following, _), is_inside in zip(one.next_functions, inside(place, one), strict=False):
            if is_inside and following is not None and following not in found:
                found.add(following)
                order.append(following)
    return order


class RunAgain:
    """The body of a call that a derivative runs again: what it saves is there for the backward after it.

    Args:
        body: The body of the region's call.
        derivative: What identifies the derivative.

    Attributes:
        body: See above.
    """

    __slots__ = ("_derivative", "body")

    def __init__(self, body: Body, derivative: object) -> None:
        self.body = body
        self._derivative = derivative

    def __call__(self, *args: object, **kwargs: object) -> object:
        """Run the body."""
        now = thread.now
        deriving = now.deriving = now.deriving or Deriving()
        unpack = deriving.unpacks.get(self._derivative)
        if unpack is None:
            unpack = deriving.unpacks[self._derivative] = _ForDerivative(*_top_hooks())
        push_saved_tensor_hooks(Tensor.detach, unpack)
        try:
            return self.body(*args, **kwargs)
        finally:
            pop_saved_tensor_hooks()


class Differentiated:
    """The body of the last call of a derivative: runs a backward through the calls before it.

    Args:
        calls: The calls of the region: what nodes written in Python read is as it was then.
        words: The name of the region, for messages.

    Attributes:
        behind: What gradients pass, by output.
        saving: The nodes that save for the derivative.
    """

    __slots__ = ("_calls", "_words", "behind", "saving")

    def __init__(self, calls: Sequence[Call], words: str) -> None:
        self._calls = calls
        self.behind: dict[Output, Behind] = {}
        self.saving: set[Place] = set()
        self._words = words

    def __call__(self, outputs: dict[Output, Tensor], gradients: dict[Place, Gradients]) -> list[Tensor]:
        """Return the gradients that leave the region.

        Args:
            outputs: The outputs at which gradients arrive.
            gradients: The gradients that arrive, by the node that they are for.
        """
        deriving = thread.now.deriving
        assert deriving is not None
        again = deriving.unpacks.pop(self)
        assert isinstance(again, _ForDerivative)
        # Those of another derivative, if this is one of the calls that it runs again.
        push_saved_tensor_hooks(Tensor.detach, again)
        try:
            run = self._backward(outputs, gradients, again.saving)
            waits, deriving.arriving = deriving.arriving, []
            for wait in waits:
                wait()
            with ExitStack() as stack:
                for call in self._calls:
                    if (exchange := exchange_of(call)) is not None:
                        stack.callback(exchange.close)
                return run()
        finally:
            pop_saved_tensor_hooks()

    @staticmethod
    def mark(node: Node) -> None:
        """Note on a node that a backward has found it: no recompute has made it."""
        notes_of(node)[_FOUND] = True

    def _found_again(self, output: Tensor, behind: Behind) -> list[Node]:
        """Return the nodes of a recompute that stand for those that a backward has found behind an output."""
        rows = behind.inside

        def inside(place: int, one: Node) -> Sequence[bool]:
            return rows[place] if place < len(rows) else [False] * len(one.next_functions)

        found = [] if output.grad_fn is None else nodes_behind(output.grad_fn, inside)
        if any(_FOUND in notes_of(one) for one in found):
            raise UnsupportedError(
                f"{self._words}: a gradient of it was differentiated, and it reads a tensor from a graph that another "
                "thread has made. Pass that tensor to the region as an argument."
            )
        edges = [len(one.next_functions) for one in found]
        if edges != [*map(len, rows)]:
            raise CheckpointError(
                f"{self._words}: a gradient of it was differentiated, and the graph of its recompute has other nodes "
                f"than that of its forward: {len(edges)} with {sum(edges)} edges, not {len(rows)} with "
                f"{sum(map(len, rows))}. Does its code ask whether it runs again?"
            )
        return found

    def _backward(
        self, outputs: dict[Output, Tensor], gradients: dict[Place, Gradients], saving: set[Node]
    ) -> Callable[[], list[Tensor]]:
        """Return a function that runs the backward, and returns the gradients that leave the region."""
        nodes: dict[Place, Node] = {}
        passes: dict[Node, tuple[list[bool], list[bool]]] = {}
        for output, behind in self.behind.items():
            for place, one in enumerate(self._found_again(outputs[output], behind)):
                nodes[output, place] = one
                passes.setdefault(one, (behind.inside[place], behind.followed[place]))
        saving |= {nodes[place] for place in self.saving}
        goes_on = {node for node, (_, followed) in passes.items() if any(followed)}
        edges = (edge for node in goes_on for edge in compress(node.next_functions, passes[node][1]))
        ends = {GradientEdge(node, at): None for node, at in edges if node is not None and node not in goes_on}
        roots: list[GradientEdge] = []
        given: list[Tensor] = []
        for place, arrived in gradients.items():
            nodes[place].register_prehook(partial(_instead, arrived))
            roots += [GradientEdge(nodes[place], at) for at, one in enumerate(arrived) if one is not None]
            given += [one for one in arrived if one is not None]
        leaving: list[Tensor] = []
        for node, (inside, _) in passes.items():
            if not all(inside):
                node.register_hook(partial(_leave, leaving, inside))

        def run() -> list[Tensor]:
            try:
                if ends:
                    torch.autograd.grad(roots, [*ends], given, create_graph=True, allow_unused=True)
                return [*leaving]
            finally:
                leaving.clear()  # nodes whose graphs it keeps have hooks that keep it
                saving.clear()

        return run


def _instead(arrived: Gradients, _: Gradients) -> Gradients:
    return arrived


def _leave(leaving: list[Tensor], inside: list[bool], gradients: Gradients, _: Gradients) -> None:
    leaving += [one for one, is_inside in zip(gradients, inside, strict=False) if not is_inside and one is not None]


def _top_hooks() -> tuple[Pack, Unpack]:
    hooks = top_saved_tensor_hooks(True)
    assert hooks is not None
    return hooks


class _ForDerivative:
    """Unpacks what a forward in a derivative has saved; what the node then saves is that of the derivative.

    Attributes:
        saving: The nodes of which this is so; none, while the forward runs, which may take a gradient of its own.
    """

    __slots__ = ("_pack", "_unpack", "saving")

    def __init__(self, pack: Pack, unpack: Unpack) -> None:
        self._pack = pack
        self._unpack = unpack
        self.saving: set[Node] = set()

    def __call__(self, saved: Tensor) -> Tensor:
        # Without grad it is the input of a region inside that is asked for.
        if self.saving and torch.is_grad_enabled() and current_node() in self.saving:
            push_saved_tensor_hooks(self._pack, self._unpack)
        return saved


_FOUND = "torchremat: found by a backward"
