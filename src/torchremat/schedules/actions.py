"""Schedules as data: four kinds of action, their text, and the actions of a tree.

The text of an action is:

- `F3`: first forward of stage 3 inside a region; nothing is kept.
- `F3:0`: first forward of stage 3, kept by its option 0.
- `H3-5`: hold the inputs of the region over stages 3 to 5; comes just before the first `F` or `R` of stage 3.
- `R3`: forward of stage 3 again, inside a nested region; nothing is kept.
- `R3:0`: forward of stage 3 again, kept by its option 0.
- `R3:0!`: the same, stopped at its last save.
- `B3`: backward of stage 3; all tensors held from stage 3 on are released after it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

from torchremat.schedules.chain import Chain, KeepNode, RegionNode, Tree, check_tree


@dataclass(frozen=True)
class ForwardAction:
    """The first forward of a stage; `option` is None if nothing is kept."""

    stage: int
    option: int | None = None

    def __str__(self) -> str:
        return f"F{self.stage}{_kept(self.option)}"


@dataclass(frozen=True)
class HoldAction:
    """From here on, the inputs of the region over stages `first` to `last` are held."""

    first: int
    last: int

    def __str__(self) -> str:
        return f"H{self.first}-{self.last}"


@dataclass(frozen=True)
class RecomputeAction:
    """Another forward of a stage; `option` is None if nothing is kept, `stops` if it ends at its last save."""

    stage: int
    option: int | None = None
    stops: bool = False

    def __str__(self) -> str:
        return f"R{self.stage}{_kept(self.option)}{'!' if self.stops else ''}"


@dataclass(frozen=True)
class BackwardAction:
    """The backward of a stage."""

    stage: int

    def __str__(self) -> str:
        return f"B{self.stage}"


Action: TypeAlias = ForwardAction | HoldAction | RecomputeAction | BackwardAction


def _kept(option: int | None) -> str:
    return "" if option is None else f":{option}"


def schedule(tree: Tree, chain: Chain) -> Iterator[Action]:
    """Return the actions of one training step with the regions of the tree.

    >>> from torchremat.schedules.chain import Option, Stage
    >>> keep = Option(saved_bytes=3, saves_input=True, saves_external=False, cost=0, forward_peak_bytes=4,
    ...               truncated_peak_bytes=3, backward_peak_bytes=2)
    >>> stage = Stage(forward=2, truncated=1, linked_bytes=1, external_bytes=0, output_bytes=1, drop_peak_bytes=2,
    ...               options=(keep,))
    >>> text(schedule((RegionNode((KeepNode(0), KeepNode(1))), KeepNode(2)), Chain(stages=(stage,) * 3)))
    'H0-1 F0 F1 F2:0 B2 R0:0 R1:0! B1 B0'

    Raises:
        ScheduleError: If the tree is not one of this chain.
    """
    check_tree(tree, chain)
    return _step(tree)


def _step(tree: Tree) -> Iterator[Action]:
    for node in tree:
        if isinstance(node, KeepNode):
            yield ForwardAction(node.stage, node.option)
        else:
            yield HoldAction(node.first, node.last)
            yield from (ForwardAction(stage) for stage in range(node.first, node.last + 1))
    stack = list(tree)
    while stack:
        node = stack.pop()
        if isinstance(node, KeepNode):
            yield BackwardAction(node.stage)
        else:
            yield from _recompute(node)
            stack.extend(node.children)


def _recompute(region: RegionNode) -> Iterator[Action]:
    *before, last = region.children
    for child in before:
        if isinstance(child, KeepNode):
            yield RecomputeAction(child.stage, child.option)
        else:
            yield HoldAction(child.first, child.last)
            yield from (RecomputeAction(stage) for stage in range(child.first, child.last + 1))
    if isinstance(last, KeepNode):
        yield RecomputeAction(last.stage, last.option, stops=True)
    else:
        yield HoldAction(last.first, last.last)


def text(actions: Iterable[Action]) -> str:
    """Return the actions as one line, as listed at the top of this file."""
    return " ".join(str(action) for action in actions)
