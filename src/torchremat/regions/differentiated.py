"""The call of a derivative: the forward of a region, and a backward through it, run again.

See NOTE [ The derivative of a region ].
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import compress
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from torchremat._compat.autograd import (
    pop_saved_tensor_hooks,
    push_saved_tensor_hooks,
    sequence_number,
    top_saved_tensor_hooks,
)
from torchremat.ambient.global_state import AmbientState, ambient_state
from torchremat.regions.calls import Body
from torchremat.regions.threads import thread
from torchremat.tensors.structure import tensors_in

if TYPE_CHECKING:
    from torchremat._compat.autograd import Pack, Unpack

Gradients = tuple[Tensor | None, ...]

Place = tuple[int, int]
"""Where a gradient arrives: the number of an output's node, and the place of a node among those behind it."""


class Made(NamedTuple):
    """The nodes that a region has made.

    Attributes:
        first: The number of the first node that it can have made.
        inputs: The nodes that made its inputs.
    """

    first: int
    inputs: Sequence[Node | None] = ()

    def has(self, node: Node) -> bool:
        """Return whether a node is one of them."""
        return node._sequence_nr() >= self.first and not hasattr(node, "variable") and node not in self.inputs

    def of(self, output: object) -> list[Node]:
        """Return those that have made the output, each once."""
        if type(output) is Tensor:  # as most outputs are
            node = output.grad_fn
            return [node] if node is not None and self.has(node) else []
        nodes = dict.fromkeys([one.grad_fn for one in tensors_in(output)])
        return [one for one in nodes if one is not None and self.has(one)]

    def behind(self, node: Node) -> list[Node]:
        """Return one of them and those that its gradients reach, in an order that is the same in each run."""
        order = [node]
        found = {node}
        for one in order:
            for following, _ in one.next_functions:
                if following is not None and following not in found and self.has(following):
                    found.add(following)
                    order.append(following)
        return order


def edges_of(nodes: Iterable[Node]) -> list[GradientEdge]:
    """Return the edges of nodes, in their order."""
    edges = (edge for one in nodes for edge in one.next_functions)
    return [GradientEdge(node, number) for node, number in edges if node is not None]


class Differentiated:
    """The body of a derivative: runs the forward of a region, and a backward through it.

    Args:
        body: The body of the region's call.
        ambient: The state around the backward.

    Attributes:
        body: See above.
        followed: By number of an output's node, which edges behind it the backward follows.
    """

    __slots__ = ("_ambient", "body", "followed")

    def __init__(self, body: Body, ambient: AmbientState) -> None:
        self.body = body
        self.followed: dict[int, list[bool]] = {}
        self._ambient = ambient

    def __call__(
        self, gradients: dict[Place, Gradients], args: tuple[object, ...], kwargs: dict[str, object]
    ) -> list[Tensor]:
        """Return the gradients that leave the region.

        Args:
            gradients: Those that arrive.
            args: The arguments of the region's call.
            kwargs: See `args`.
        """
        return self.run(gradients, args, kwargs)[1]

    def run(
        self, gradients: dict[Place, Gradients], args: tuple[object, ...], kwargs: dict[str, object]
    ) -> tuple[Made, list[Tensor]]:
        """Return the nodes that the backward makes, and the gradients that leave the region."""
        hooks = top_saved_tensor_hooks(True)
        assert hooks is not None
        again = _ForDerivative(*hooks)
        # What the forward saves is there for the backward alone, whose saves are those that are waited for.
        push_saved_tensor_hooks(Tensor.detach, again)
        try:
            with _arriving():
                if isinstance(self.body, Differentiated):
                    made, output = self.body.run(*args, **kwargs)  # pyright: ignore[reportArgumentType]: as it was called
                else:
                    made = Made(sequence_number())
                    output = self.body(*args, **kwargs)
                backward = self._backward(made, made.of(output), gradients)
            again.is_on = True
            with ExitStack() as stack:
                if not self._ambient.are_here():
                    self._ambient.restore(stack, ambient_state())
                return Made(sequence_number()), backward()
        finally:
            pop_saved_tensor_hooks()

    def _backward(
        self, made: Made, outputs: list[Node], gradients: dict[Place, Gradients]
    ) -> Callable[[], list[Tensor]]:
        """Return a function that runs the backward, and returns the gradients that leave the region."""
        nodes = {number: made.behind(outputs[number]) for number in self.followed}
        edges: dict[GradientEdge, None] = {}
        for number, followed in self.followed.items():
            edges |= dict.fromkeys(compress(edges_of(nodes[number]), followed))
        ends = [one for one in edges if not any(edge in edges for edge in edges_of([one.node]))]
        roots: list[GradientEdge] = []
        given: list[Tensor] = []
        for (number, place), arrived in gradients.items():
            node = nodes[number][place]
            node.register_prehook(partial(_instead, arrived))
            roots += [GradientEdge(node, at) for at, one in enumerate(arrived) if one is not None]
            given += [one for one in arrived if one is not None]
        leaving: list[Tensor] = []
        for node in {node: None for each in nodes.values() for node in each}:
            outside = [one is None or not made.has(one) for one, _ in node.next_functions]
            if any(outside):
                node.register_hook(partial(_leave, leaving, outside))

        def run() -> list[Tensor]:
            try:
                if ends:
                    torch.autograd.grad(roots, ends, given, create_graph=True, allow_unused=True)
                return [*leaving]
            finally:
                leaving.clear()  # nodes whose graphs it keeps have hooks that keep it

        return run


@contextmanager
def _arriving() -> Generator[None]:
    """Let what is made in the block wait for gradients when it has ended."""
    now = thread.now
    had, now.arriving = now.arriving, []
    try:
        yield
        for wait in now.arriving:
            wait()
    finally:
        now.arriving = had


def _instead(arrived: Gradients, _: Gradients) -> Gradients:
    return arrived


def _leave(leaving: list[Tensor], outside: list[bool], gradients: Gradients, _: Gradients) -> None:
    leaving += [one for one in compress(gradients, outside) if one is not None]


class _ForDerivative:
    """Unpacks what a forward in a derivative has saved; what the node then saves is that of the derivative.

    Attributes:
        is_on: Whether the forward has run, which may take a gradient of its own.
    """

    __slots__ = ("_pack", "_unpack", "is_on")

    def __init__(self, pack: Pack, unpack: Unpack) -> None:
        self._pack = pack
        self._unpack = unpack
        self.is_on = False

    def __call__(self, saved: Tensor) -> Tensor:
        # Without grad it is the input of a region inside that is asked for.
        if self.is_on and torch.is_grad_enabled():
            push_saved_tensor_hooks(self._pack, self._unpack)
        return saved
