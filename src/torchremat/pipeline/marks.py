"""Nodes that record when a piece of backward begins and ends.

      forward:    begin to end, by a clock        backward:  Mark 2 runs, then the piece, then Mark 1

      ---- Mark 1 ---- piece ---- Mark 2 ----

A stage whose input requires no grad has no Mark 1. Its piece ends when its worker begins another piece, or when the
backward ends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from torchremat._compat.autograd import at_end_of_backward
from torchremat.pipeline.dependency import replaced, with_grad
from torchremat.pipeline.recorder import Recorder
from torchremat.pipeline.streams import CpuStream, Stream
from torchremat.schedules.pipelines import Kind


class BackwardMark(torch.autograd.Function):
    """Passes tensors on; in backward, reports that it runs."""

    @staticmethod
    def forward(ctx: FunctionCtx, runs: Callable[[], None], *tensors: Tensor) -> tuple[Tensor, ...]:
        """Return the tensors."""
        ctx.set_materialize_grads(False)
        cast("Any", ctx).runs = runs
        return tuple(tensor.detach() for tensor in tensors)

    @staticmethod
    def backward(ctx: FunctionCtx, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return the gradients."""
        cast("Any", ctx).runs()
        return None, *grads


def _marked(tensors: Sequence[Tensor], runs: Callable[[], None]) -> list[Tensor]:
    places = with_grad(tensors)
    if not places:
        return list(tensors)
    return replaced(tensors, places, BackwardMark.apply(runs, *(tensors[place] for place in places)))


class Passage:
    """The work on one microbatch on one stage, forward and backward.

    Args:
        recorder: Records the events.
        stage: The number of the stage.
        microbatch: The number of the microbatch.
        forward: The kind of its event in the forward.
        backward: The kind of its event in the backward.
        stream: The stream that it runs on.
        open_passages: Passages of the same worker whose backward has begun and has no Mark 1. Updated here.
    """

    def __init__(
        self,
        recorder: Recorder,
        stage: int,
        microbatch: int,
        *,
        forward: Kind,
        backward: Kind,
        stream: Stream,
        open_passages: list[Passage],
    ) -> None:
        self._recorder = recorder
        self._step = recorder.step
        self._at = stage, microbatch
        self._kinds: tuple[Kind, Kind] = forward, backward
        self._stream = None if isinstance(stream, CpuStream) else stream
        self._open_passages = open_passages
        self._has_end = False
        self._running: AbstractContextManager[None] | None = None

    def runs(self) -> AbstractContextManager[None]:
        """Return a context for its forward."""
        return self._event(self._kinds[0])

    def recomputes(self) -> AbstractContextManager[None]:
        """Return a context for its recompute."""
        return self._event("recompute")

    def given(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return its inputs behind Mark 1."""
        if not self._recorder.on:
            return list(tensors)
        self._has_end = bool(with_grad(tensors))
        return _marked(tensors, self._end)

    def returned(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return its outputs behind Mark 2."""
        return _marked(tensors, self._begin) if self._recorder.on else list(tensors)

    def _begin(self) -> None:
        for passage in list(self._open_passages):
            passage._end()
        self._running = self._event(self._kinds[1])
        self._running.__enter__()
        if not self._has_end:
            self._open_passages.append(self)
            at_end_of_backward(self._end)

    def _end(self) -> None:
        running, self._running = self._running, None
        if running is not None:
            running.__exit__(None, None, None)
        if self in self._open_passages:
            self._open_passages.remove(self)

    def _event(self, kind: Kind) -> AbstractContextManager[None]:
        if self._recorder.step != self._step:
            return nullcontext()  # the backward of a step before the last one
        return self._recorder.event(*self._at, kind, stream=self._stream)
