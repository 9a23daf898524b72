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

from abc import abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, cast
from weakref import ReferenceType, ref

import torch
from torch import Tensor
from torch.autograd.graph import Node
from torch.utils.hooks import RemovableHandle

from torchremat._compat.autograd import (
    at_end_of_backward,
    current_graph_task,
    current_node,
    is_followed,
    push_saved_tensor_hooks,
    sequence_number,
)
from torchremat._compat.modes import Began, modes_now
from torchremat.ambient.global_state import ambient_state
from torchremat.regions.differentiated import Differentiated, Gradients, Made, Place, edges_of
from torchremat.regions.hooks import Waiting, unpack
from torchremat.regions.sessions import active_session
from torchremat.regions.settings import Settings
from torchremat.regions.threads import thread
from torchremat.tensors.structure import split

if TYPE_CHECKING:
    from torchremat._compat.autograd import Pack


class Differentiable(Waiting):
    """A region as what may be differentiated again.

    Attributes:
        settings: How it behaves.
        began: The modes in which its last call began.
        arrivals: Waits for the gradients of its outputs, if it has a derivative.
    """

    __slots__ = ("arrivals", "began", "settings")

    settings: Settings
    began: Began
    arrivals: Arrivals | None

    # Whether it has a derivative: the gradients of transforms have levels as well.
    derives = True

    @property
    @abstractmethod
    def pack(self) -> Pack:
        """The hook for what its running call saves."""


class Arrivals:
    """Waits for the gradients that arrive in a region while the graph of a gradient is built.

    Args:
        region: The region.
        made: The nodes that its call has made.
        outputs: Those that have made its outputs.
    """

    __slots__ = ("__weakref__", "_building", "_made", "_region")

    def __init__(self, region: Differentiable, made: Made, outputs: Iterable[Node]) -> None:
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
        if (
            region is None
            or node is None
            or len(region.calls) != 1
            or region.is_running
            or active_session() is not None
        ):
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
        "_taken", "_template", "_terms", "pack", "task",
    )  # fmt: skip

    def __init__(self, region: Differentiable, made: Made) -> None:
        call = region.calls[0]
        self.task = current_graph_task()
        # No policy, since none has been asked for the backward.
        settings = replace(region.settings, policy=None, observer=None, cuts=())
        make = cast("Callable[[Settings, str], Differentiable]", type(region))
        self._region = make(settings, f"the derivative of {region.name(0)}")
        self._region.held += region.held
        self._region.began = modes_now()
        self.pack = self._region.pack
        self._body = Differentiated(call.body, ambient_state())
        self._template: dict[Place, object] = {}
        self._call = call.again(self._body, self._template, ref(self._region))
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
        self._body.followed[number] = [is_followed(edge.node) for edge in edges_of(nodes)]
        self._take((number, 0), node._sequence_nr(), gradients)
        watch: ReferenceType[Derivative] = ref(self)
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
        self._template[place] = split(gradients, tensors, [])
        given = tensors[len(call.sources) :]
        call.sources += range(len(held), len(held) + len(given))
        held += map(self._region.held_tensor, given)
        self._taken.add(key)

    def end(self) -> None:
        """End the first run."""
        for one in self._handles:
            one.remove()
        self._region.has_run(self._call)
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
