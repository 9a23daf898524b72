"""One microbatch on one stage: what is computed, and whether as a region."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import cast

import torch
from torch import nn

from torchremat.pipeline.microbatch import Microbatch
from torchremat.pipeline.skip import CellTracker, SkipLayout, use_skip_tracker
from torchremat.pipeline.skip.namespaces import Key
from torchremat.pipeline.streams import Stream, use_stream
from torchremat.regions.region import Region
from torchremat.regions.runs import call_plainly
from torchremat.regions.settings import Settings
from torchremat.regions.transforms import new_region


@dataclass(frozen=True, slots=True)
class Place:
    """The words for a cell in messages."""

    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"of stage {self.stage}, microbatch {self.microbatch}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A microbatch on a stage.

    Attributes:
        place: Which one it is.
        module: The layers of the stage.
        layout: The ways of the skips.
        stream: What it computes on.
        settings: How it is recomputed; None if it is not.
    """

    place: Place
    module: nn.Module
    layout: SkipLayout
    stream: Stream
    settings: Settings | None

    def run(self, given: Microbatch) -> tuple[Microbatch, Region | None]:
        """Run the layers.

        Args:
            given: The input of the stage, and the skips that are popped in it.

        Returns:
            The output and the skips that are stashed for later stages, and the region that it ran in.
        """
        function = partial(_run, self.module, self.layout, self.place.stage)
        value, skips = cast("tuple[object, dict[Key, object]]", given.value)
        with use_stream(self.stream):
            if self.settings is None or not torch.is_grad_enabled():
                return Microbatch.of(function(value, skips)), None
            region = new_region(self.settings, self.place)
            output = region.call(partial(call_plainly, function), (value, skips), {}, [self.module])
            return Microbatch.of(output), region


def _run(
    module: nn.Module, layout: SkipLayout, stage: int, value: object, skips: dict[Key, object]
) -> tuple[object, dict[Key, object]]:
    # A function of explicit skips: those that are popped are inputs of the region and those that are stashed are
    # outputs, so the graph leads from one to the other directly, and a recompute finds what it needs.
    tracker = CellTracker(layout, stage, skips)
    with use_skip_tracker(tracker):
        output = module(value)
    return output, tracker.outgoing
