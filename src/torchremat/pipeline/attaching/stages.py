"""A session for each microbatch of a stage, and recomputes during the transfer of a gradient.

    piece of a microbatch         torch's method                               the session
    F   forward                   `forward_one_chunk`                          made
    B   whole backward            `backward_one_chunk`                         drops all as it goes; closed after it
    I   input pass                `backward_one_chunk(full_backward=False)`    drops tensors that no weight pass needs
    W   weight passes             `backward_weight_one_chunk`                  closed after it
        the step ends, or raises  `step` of the schedule                       closed

Some stages run everything in one of the two passes, which is then a whole backward: see `whole_pass_of`.

The stage keeps these objects, through its replaced attributes; nothing here keeps the stage.

    receive posted ── recompute region 3 ── recompute region 2 ── ... ── wait ── backward of regions 3, 2, 1, 0
                                          │
                    stops here when the gradient has arrived, or when the next region would not fit in the budget

The last region comes first: backward asks for it first. The backward itself recomputes a region that was not reached,
so no recompute is extra. On CUDA a recompute is only enqueued, before the stream is told to wait, and the check for the
transfer's completion happens there.

Missing on purpose: recomputing for the microbatch after the next one; a budget large enough for that keeps tensors
instead.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from contextlib import ExitStack
from typing import Any
from weakref import ref

import torch

from torchremat._compat.binding import Original, Patch
from torchremat._compat.pipelining import BACKWARD, FORWARD, WEIGHT, TorchStage, Work, whole_pass_of
from torchremat.pipeline.event_recorder import Recorder
from torchremat.regions.footprints import footprint_bytes
from torchremat.regions.sessions import Session
from torchremat.regions.slots import Recomputable
from torchremat.regions.threads import plainly
from torchremat.schedules.pipelines import Kind


class SessionsOfStage:
    """The sessions of the microbatches that a stage holds.

    Attributes:
        index: The number of the stage.
        costs: The bytes that a recompute adds to memory, by region in the order of the forward, once known.

    Args:
        stage: The stage, which is not kept.
        plain: The microbatches that run without regions.
        weighs: Whether `costs` are measured.
    """

    def __init__(self, stage: TorchStage, recorder: Recorder, plain: Container[int], *, weighs: bool) -> None:
        self._stage = ref(stage)
        self._recorder = recorder
        self._plain = plain
        self._weighs = weighs
        self._calls = {name: Original(stage, name) for name in (FORWARD, BACKWARD, WEIGHT)}
        self._whole = whole_pass_of(stage)
        self._open: dict[int, Session] = {}
        self._drops = True  # until a weight pass needs a tensor that an input pass has dropped
        self.index = stage.stage_index
        self.costs: dict[int, int] = {}

    def patches(self) -> list[Patch]:
        """Replace the methods that torch calls, for as long as the patches last."""
        stage = self._stage()
        pieces = {FORWARD: self._forward, BACKWARD: self._backward, WEIGHT: self._weight}
        return [Patch(stage, name, piece) for name, piece in pieces.items()]

    def get(self, microbatch: int) -> Session | None:
        """Return the session of a microbatch that is between its forward and the end of its backward."""
        return self._open.get(microbatch)

    def __len__(self) -> int:
        return len(self._open)

    def close(self) -> None:
        """Close every session."""
        while self._open:
            self._open.popitem()[1].close()

    def _forward(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> object:
        call = self._calls[FORWARD]
        if not self._has_backward() or not torch.is_grad_enabled():
            return call(fwd_chunk_id, *args, **kwargs)
        self._close(fwd_chunk_id)
        session = self._open[fwd_chunk_id] = Session(serves_all=self._drops, watch=_RecomputeWatch(self, fwd_chunk_id))
        with self._recorder.event(self.index, fwd_chunk_id, "forward"), session.active(), ExitStack() as stack:
            if fwd_chunk_id in self._plain:
                stack.enter_context(plainly())
            return call(fwd_chunk_id, *args, **kwargs)

    def _backward(
        self, bwd_chunk_id: int, loss: object = None, full_backward: bool = True, *args: Any, **kwargs: Any
    ) -> object:
        kind = "backward" if full_backward else "input"
        done = self._piece(BACKWARD, kind, bwd_chunk_id, loss, full_backward, *args, **kwargs)
        if full_backward:
            self._close(bwd_chunk_id)
        return done

    def _weight(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> object:
        done = self._piece(WEIGHT, "weight", bwd_chunk_id, *args, **kwargs)
        self._close(bwd_chunk_id)
        return done

    def _piece(self, name: str, kind: Kind, microbatch: int, *args: Any, **kwargs: Any) -> object:
        call, session = self._calls[name], self._open.get(microbatch)
        if session is None:
            return call(microbatch, *args, **kwargs)
        with self._recorder.event(self.index, microbatch, kind), session.active(), ExitStack() as stack:
            if kind in ("backward", self._whole):
                session.passes = 1  # so tensors that are recomputed, or held by a policy, are dropped at their use
            elif kind == "input" and self._drops:
                stack.enter_context(session.input_pass())
            return call(microbatch, *args, **kwargs)

    def _has_backward(self) -> bool:
        stage = self._stage()
        return stage is not None and stage.has_backward

    def _close(self, microbatch: int) -> None:
        session = self._open.pop(microbatch, None)
        if session is not None:
            session.close()


class _RecomputeWatch:
    """Follows the recomputes of one microbatch."""

    def __init__(self, sessions: SessionsOfStage, microbatch: int) -> None:
        self.sessions = sessions
        self.microbatch = microbatch
        self._running = ExitStack()  # the event of a recompute, while that runs

    def recomputing(self, number: int) -> None:
        """Begin to record it."""
        self._running.close()
        event = self.sessions._recorder.event(self.sessions.index, self.microbatch, "recompute")
        self._running.enter_context(event)

    def recomputed(self, number: int, region: Recomputable, *, is_whole: bool) -> None:
        """Record the recompute, and the memory that it has added if it is the first of that whole region."""
        sessions = self.sessions
        self._running.close()
        if is_whole and sessions._weighs and number not in sessions.costs:
            session = sessions.get(self.microbatch)
            if session is not None:
                sessions.costs[number] = footprint_bytes(region, session)

    def dropped_too_early(self) -> None:
        """Drop nothing early in later microbatches."""
        self.sessions._drops = False


class Lookahead:
    """Recomputes ahead, within a budget.

    Args:
        budget_bytes: The most bytes recomputed ahead at once; None for no bound. With a bound, a region is recomputed
            ahead once its bytes are known, that is, after its first recompute in a backward.
    """

    def __init__(self, budget_bytes: int | None) -> None:
        self._budget_bytes = budget_bytes

    def run(self, stage: SessionsOfStage, microbatch: int, works: Sequence[Work]) -> None:
        """Recompute for the microbatch whose gradient the works transfer, until the gradient has arrived."""
        session = stage.get(microbatch)
        left_bytes = self._budget_bytes
        while session is not None and not all(work.is_completed() for work in works):
            number = session.next_number()
            if number is None:
                return
            if left_bytes is not None:
                left_bytes -= stage.costs.get(number, left_bytes + 1)
                if left_bytes < 0:
                    return
            session.recompute()
