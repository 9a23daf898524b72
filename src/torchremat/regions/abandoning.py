"""Releases the regions of a graph that no backward will run through."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from torchremat.regions.slots import Slot
from torchremat.tensors.graphs import nodes_of, slots_of


def abandon(roots: Iterable[Tensor]) -> None:
    """Release everything that the regions of a graph hold, since no backward from `roots` will run."""
    for node in nodes_of(roots):
        for place in slots_of(node):
            packed = place.raw.data
            if isinstance(packed, Slot):
                packed.region.abandon()
