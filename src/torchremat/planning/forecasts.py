"""The predicted step under a plan: its bytes, its seconds, and its curve."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

PlainSource = Literal["measured", "predicted"]


@dataclass(frozen=True, kw_only=True)
class Point:
    """A point of a predicted step: its time, the live bytes, and what runs."""

    seconds: float
    live_bytes: int
    what: str


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """The predicted bytes and seconds of a training step under a plan, and of a plain one.

    Bytes are absolute: they include the live bytes before the step.

    Attributes:
        peak_bytes: Predicted peak of a training step: the larger of the next two.
        step_peak_bytes: Predicted peak of forward and backward.
        optimizer_peak_bytes: Peak of `optimizer.step()`; None if no optimizer was given.
        optimizer_state_bytes: State that the optimizer will have after its first step; part of `step_peak_bytes`.
        before_bytes: Live bytes before a step: parameters, gradients, buffers, optimizer state, inputs.
        kept_bytes: Predicted bytes that the forward leaves for the backward.
        where: What runs at the predicted peak of forward and backward.
        plain_peak_bytes: Peak of a step without any recompute.
        plain_source: Whether that was measured or predicted.
        plain_seconds: Seconds of forward and backward without any recompute, estimated.
        recompute_seconds: Seconds that recomputes add, estimated.
        recomputed_flops: Flops that recomputes add.
        recomputed_calls: Number of unit forwards that recomputes run.
        flops: Flops of one forward.
        floor_bytes: The smallest budget for which a plan was found.
        curve: The curve of the predicted step.
        plain_curve: The same without any recompute.
        moving_seconds: Seconds that copies into stores and back add, estimated.
        released_bytes: Bytes of the gradients that are freed in the backward.
        waiting_bytes: Bytes of the optimizer's state that waits in a store.
        stepping_seconds: Seconds that stepping in the backward, and moving the state, add, estimated.
    """

    peak_bytes: int
    step_peak_bytes: int
    optimizer_peak_bytes: int | None
    optimizer_state_bytes: int
    before_bytes: dict[str, int]
    kept_bytes: int
    where: str
    plain_peak_bytes: int
    plain_source: PlainSource
    plain_seconds: float
    recompute_seconds: float
    recomputed_flops: int
    recomputed_calls: int
    flops: int
    floor_bytes: int
    curve: tuple[Point, ...]
    plain_curve: tuple[Point, ...]
    moving_seconds: float = 0.0
    released_bytes: int = 0
    waiting_bytes: int = 0
    stepping_seconds: float = 0.0

    @property
    def is_by_optimizer(self) -> bool:
        """Whether the predicted peak is that of the optimizer's step, not one of forward and backward."""
        return self.peak_bytes > self.step_peak_bytes

    @property
    def slowdown(self) -> float:
        """Predicted seconds of a step over a plain step's."""
        added_s = self.recompute_seconds + self.moving_seconds + self.stepping_seconds
        return 1 + added_s / self.plain_seconds if self.plain_seconds else 1.0
