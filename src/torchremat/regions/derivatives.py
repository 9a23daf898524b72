"""The derivative of a region is a region: what the graph of a gradient saves is recomputed as well.

NOTE [ The derivative of a region ]
A backward with `create_graph=True` builds the graph of the gradient, and its nodes save again: gradients, and what the
region has just recomputed for them. So while such a backward runs a node of a region, another region packs what is
saved: its derivative, whose calls are those of the region and, after them, the backward through these, and whose inputs
are those of the region and the gradients that arrive in it.

    forward            x ──► region ──► y             saves are slots of the region
    create_graph       dx ◄── nodes of it ◄── dy      its slots are asked for; saves are slots of the derivative
    another backward   x ──► y, then dy ──► dx        a slot of the derivative is asked for: both run again

Autograd's graphs are those of plain training, node for node, and only saved values come from elsewhere. So sums of
gradients have the same order, and all bits are the same.

    output nodes of a region       a hook notes the gradients that arrive, and which edges they follow from there
    its other nodes                while the backward runs, hooks compare what arrives with what nodes of it return
    unpack in a node               pushes the hooks of the derivative; autograd drops them when the node has run
    the same in the recompute      pushes the hooks of the recompute

A gradient arrives elsewhere than at an output if other code uses a tensor that the region has kept, or if the backward
goes through the graph of another gradient: an input of the derivative like all others.

The engine runs the nodes that one thread has made in the opposite order, whatever else it runs between them, so a
forward and a recompute save in the same order. Where other threads have made nodes, a node may come late: it saves by
itself, as do those after it.

The derivative itself is a region whose outputs are the gradients that leave it, so it has a derivative as well. It has
none if a gradient has arrived where other nodes of the region contribute, since the recompute has the sum alone, nor if
another thread than that of the forward has run the backward, as that of a device does.

A node belongs to the region if a call has made it, by its number; each thread has numbers of its own, so the nodes of
inputs are known as well. Code between the calls of a region makes nodes outside of it, whose gradients arrive.

Missing on purpose: sessions, transforms, gradients in batches, and a gradient taken inside of the region's own forward,
which its recompute takes again.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from operator import attrgetter
from threading import get_ident
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
    pop_saved_tensor_hooks,
    push_saved_tensor_hooks,
    sequence_number,
)
from torchremat._compat.dynamo import outside_graphs
from torchremat._compat.modes import Began, modes_now
from torchremat._compat.transforms import is_batched, is_transformed
from torchremat.ambient.global_state import ambient_state
from torchremat.regions.calls import Call, Source
from torchremat.regions.differentiated import (
    Behind,
    Differentiated,
    Gradients,
    Output,
    Place,
    RunAgain,
    nodes_behind,
)
from torchremat.regions.hooks import Waiting, unpack
from torchremat.regions.sessions import active_session
from torchremat.regions.settings import Settings
from torchremat.regions.threads import thread
from torchremat.regions.values import Fingerprints
from torchremat.tensors.structure import split, tensors_in

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


_grad_fn: Callable[[Tensor], Node | None] = attrgetter("grad_fn")


def nodes_of(output: object) -> Iterator[Node | None]:
    """Return the nodes of the tensors in an output."""
    return map(_grad_fn, (output,) if type(output) is Tensor else tensors_in(output))


class Arrivals:
    """The nodes that a region makes. Waits for the gradients that arrive there while a backward builds a graph.

    Args:
        region: The region.

    Attributes:
        thread: The thread that makes the nodes.
    """

    __slots__ = ("__weakref__", "_building", "_others", "_region", "_spans", "thread")

    def __init__(self, region: Differentiable) -> None:
        self._region = ref(region)
        self._building: ReferenceType[Derivative] | None = None
        self._spans: list[tuple[int, int]] = []  # the numbers of nodes, first and last, of each call
        self._others: list[Node] = []  # that have made inputs: another thread gives the same numbers once more
        self.thread = get_ident()

    def begins(self, inputs: Sequence[Tensor] = (), sources: Sequence[Source] = ()) -> Arrivals:
        """Note that a call begins, and return itself.

        Args:
            inputs: Its inputs.
            sources: Where each of them comes from: some may be outputs of earlier calls.
        """
        now = sequence_number()
        own = [one for one, to in zip(inputs, sources, strict=True) if type(to) is int] if self._spans else inputs
        self._spans.append((now, now))
        self.given(own)
        return self

    def given(self, inputs: Sequence[Tensor]) -> None:
        """Note tensors that none of the nodes has made."""
        first, _ = self._spans[0]
        for one in inputs:
            if (node := one.grad_fn) is not None and node._sequence_nr() >= first:
                self._others.append(node)

    def has(self, node: Node | None) -> bool:
        """Return whether a node is one of those that the region has made, by its number."""
        if node is None:
            return False
        number = node._sequence_nr()
        for first, end in self._spans:
            if first <= number < end:
                return node not in self._others
        return False

    def ended(self, call: int, outputs: Iterable[Node | None]) -> Arrivals:
        """Note that a call has ended, wait for the gradients of its outputs, if it has made them, and return itself.

        Args:
            call: The number of the call.
            outputs: The node of each output.
        """
        self._spans[-1] = self._spans[-1][0], sequence_number()
        deriving, found = thread.now.deriving, []
        for place, node in enumerate(outputs):
            if node is None or node in found or not self.has(node):
                continue
            found.append(node)
            wait = partial(self._arrive, (call, place))
            if deriving is None:
                node.register_prehook(wait)
            else:
                deriving.arriving.append(partial(node.register_prehook, wait))
        return self

    def _arrive(self, output: Output, gradients: Gradients) -> None:
        if torch.is_grad_enabled():
            self._take(output, gradients)

    @outside_graphs  # compiled autograd traces hooks
    def _take(self, output: Output, gradients: Gradients) -> None:
        if is_transformed() or active_session() is not None or any(map(_is_batched, gradients)):
            return
        region, node = self._region(), current_node()
        if region is None or node is None or not region.calls or region.is_running:
            return
        building = self._now()
        if building is None:
            building = Derivative(region, self)
            self._building = ref(building)
            # The backward keeps it, also if it raises: its context may lead to the graph.
            at_end_of_backward(building.end)
        building.begin(output, node, gradients)

    def asked(self, find: Callable[[], Tensor]) -> Tensor:
        """Return a tensor that the running node asks for, and let the derivative pack what it then saves."""
        building, node = self._now(), current_node()
        if building is None or node is None:
            return find()
        if building.is_packing(node):
            pop_saved_tensor_hooks()  # what is recomputed for a node is not what it saves
        tensor = find()
        if building.saves(node):
            push_saved_tensor_hooks(building.pack, unpack)
        return tensor

    def _now(self) -> Derivative | None:
        building = None if self._building is None else self._building()
        return building if building is not None and building.task == current_graph_task() else None


class Derivative:
    """The derivative of a region, while a backward builds the graph that it saves for.

    Args:
        region: The region.
        made: The nodes that it has made.

    Attributes:
        pack: Its hook.
        task: The backward.
    """

    __slots__ = (
        "__weakref__", "_body", "_call", "_edges", "_gradients", "_handles", "_has_sums", "_leaving", "_lowest",
        "_made", "_outputs", "_own", "_places", "_region", "_taken", "_terms", "pack", "task",
    )  # fmt: skip

    def __init__(self, region: Differentiable, made: Arrivals) -> None:
        self.task = current_graph_task()
        # No policy, since none has been asked for the backward.
        settings = replace(region.settings, policy=None, observer=None, cuts=())
        make = cast("Callable[[Settings, str], Differentiable]", type(region))
        name = region.name(0)
        self._region = own = make(settings, f"the derivative of {name}")
        own.held += region.held
        own.began = modes_now()
        if own.fingerprints is not None:  # the forward may have kept what has other values in each run
            own.fingerprints = Fingerprints([one for call in region.calls for one in call.world.copied()])
        self.pack = own.pack
        self._body = Differentiated(region.calls[:], name)
        self._outputs: dict[Output, object] = {}
        self._gradients: dict[Place, object] = {}
        template = (), {"outputs": self._outputs, "gradients": self._gradients}
        self._call = Call(self._body, template, [], ref(own))
        self._call.ambient_state, self._call.context = ambient_state(), region.calls[-1].context
        own.calls += [call.again(RunAgain(call.body, self._body), ref(own)) for call in region.calls]
        own.calls.append(self._call)
        self._made = made
        made.given([one for call in region.calls for one in call.captured_graphs()])
        self._own = Arrivals(own)
        self._own.begins()
        # By number of a node: where it is found, and where its gradients go, None for those that leave the region.
        self._places: dict[int, Place] = {}
        self._edges: dict[int, list[tuple[int, int] | None]] = {}
        self._lowest: float = math.inf  # the number of the last node that saves
        self._taken: set[int] = set()
        # What the nodes that have run have returned, by number and place of the node that it is for.
        self._terms: dict[tuple[int, int], list[Tensor]] = {}
        self._leaving: list[Node | None] = []
        self._has_sums = False
        self._handles: list[RemovableHandle] = []

    def begin(self, output: Output, node: Node, gradients: Gradients) -> None:
        """Take the gradients for an output's node, and watch the nodes that they reach."""
        if node._sequence_nr() in self._places:
            return  # reached from another output, it is watched
        made, behind = self._made, Behind([], [])

        def look(_: int, one: Node) -> list[bool]:
            self._body.mark(one)
            following = [following for following, _ in one.next_functions]
            behind.inside.append([*map(made.has, following)])
            behind.followed.append([following is not None and is_followed(following) for following in following])
            return behind.inside[-1]

        nodes = nodes_behind(node, look)
        self._body.behind[output] = behind
        self._outputs[output] = split(_NOTHING, [_NOTHING] * len(self._call.sources), [])
        self._call.sources.append(output)
        self._take((output, 0), node._sequence_nr(), gradients)
        watch: ReferenceType[Derivative] = ref(self)
        for place, one in enumerate(nodes):
            key = one._sequence_nr()
            if key not in self._places:
                self._places[key] = output, place
                self._edges[key] = [
                    (following._sequence_nr(), at) if is_inside and following is not None else None
                    for (following, at), is_inside in zip(one.next_functions, behind.inside[place], strict=True)
                ]
                self._handles.append(one.register_prehook(partial(_begins, watch, key)))
                self._handles.append(one.register_hook(partial(_ends, watch, key)))

    def is_packing(self, node: Node) -> bool:
        """Return whether its hooks are there for a node."""
        return node._sequence_nr() == self._lowest

    def saves(self, node: Node) -> bool:
        """Return whether what a node saves is packed: one behind an output, and in the order of the recompute."""
        key = node._sequence_nr()
        if key not in self._places:
            return False
        if key > self._lowest:
            self._lowest = -1  # See NOTE [ The derivative of a region ]
            return False
        self._lowest = key
        self._body.saving.add(self._places[key])
        return True

    def begins(self, key: int, gradients: Gradients) -> None:
        """Take the gradients for a node, unless they are what other nodes of the region have returned."""
        terms = [self._terms.pop((key, at), []) for at in range(len(gradients))]
        if key in self._taken:
            self._has_sums |= any(terms)
        elif not all(map(_is_sum, gradients, terms)):
            self._has_sums |= any(terms)
            self._take(self._places[key], key, gradients)

    def ends(self, key: int, gradients: Gradients) -> None:
        """Note what a node returns."""
        for to, one in zip(self._edges[key], gradients, strict=False):
            if one is not None and to is not None:
                self._terms.setdefault(to, []).append(one)
            elif one is not None:
                self._leaving.append(one.grad_fn)

    def _take(self, place: Place, key: int, gradients: Gradients) -> None:
        call, held = self._call, self._region.held
        tensors: list[Tensor] = [_NOTHING] * len(call.sources)  # its other arguments
        self._gradients[place] = split(gradients, tensors, [])
        given = tensors[len(call.sources) :]
        self._own.given(given)
        call.sources += range(len(held), len(held) + len(given))
        held += map(self._region.held_tensor, given)
        self._taken.add(key)

    def end(self) -> None:
        """End the first run."""
        for one in self._handles:
            one.remove()
        self._region.has_run(self._call)
        # Numbers of another thread's nodes say nothing of where these are, nor in which order they run.
        is_ordered = self._lowest >= 0 and self._made.thread == self._own.thread
        if self._region.slots and is_ordered and not self._has_sums:
            self._region.arrivals = self._own.ended(len(self._region.calls) - 1, self._leaving)


def _is_batched(gradient: Tensor | None) -> bool:
    return gradient is not None and is_batched(gradient)


def _begins(watch: ReferenceType[Derivative], key: int, gradients: Gradients) -> None:
    if (building := watch()) is not None and building.task == current_graph_task():
        building.begins(key, gradients)


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
