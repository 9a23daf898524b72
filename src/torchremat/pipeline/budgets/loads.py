"""How many microbatches a device holds at each of its actions, read off the order in which it runs them.

    action    runs                                       afterwards
    F         the forward of a microbatch                it is held, with what its tree keeps
    B         its backward                               it is gone
    I         the input part of its backward             it is held, with all that its stage saves: recomputes are done
    W         the weight part                            it is gone

What a stage holds after an input part is less than all that it saves, by what no weight needs: an upper bound.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from torchremat.errors import bug
from torchremat.planning.microbatches import Share
from torchremat.schedules.pipelines import Action

Phase = Literal["forward", "backward", "first", "split", "loss"]


@dataclass(frozen=True)
class Load:
    """A device at one of its actions.

    Attributes:
        running: The stage that runs; None while the loss of a batch does.
        phase: What of it: the forward, the whole backward, that of the first microbatch of several in one backward, a
            part of it, or the loss between both.
        held: How many microbatches each stage holds beside the one that runs, as its tree says.
        split: How many each stage holds between the two parts of their backward.
        beside_bytes: What is there beside them: of the loss, or between stages.
    """

    running: int | None
    phase: Phase
    held: tuple[tuple[int, int], ...]
    split: tuple[tuple[int, int], ...] = ()
    beside_bytes: int = 0

    def fixed_bytes(self, plain: Mapping[int, Share]) -> int:
        """What is there whatever the trees are, if `plain` keeps everything."""
        return self.beside_bytes + sum(count * plain[stage].kept_bytes for stage, count in self.split)

    def bytes_of(self, stage: int, share: Share, plain: Share) -> int:
        """What a stage adds under a tree."""
        held = dict(self.held).get(stage, 0) * share.kept_bytes
        if stage != self.running:
            return held
        match self.phase:
            case "forward":
                return held + share.forward_bytes
            case "backward":
                return held + share.backward_bytes
            case "first":
                return held + share.first_bytes
            case "split":
                return held + max(share.backward_bytes, plain.backward_bytes)
            case "loss":
                return held


def loads_of(actions: Sequence[Action], left_bytes: Mapping[int, int]) -> list[Load]:
    """Return the loads of a device, each once.

    Args:
        actions: What the device runs: forwards and backwards, whole or in two parts.
        left_bytes: By stage, what a microbatch leaves there when its backward has ended.
    """
    return list(dict.fromkeys(_loads(actions, left_bytes)))


def _loads(actions: Sequence[Action], left_bytes: Mapping[int, int]) -> Iterator[Load]:
    held, split, left = Counter[int](), Counter[int](), 0

    def load(stage: int, phase: Phase) -> Load:
        return Load(stage, phase, counted(held), counted(split), beside_bytes=left)

    for action in actions:
        stage = action.stage
        match action.kind:
            case "forward":
                yield load(stage, "forward")
                held[stage] += 1
            case "backward":
                held[stage] -= 1
                yield load(stage, "backward")
                left += left_bytes.get(stage, 0)
            case "input":
                held[stage] -= 1
                yield load(stage, "split")
                split[stage] += 1
            case "weight":
                split[stage] -= 1
                yield load(stage, "split")
                left += left_bytes.get(stage, 0)
            case "recompute" | "copy" | "wait":
                raise bug(f"an order with {action}, which is no part of one")


def counted(counts: Counter[int]) -> tuple[tuple[int, int], ...]:
    """Return counts as a load has them."""
    return tuple(sorted((+counts).items()))


def most_held(actions: Sequence[Action]) -> dict[int, int]:
    """Return how many microbatches each stage of a device holds at most, the one that runs included."""
    held, most = Counter[int](), Counter[int]()
    for action in actions:
        held[action.stage] += {"forward": 1, "backward": -1, "weight": -1}.get(action.kind, 0)
        most[action.stage] = max(most[action.stage], held[action.stage])
    return dict(most)
