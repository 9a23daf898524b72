"""Uniform trees, as people write them by hand: everything kept, every k-th stage a region, k segments.

They use the first option of every stage.
"""

from __future__ import annotations

import numpy as np

from torchremat.schedules.chain import KeepNode, RegionNode, Tree


def uniform_trees(stages: int, *, most: int | None = None) -> list[Tree]:
    """Return the uniform trees of a chain, each once; the first recomputes nothing, the second recomputes every stage.

    Args:
        stages: The length of the chain, at least 1.
        most: The largest k. All trees of n stages take time in n^2.
    """
    most = stages if most is None else min(stages, most)
    trees = [tuple(map(KeepNode, range(stages)))]
    trees += [_every(stages, step) for step in range(1, most + 1)]
    for count in range(1, most + 1):
        trees += [_segments(stages, count), _segments(stages, count, keep_last=True)]
    return list(dict.fromkeys(trees))


def _every(stages: int, step: int) -> Tree:
    """Return the tree in which the first of every `step` stages is its own region."""
    keeps = map(KeepNode, range(stages))
    return tuple(node if node.stage % step else RegionNode((node,)) for node in keeps)


def _segments(stages: int, count: int, *, keep_last: bool = False) -> Tree:
    """Return the tree of `count` regions as equal in length as possible, the longer ones first.

    Args:
        stages: The length of the chain.
        count: 1 to the number of stages.
        keep_last: Whether the last segment is kept, as `checkpoint_sequential` does.
    """
    kept = [tuple(map(KeepNode, part.tolist())) for part in np.array_split(np.arange(stages), count)]
    regions = tuple(map(RegionNode, kept))
    return (*regions[:-1], *kept[-1]) if keep_last else regions
