r"""A recompute that does not wait for the gradient.

A region recomputes when a node of it asks for a saved tensor, and that node runs when its gradient is there. If the
gradient comes from another device, the time of its copy is lost. So a node without work of its own is placed behind the
copy:

      forward:    region ---- Wait 1 ---- Recompute 2 ---- Copy 3 ----> next device

      backward:   the gradient's copy is enqueued (3), the recompute is enqueued (2), and only then the device waits for
                  the copy (1): the stream of the region, on which the recompute was enqueued before.

Recomputed tensors belong to the running backward, or to its session; a second backward recomputes again.

Source: torchgpipe (see `dependency`), sections 2.1 and 3.1; its pair of Functions runs the region's backward itself,
which allows one backward, of one output.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast
from weakref import ReferenceType, ref

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from torchremat._compat.autograd import current_graph_task
from torchremat.pipeline.dependency import replaced, with_grad
from torchremat.regions.region import Region
from torchremat.regions.sessions import active_session


class Recompute(torch.autograd.Function):
    """Passes tensors on; in backward, recomputes a region before it passes their gradients on."""

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        region: ReferenceType[Region],
        around: Callable[[], AbstractContextManager[None]],
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        """Return the tensors."""
        ctx.set_materialize_grads(False)
        cast("Any", ctx).region, cast("Any", ctx).around = region, around
        return tuple(tensor.detach() for tensor in tensors)

    @staticmethod
    def backward(ctx: FunctionCtx, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return the gradients."""
        region = cast("ReferenceType[Region]", cast("Any", ctx).region)()
        if region is not None:  # else its graph has been freed, and autograd raises the error
            with cast("Any", ctx).around():
                session = active_session()
                region.recompute_for(session or current_graph_task())
                if session is None:
                    # A popped skip is mostly joined with another tensor, and the result is saved in its place.
                    region.let_go()
        return None, None, *grads


def precede(
    region: Region, tensors: Sequence[Tensor], around: Callable[[], AbstractContextManager[None]] = nullcontext
) -> list[Tensor]:
    """Return a region's results behind a node that starts its recompute before their gradients have arrived.

    Args:
        region: The region.
        tensors: Its results.
        around: Returns a context for the recompute.
    """
    places = with_grad(tensors)
    if not places:
        return list(tensors)
    return replaced(tensors, places, Recompute.apply(ref(region), around, *(tensors[place] for place in places)))
