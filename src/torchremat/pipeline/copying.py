"""Microbatches between devices: nodes that copy, and nodes that let streams wait.

      compute stream of stage j-1 | copy streams | compute stream of stage j
                                  |              |
              ... --- Wait 1 -----|---- Copy 2 --|---- Wait 3 --- ...

    1  the copy starts when the microbatch has been computed; backward: computing continues when its gradient is there
    2  from device to device, on the copy streams of both
    3  computing continues when the copy is there; backward: the copy of the gradient starts when it has been computed

Tensors that do not require grad take the same way outside the graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from torchremat._compat.accelerators import CpuStream, Stream
from torchremat._compat.streams import current_stream, record_stream, use_stream, wait_stream
from torchremat.pipeline.dependency import Passing, pass_all, replace_at, with_grad


def copied(tensor: Tensor, source: Stream, target: Stream) -> Tensor:
    """Return a tensor on the device of `target`, copied on both streams; itself if it is there."""
    device = target.device
    if tensor.device == device:
        return tensor
    # A copy into or out of memory that is not pinned blocks by itself.
    with use_stream(source), use_stream(target):
        copy = tensor.to(device, non_blocking=not isinstance(target, CpuStream))
    record_stream(tensor, source)
    # The next computation with it runs on another stream.
    record_stream(copy, current_stream(device))
    return copy


class Copy(torch.autograd.Function):
    """Copies tensors to another device."""

    @staticmethod
    def forward(ctx: FunctionCtx, source: Stream, target: Stream, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Return the copies."""
        ctx.set_materialize_grads(False)
        cast("Any", ctx).streams = source, target
        return tuple(copied(tensor, source, target).detach() for tensor in tensors)

    @staticmethod
    def backward(ctx: FunctionCtx, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return the gradients, copied back."""
        source, target = cast("Any", ctx).streams
        back = (None if grad is None else copied(grad, target, source) for grad in grads)
        return None, None, *back


class Wait(Passing):
    """In backward, makes the awaited stream wait for the waiting stream."""


def copy_all(tensors: Sequence[Tensor], source: Stream, target: Stream) -> list[Tensor]:
    """Return the tensors of a microbatch on the device of `target`."""
    places = with_grad(tensors)
    found = [tensor if place in places else copied(tensor, source, target) for place, tensor in enumerate(tensors)]
    return replace_at(found, places, partial(Copy.apply, source, target))


def wait_all(tensors: Sequence[Tensor], awaited: Stream, waiting: Stream) -> list[Tensor]:
    """Return the tensors of a microbatch, for use on `waiting` when `awaited` is done with them."""
    wait_stream(waiting, awaited)
    return pass_all(Wait, lambda: wait_stream(awaited, waiting), tensors)
