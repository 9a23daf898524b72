"""The derivative of a region is a region: what the graph of a gradient saves is recomputed as well.

NOTE [ The derivative of a region ]
A backward with `create_graph=True` builds the graph of the gradient, and its nodes save again: gradients, and what the
region has just recomputed for them. So while such a backward runs a node of a region, another region packs what is
saved: its derivative, whose call is the forward of the region and the backward through it, and whose inputs are those
of the region and the gradients that arrive in it.

    forward            x ──► region ──► y             saves are slots of the region
    create_graph       dx ◄── nodes of it ◄── dy      its slots are asked for; saves are slots of the derivative
    another backward   x ──► y, then dy ──► dx        a slot of the derivative is asked for: both run again

Autograd's graphs are those of plain training, node for node, and only saved values come from elsewhere. So sums of
gradients have the same order, and all bits are the same.

    output nodes of a region       a hook notes the gradients that arrive, and which edges they follow from there
    its other nodes                while the backward runs, hooks compare what arrives with what nodes of it return
    first unpack in a node         pushes the hooks of the derivative; autograd drops them when the node has run
    the same in the recompute      pushes the hooks of the recompute

A gradient arrives elsewhere than at an output if other code uses a tensor that the region has kept, or if the backward
goes through the graph of another gradient: an input of the derivative like all others. The engine runs the nodes that
one thread has made in the opposite order, so a forward and a recompute save in the same order.

The derivative itself is a region whose outputs are the gradients that leave it, so it has a derivative as well. It has
none if a gradient has arrived where other nodes of the region contribute: the recompute has the sum alone.

Missing on purpose: regions of several calls, sessions, transforms, and a gradient taken inside of the region's own
forward, which its recompute takes again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from itertools import compress
from typing import TYPE_CHECKING, NamedTuple
from weakref import ReferenceType, ref

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node
from torch.utils.hooks import RemovableHandle

from torchremat._compat.autograd import (
    at_end_of_backward,
    current_graph_task,
    current_node,
    is_followed,
    pop_saved_tensor_hooks,
    push_saved_tensor_hooks,
    sequence_number,
    top_saved_tensor_hooks,
)
from torchremat._compat.modes import modes_now
from torchremat.ambient.global_state import AmbientState, ambient_state
from torchremat.regions.calls import Body, Call
from torchremat.regions.hooks import unpack
from torchremat.regions.threads import thread
from torchremat.tensors.structure import split, tensors_in

if TYPE_CHECKING:
    from torchremat._compat.autograd import Pack, Unpack
    from torchremat.regions.region import Region

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


def _edges(nodes: Iterable[Node]) -> list[GradientEdge]:
    return [GradientEdge(*edge) for one in nodes for edge in one.next_functions if edge[0] is not None]


class Arrivals:
    """Waits for the gradients that arrive in a region while the graph of a gradient is built.

    Args:
        region: The region.
        made: The nodes that its call has made.
        outputs: Those that have made its outputs.
    """

    __slots__ = ("__weakref__", "_building", "_made", "_region")

    def __init__(self, region: Region, made: Made, outputs: Iterable[Node]) -> None:
        self._region = ref(region)
        self._made = made
        self._building: ReferenceType[Derivative] | None = None
        waiting = thread.now.arriving
        if waiting is None:
            self._wait(outputs)
        else:
            waiting.append(partial(self._wait, outputs))

    def _wait(self, outputs: Iterable[Node]) -> None:
        for number, node in enumerate(outputs):
            node.register_prehook(partial(self._arrive, number))

    def _arrive(self, number: int, gradients: Gradients) -> None:
        if not torch.is_grad_enabled():
            return
        region, node = self._region(), current_node()
        if region is None or node is None or len(region.calls) != 1 or region.is_running:
            return
        building = self._now()
        if building is None:
            building = Derivative(region, self._made)
            self._building = ref(building)
            # The backward keeps it, also if it raises: its context may lead to the graph.
            at_end_of_backward(building.end)
        building.begin(number, node, gradients)

    def asked(self) -> None:
        """Let the derivative pack what the running node saves, now that it has asked the region for a tensor."""
        building, node = self._now(), current_node()
        if building is not None and node is not None and building.watches(node):
            push_saved_tensor_hooks(building.pack, unpack)

    def _now(self) -> Derivative | None:
        building = None if self._building is None else self._building()
        return building if building is not None and building.task == current_graph_task() else None


class Derivative:
    """The derivative of a region, while a backward builds the graph that it saves for.

    Args:
        region: The region.
        made: The nodes that its call has made.

    Attributes:
        pack: Its hook.
        task: The backward.
    """

    __slots__ = (
        "__weakref__", "_body", "_call", "_edges", "_first", "_handles", "_has_sums", "_leaving", "_made", "_region",
        "_taken", "_terms", "pack", "task",
    )  # fmt: skip

    def __init__(self, region: Region, made: Made) -> None:
        call = region.calls[0]
        self.task = current_graph_task()
        # No policy, since none has been asked for the backward.
        settings = replace(region.settings, policy=None, observer=None, cuts=())
        self._region = type(region)(settings, f"the derivative of {region.name(0)}")
        self._region.held += region.held
        self._region.began = modes_now()
        self.pack = self._region.pack
        self._body = Differentiated(call.body, ambient_state())
        self._call = call.again(self._body, ref(self._region))
        self._region.calls.append(self._call)
        self._made = made
        self._first = sequence_number()
        # By number of a node: where its gradients go in the region, None for those that leave it.
        self._edges: dict[int, list[tuple[int, int] | None]] = {}
        self._taken: set[int] = set()
        # What the nodes that have run have returned, by number and place of the node that it is for.
        self._terms: dict[tuple[int, int], list[Tensor]] = {}
        self._leaving: dict[Node, None] = {}
        self._has_sums = False
        self._handles: list[RemovableHandle] = []

    def begin(self, number: int, node: Node, gradients: Gradients) -> None:
        """Take the gradients for an output's node, and watch the nodes that they reach."""
        nodes = self._made.behind(node)
        self._body.followed[number] = [is_followed(edge.node) for edge in _edges(nodes)]
        self._take((number, 0), node._sequence_nr(), gradients)
        watch = ref(self)
        for place, one in enumerate(nodes):
            key = one._sequence_nr()
            if key not in self._edges:
                self._edges[key] = [
                    (following._sequence_nr(), at) if following is not None and self._made.has(following) else None
                    for following, at in one.next_functions
                ]
                self._handles.append(one.register_prehook(partial(_begins, watch, key, (number, place))))
                self._handles.append(one.register_hook(partial(_ends, watch, key)))

    def watches(self, node: Node) -> bool:
        """Return whether a node is behind one of the outputs whose gradients have arrived."""
        return node._sequence_nr() in self._edges

    def begins(self, key: int, place: Place, gradients: Gradients) -> None:
        """Take the gradients for a node, unless they are what other nodes of the region have returned."""
        terms = [self._terms.pop((key, at), []) for at in range(len(gradients))]
        if key in self._taken:
            self._has_sums |= any(terms)
        elif not all(map(_is_sum, gradients, terms)):
            self._has_sums |= any(terms)
            self._take(place, key, gradients)

    def ends(self, key: int, gradients: Gradients) -> None:
        """Note what a node returns."""
        for to, one in zip(self._edges[key], gradients, strict=False):
            if one is not None and to is not None:
                self._terms.setdefault(to, []).append(one)
            elif one is not None and one.grad_fn is not None:
                self._leaving[one.grad_fn] = None

    def _take(self, place: Place, key: int, gradients: Gradients) -> None:
        call, held = self._call, self._region.held
        tensors: list[Tensor] = [_NOTHING] * len(call.sources)  # its other arguments
        call.template[0][0][place] = split(gradients, tensors, [])
        given = tensors[len(call.sources) :]
        call.sources += range(len(held), len(held) + len(given))
        held += map(self._region.held_tensor, given)
        self._taken.add(key)

    def end(self) -> None:
        """End the first run."""
        for one in self._handles:
            one.remove()
        self._call.slots = len(self._region.slots)
        if self._region.fingerprints is not None:
            self._region.fingerprints.settle()
        if self._region.slots and not self._has_sums:
            made = Made(self._first)
            self._region.arrivals = Arrivals(self._region, made, filter(made.has, self._leaving))


