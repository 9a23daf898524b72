"""What is recomputed while a gradient is on its way.

    receive posted ── recompute region 3 ── recompute region 2 ── ... ── wait ── backward of regions 3, 2, 1, 0
                                          │
                    stops here when the gradient has come, or when the next region would not fit in the budget

The last region first: backward asks for it first. A region that was not reached is recomputed by the backward itself,
so nothing is recomputed that would not have been. On CUDA a recompute is only enqueued, before the stream is told to
wait, and the transfer is asked whether it has completed there.

Missing on purpose: recomputing for the microbatch after the next one; a budget large enough for that keeps instead.
"""

from __future__ import annotations

from collections.abc import Sequence

from torchremat._compat.pipelining import Work
from torchremat.pipeline.attaching.stages import SessionsOfStage


class Lookahead:
    """Recomputes ahead, within a budget.

    Args:
        budget_bytes: What may be recomputed ahead at once; None for no bound. With a bound, a region is recomputed
            ahead once it is known what that adds, that is, after the first time it was recomputed in a backward.
    """

    def __init__(self, budget_bytes: int | None) -> None:
        self._budget_bytes = budget_bytes

    def run(self, stage: SessionsOfStage, microbatch: int, works: Sequence[Work]) -> None:
        """Recompute for the microbatch whose gradient the works bring, until it is there."""
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
