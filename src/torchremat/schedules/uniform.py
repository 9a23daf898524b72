"""Uniform schedules, as written by hand: everything kept, every k-th stage a region, k segments.

They use the first option of every stage.
"""

from __future__ import annotations

from torchremat.errors import ScheduleError
from torchremat.schedules.chain import Chain, KeepNode, Node, RegionNode, Tree


def keep_all(chain: Chain) -> Tree:
    """Return the tree in which nothing is recomputed."""
    return tuple(KeepNode(stage) for stage in range(len(chain.stages)))


def every(chain: Chain, step: int) -> Tree:
    """Return the tree in which the first of every `step` stages is its own region; with 1, all are.

    Args:
        chain: What to schedule.
        step: At least 1.
    """
    if step < 1:
        raise ScheduleError(f"step={step} must be at least 1")
    keeps = map(KeepNode, range(len(chain.stages)))
    return tuple(node if node.stage % step else RegionNode((node,)) for node in keeps)


def segments(chain: Chain, count: int, *, keep_last: bool = False) -> Tree:
    """Return the tree in which the stages are `count` regions, as equal in length as possible.

    Args:
        chain: What to schedule.
        count: 1 to the number of stages. Longer segments come first.
        keep_last: Whether the last segment is kept, as `checkpoint_sequential` does.
    """
    stages = len(chain.stages)
    if not 1 <= count <= stages:
        raise ScheduleError(f"count={count}, but there are {stages} stages; give 1 to that")
    short, longer = divmod(stages, count)
    nodes: list[Node] = []
    first = 0
    for number in range(count):
        length = short + 1 if number < longer else short
        keeps = tuple(map(KeepNode, range(first, first + length)))
        nodes.extend(keeps if keep_last and number == count - 1 else (RegionNode(keeps),))
        first += length
    return tuple(nodes)


def candidates(chain: Chain, *, most: int | None = None) -> dict[str, Tree]:
    """Return all distinct uniform trees of the chain by their names, such as `every 2nd stage` or `3 segments`.

    Args:
        chain: What to schedule.
        most: The largest number that a name may have. All trees of n stages take time in n^2.
    """
    count = len(chain.stages)
    count = count if most is None else min(count, most)
    trees = {"keep all": keep_all(chain), "every stage": every(chain, 1)}
    for step in range(2, count + 1):
        trees[f"every {_ordinal(step)} stage"] = every(chain, step)
    for number in range(1, count + 1):
        trees[_plural(number)] = segments(chain, number)
        trees[f"{_plural(number)}, last kept"] = segments(chain, number, keep_last=True)
    first_name: dict[Tree, str] = {}
    for name, tree in trees.items():
        first_name.setdefault(tree, name)
    return {name: tree for tree, name in first_name.items()}


def _ordinal(number: int) -> str:
    teen = number % 100 in (11, 12, 13)
    return f"{number}{'th' if teen else {1: 'st', 2: 'nd', 3: 'rd'}.get(number % 10, 'th')}"


def _plural(number: int) -> str:
    return "1 segment" if number == 1 else f"{number} segments"
