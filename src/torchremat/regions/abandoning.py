"""Letting go of the regions of a graph through which no backward is to come."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from torchremat.regions.slots import Slot
from torchremat.tensors.graphs import nodes_of, slots_of


def abandon(roots: Iterable[Tensor]) -> None:
    """Let go of what the regions of a graph hold, since no backward from `roots` is to come."""
    for node in nodes_of(roots):
        for place in slots_of(node):
            packed = place.raw.data
            if isinstance(packed, Slot):
                packed.region.abandon()
