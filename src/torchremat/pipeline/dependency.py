"""Edges of the autograd graph that say "before", where no data flows.

        a ---- Fork ---- a'            forward:  a' is made before b'
                  \
                 phony
                    \
        b ---------- Join -- b'        backward: Join runs before Fork

Forward goes from the left to the right, so backward runs `Join` first: the users of `b'` have run their backward before
the backward of the producer of `a` starts, although no data flows between them. All tensors of a microbatch pass
through one node, so the order holds for a loss on any of them.

Source: C. Kim et al., "torchgpipe: On-the-fly Pipeline Parallelism for Training Giant Models", arXiv:2004.09910, 2020,
section 2.2; there, only the first tensor of a microbatch passes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx


@cache
def phony_of(device: torch.device) -> Tensor:
    """Return a tensor without elements, always the same one for a device.

    A Function that returns it has to detach it, or its node would stay on the shared tensor.
    """
    return torch.empty(0, device=device)


class Fork(torch.autograd.Function):
    """Passes tensors on and begins an edge."""

    @staticmethod
    def forward(ctx: FunctionCtx, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Return the tensors, and the phony that carries the edge."""
        ctx.set_materialize_grads(False)
        phony = phony_of(tensors[0].device)
        return (*(tensor.detach() for tensor in tensors), phony.detach())

    @staticmethod
    def backward(ctx: FunctionCtx, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return the gradients of the tensors."""
        return grads[:-1]


class Join(torch.autograd.Function):
    """Passes tensors on and ends edges."""

    @staticmethod
    def forward(ctx: FunctionCtx, edges: int, *given: Tensor) -> tuple[Tensor, ...]:
        """Return the tensors, which follow the phonies of the edges."""
        ctx.set_materialize_grads(False)
        cast("Any", ctx).edges = edges
        return tuple(tensor.detach() for tensor in given[edges:])

    @staticmethod
    def backward(ctx: FunctionCtx, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return the gradients of the tensors; the edges carry nothing."""
        return (None,) * (1 + cast("Any", ctx).edges) + grads


class Passing(torch.autograd.Function):
    """Passes tensors on; in backward, acts before it passes their gradients on. A subclass names the node."""

    @staticmethod
    def forward(ctx: FunctionCtx, act: Callable[[], object], *tensors: Tensor) -> tuple[Tensor, ...]:
        """Return the tensors."""
        ctx.set_materialize_grads(False)
        cast("Any", ctx).act = act
        return tuple(tensor.detach() for tensor in tensors)

    @staticmethod
    def backward(ctx: FunctionCtx, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return the gradients."""
        cast("Any", ctx).act()
        return None, *grads


def fork_all(tensors: Sequence[Tensor]) -> tuple[list[Tensor], Tensor]:
    """Return the tensors of a microbatch, and the phony that begins an edge.

    Tensors that do not require grad are returned as they are; if none does, the phony carries no edge.
    """
    places = with_grad(tensors)
    if not places:
        device = tensors[0].device if tensors else torch.device("cpu")
        return list(tensors), phony_of(device)
    *forked, phony = Fork.apply(*(tensors[place] for place in places))
    return replace_at(tensors, places, lambda *_: forked), phony


def join_all(tensors: Sequence[Tensor], *phonies: Tensor) -> list[Tensor]:
    """Return the tensors of a microbatch, at which edges end.

    Tensors that do not require grad are returned as they are, so an edge cannot end at a microbatch without grad.
    """
    edges = [phony for phony in phonies if phony.requires_grad]
    return replace_at(tensors, with_grad(tensors) if edges else (), partial(Join.apply, len(edges), *edges))


def pass_all(node: type[Passing], act: Callable[[], object], tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the tensors of a microbatch behind a node that acts in backward before their gradients pass.

    Tensors that do not require grad are returned as they are; if none does, no node acts.
    """
    return replace_at(tensors, with_grad(tensors), partial(node.apply, act))


def with_grad(tensors: Sequence[Tensor]) -> list[int]:
    """Return the places of the tensors that are part of a graph."""
    if not torch.is_grad_enabled():
        return []
    return [place for place, tensor in enumerate(tensors) if tensor.requires_grad]


def replace_at(tensors: Sequence[Tensor], places: Sequence[int], node: Callable[..., Sequence[Tensor]]) -> list[Tensor]:
    """Return the tensors, with what `node` makes of those in some places there."""
    found = list(tensors)
    made = node(*(tensors[place] for place in places)) if places else ()
    for place, tensor in zip(places, made, strict=True):
        found[place] = tensor
    return found
