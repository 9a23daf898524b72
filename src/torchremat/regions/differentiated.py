"""The call of a derivative: the forward of a region, and a backward through it, run again.

See NOTE [ The derivative of a region ].
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import compress
from threading import get_ident
from typing import TYPE_CHECKING, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from torchremat._compat.autograd import (
    current_node,
    notes_of,
    pop_saved_tensor_hooks,
    push_saved_tensor_hooks,
    sequence_number,
    top_saved_tensor_hooks,
)
from torchremat.ambient.global_state import AmbientState, ambient_state
from torchremat.errors import CheckpointError, UnsupportedError
from torchremat.regions.calls import Body
from torchremat.regions.threads import thread
from torchremat.tensors.structure import tensors_in

if TYPE_CHECKING:
    from torchremat._compat.autograd import Pack, Unpack

Gradients = tuple[Tensor | None, ...]

Place = tuple[int, int]
"""A node: the number of the output from which it is found, and its place among the nodes behind that one."""


class Made:
    """The nodes that a region makes in its first run, in this thread from now on.

    Args:
        inputs: The inputs of the region.

    Attributes:
        thread: The thread that makes them.
    """

    __slots__ = ("_end", "_first", "_others", "thread")

    def __init__(self, inputs: Sequence[Tensor] = ()) -> None:
        self._first = self._end = sequence_number()
        self._others: list[Node] = []  # another thread has made these for inputs, and each numbers its own
        self.thread = get_ident()
        self.given(inputs)

    def given(self, inputs: Sequence[Tensor]) -> None:
        """Note what has made inputs."""
        for one in inputs:
            if (node := one.grad_fn) is not None and node._sequence_nr() >= self._first:
                self._others.append(node)

    def has(self, node: Node | None) -> bool:
        """Return whether a node is one of them, by its number."""
        return node is not None and self._first <= node._sequence_nr() < self._end and node not in self._others

    def end(self, outputs: Sequence[Node | None]) -> dict[int, Node]:
        """Return the nodes that have made outputs, each with the number of the first output of it: the run has ended.

        Args:
            outputs: The node of each output, or None.
        """
        self._end = sequence_number()
        found: dict[Node, int] = {}
        for number, node in enumerate(outputs):
            if node is not None and self.has(node):
                found.setdefault(node, number)
        return {number: node for node, number in found.items()}


def nodes_of(output: object) -> list[Node | None]:
    """Return the nodes of the tensors in an output."""
    return [one.grad_fn for one in ((output,) if type(output) is Tensor else tensors_in(output))]


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


class Differentiated:
    """The body of a derivative: runs the forward of a region, and a backward through it.

    Args:
        body: The body of the region's call.
        ambient: The state around the backward.
        words: The name of the region, for messages.

    Attributes:
        body: See above.
        name: The name of the gradients among its keyword arguments, which no other argument has.
        behind: What gradients pass, by number of an output.
        saving: The nodes that save for the derivative.
    """

    __slots__ = ("_ambient", "_words", "behind", "body", "name", "saving")

    def __init__(self, body: Body, ambient: AmbientState, words: str) -> None:
        self.body = body
        self.name = f"gradients of {body.name}" if isinstance(body, Differentiated) else "gradients of the outputs"
        self.behind: dict[int, Behind] = {}
        self.saving: set[Place] = set()
        self._ambient = ambient
        self._words = words

    def __call__(self, *args: object, **kwargs: object) -> list[Tensor]:
        """Return the gradients that leave the region.

        Args:
            args: The arguments of the region's call.
            kwargs: Its keyword arguments, and as `name` the gradients that arrive, by the node that they are for.
        """
        gradients = cast("dict[Place, Gradients]", kwargs.pop(self.name))
        hooks = top_saved_tensor_hooks(True)
        assert hooks is not None
        again = _ForDerivative(*hooks)
        # What the forward saves is there for the backward alone, whose saves are those that are waited for.
        push_saved_tensor_hooks(Tensor.detach, again)
        try:
            with _arriving():
                outputs = tensors_in(self.body(*args, **kwargs))
                backward = self._backward(outputs, gradients, again.saving)
            with ExitStack() as stack:
                if not self._ambient.are_here():
                    self._ambient.restore(stack, ambient_state())
                return backward()
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
        self, outputs: list[Tensor], gradients: dict[Place, Gradients], saving: set[Node]
    ) -> Callable[[], list[Tensor]]:
        """Return a function that runs the backward, and returns the gradients that leave the region."""
        nodes: dict[Place, Node] = {}
        passes: dict[Node, tuple[list[bool], list[bool]]] = {}
        for number, behind in self.behind.items():
            for place, one in enumerate(self._found_again(outputs[number], behind)):
                nodes[number, place] = one
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


def _leave(leaving: list[Tensor], inside: list[bool], gradients: Gradients, _: Gradients) -> None:
    leaving += [one for one, is_inside in zip(gradients, inside, strict=False) if not is_inside and one is not None]


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