def _begins(watch: ReferenceType[Derivative], key: int, place: Place, gradients: Gradients) -> None:
    if (building := watch()) is not None and building.task == current_graph_task():
        building.begins(key, place, gradients)


def _ends(watch: ReferenceType[Derivative], key: int, gradients: Gradients, _: Gradients) -> None:
    if (building := watch()) is not None and building.task == current_graph_task():
        building.ends(key, gradients)


def _is_sum(gradient: Tensor | None, terms: list[Tensor]) -> bool:
    """Return whether autograd has added up these terms and nothing else; False if that cannot be told."""
    if gradient is None or len(terms) < 2:
        return gradient is (terms[0] if terms else None)
    edge = gradient.grad_fn, gradient.output_nr
    for one in reversed(terms[1:]):
        node = edge[0]
        if node is None or node.name() != "AddBackward0" or node.next_functions[1] != (one.grad_fn, one.output_nr):
            return False
        edge = node.next_functions[0]
    return edge == (terms[0].grad_fn, terms[0].output_nr)


_NOTHING = torch.empty(0)


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
        again = _Again(*hooks)
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
            edges |= dict.fromkeys(compress(_edges(nodes[number]), followed))
        ends = [one for one in edges if not any(edge in edges for edge in _edges([one.node]))]
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
def _arriving() -> Iterator[None]:
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


class _Again:
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
