"""The microbatches that a device holds at each of its actions, derived from the order of its actions.

action    runs                                       afterwards
F         the forward of a microbatch                it is held, with the tensors that its tree keeps
R         its recompute, ahead of its gradient       it is held, and its backward comes next
B         its backward                               it is freed
I         the input pass of its backward             it is held, with the tensors that stay between the passes
W         the weight pass                            it is freed
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from torchremat.errors import bug
from torchremat.planning.searches.microbatches import Share
from torchremat.schedules.pipelines import Action

Phase = Literal["forward", "ahead", "backward", "first", "second", "last", "input", "weight", "copies", "loss"]


@dataclass(frozen=True)
class DeviceLoad:
    """A device at one of its actions.

    Attributes:
        running: The stage that runs; None during copies and the loss.
        phase: The phase that runs: the forward, a recompute ahead of the gradient, the whole backward, the backward of
            the first, second or last microbatch of several in one backward, a pass of a split backward, the copies
            before the forwards of a clock, or the loss between forward and backward.
        held: How many microbatches each stage holds before their backward, without the one that runs.
        between: How many each stage holds between the two passes of their backward.
        other_bytes: Other bytes: of the loss, or between stages.
    """

    running: int | None
    phase: Phase
    held: tuple[tuple[int, int], ...]
    between: tuple[tuple[int, int], ...] = ()
    other_bytes: int = 0

    def bytes_of(self, stage: int, share: Share) -> int:
        """The bytes that a stage adds under a tree."""
        held = dict(self.held).get(stage, 0) * share.kept_bytes
        held += dict(self.between).get(stage, 0) * share.split.between_bytes
        if stage != self.running:
            return held
        match self.phase:
            case "forward":
                return held + share.forward_bytes
            case "ahead":
                return held + share.ahead_bytes
            case "backward":
                return held + share.backward_bytes
            case "first":
                return held + share.sums.first_bytes
            case "second":
                return held + share.sums.second_bytes
            case "last":
                return held + share.sums.last_bytes
            case "input":
                return held + share.split.input_bytes
            case "weight":
                return held + share.split.weight_bytes
            case "copies" | "loss":
                return held


def loads_of(
    actions: Sequence[Action], left_bytes: Mapping[int, int], output_bytes: Mapping[int, int] | None = None
) -> list[DeviceLoad]:
    """Return the loads of a device, each once.

    Args:
        actions: The device's actions: forwards, recomputes ahead of gradients, and backwards, whole or split.
        left_bytes: By stage, the bytes that a microbatch leaves there when its backward has ended.
        output_bytes: By stage, the outputs of a microbatch, which the caller of its whole backward holds meanwhile.
    """
    return list(dict.fromkeys(_loads(actions, left_bytes, output_bytes or {})))


def _loads(
    actions: Sequence[Action], left_bytes: Mapping[int, int], output_bytes: Mapping[int, int]
) -> Iterator[DeviceLoad]:
    held, between, left = Counter[int](), Counter[int](), 0

    def load(stage: int, phase: Phase, own_bytes: int = 0) -> DeviceLoad:
        return DeviceLoad(stage, phase, sorted_counts(held), sorted_counts(between), other_bytes=left + own_bytes)

    for action in actions:
        stage = action.stage
        match action.kind:
            case "forward":
                yield load(stage, "forward")
                held[stage] += 1
            case "recompute":
                held[stage] -= 1
                yield load(stage, "ahead")
                held[stage] += 1
            case "backward":
                held[stage] -= 1
                yield load(stage, "backward", output_bytes.get(stage, 0))
                left += left_bytes.get(stage, 0)
            case "input":
                held[stage] -= 1
                yield load(stage, "input")
                between[stage] += 1
            case "weight":
                between[stage] -= 1
                yield load(stage, "weight")
                left += left_bytes.get(stage, 0)
            case "copy" | "wait":
                raise bug(f"an order with {action}, which an order cannot have")


def sorted_counts(counts: Counter[int]) -> tuple[tuple[int, int], ...]:
    """Return counts in the form that a load has."""
    return tuple(sorted((+counts).items()))
