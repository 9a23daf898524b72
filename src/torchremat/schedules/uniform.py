"""Uniform schedules, as written by hand: everything kept, every k-th stage a region, k segments.

They use the first option of every stage, and keep the stages that no region may contain.
"""

from __future__ import annotations

from itertools import groupby

from torchremat.errors import ScheduleError
from torchremat.schedules.chain import Chain, KeepNode, RegionNode, Tree


def keep_all(chain: Chain) -> Tree:
    """Return the tree in which nothing is recomputed."""
    return tuple(KeepNode(stage) for stage in range(len(chain.stages)))


def every(chain: Chain, step: int) -> Tree:
    """Return the tree in which the first of every `step` recomputable stages is its own region; with 1, all are.

    Args:
        chain: What to schedule.
        step: At least 1.
    """
    if step < 1:
        raise ScheduleError(f"step={step} must be at least 1")
    chosen = set(_recomputable(chain)[::step])
    return tuple(
        RegionNode((node,)) if node.stage in chosen else node for node in map(KeepNode, range(len(chain.stages)))
    )


def segments(chain: Chain, count: int, *, keep_last: bool = False) -> Tree:
    """Return the tree in which the recomputable stages are `count` regions, as equal in length as possible.

    A stage that cannot be recomputed splits the region that it falls into.

    Args:
        chain: What to schedule.
        count: 1 to the number of recomputable stages. Longer segments come first.
        keep_last: Whether the last segment is kept, as `checkpoint_sequential` does.
    """
    recomputable = _recomputable(chain)
    if not 1 <= count <= len(recomputable):
        raise ScheduleError(f"count={count}, but there are {len(recomputable)} recomputable stages; give 1 to that")
    short, longer = divmod(len(recomputable), count)
    segment: dict[int, int] = {}
    for place, stage in enumerate(recomputable):
        in_longer = longer * (short + 1)
        number = place // (short + 1) if place < in_longer else longer + (place - in_longer) // short
        if not (keep_last and number == count - 1):
            segment[stage] = number
    nodes: list[KeepNode | RegionNode] = []
    for number, stages in groupby(range(len(chain.stages)), segment.get):
        keeps = tuple(map(KeepNode, stages))
        nodes.extend(keeps if number is None else (RegionNode(keeps),))
    return tuple(nodes)


def candidates(chain: Chain, *, most: int | None = None) -> dict[str, Tree]:
    """Return all distinct uniform trees of the chain by their names, such as `every 2nd stage` or `3 segments`.

    Args:
        chain: What to schedule.
        most: The largest number that a name may have. All trees of n stages take time in n^2.
    """
    count = len(_recomputable(chain))
    count = count if most is None else min(count, most)
    trees = {"keep all": keep_all(chain)}
    if count:
        trees["every stage"] = every(chain, 1)
    for step in range(2, count + 1):
        trees[f"every {_ordinal(step)} stage"] = every(chain, step)
    for number in range(1, count + 1):
        trees[_plural(number)] = segments(chain, number)
        trees[f"{_plural(number)}, last kept"] = segments(chain, number, keep_last=True)
    first_name: dict[Tree, str] = {}
    for name, tree in trees.items():
        first_name.setdefault(tree, name)
    return {name: tree for tree, name in first_name.items()}


def _recomputable(chain: Chain) -> list[int]:
    return [index for index, stage in enumerate(chain.stages) if stage.recomputable]


def _ordinal(number: int) -> str:
    teen = number % 100 in (11, 12, 13)
    return f"{number}{'th' if teen else {1: 'st', 2: 'nd', 3: 'rd'}.get(number % 10, 'th')}"


def _plural(number: int) -> str:
    return "1 segment" if number == 1 else f"{number} segments"
