"""Recomputes during the transfer of a gradient.

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

from collections.abc import Sequence

from torchremat._compat.pipelining import Work
from torchremat.pipeline.attaching.stages import SessionsOfStage


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
