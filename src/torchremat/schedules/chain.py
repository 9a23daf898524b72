"""Chains of stages with their bytes and costs, and the trees that say which stages are kept and which recomputed.

A stage is one call of the model. A tree covers the stages in order: `KeepNode` is a stage that keeps its saved tensors,
`RegionNode` a run of stages that is recomputed in backward, and may have regions inside. The cost and the bytes of a
tree are defined in one place. See NOTE [ What a tree means ].

The trees with the lowest peaks nest as deep as the chain is long, so no code here recurses.

Deliberately missing: storages. All sizes are scalars, so a tensor that two stages hold counts twice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, fields
from functools import cached_property
from itertools import pairwise
from typing import TypeAlias

import numpy as np

from torchremat.errors import ScheduleError


@dataclass(frozen=True, kw_only=True)
class Option:
    """One way of keeping a stage; a stage has several if part of it can be recomputed, and the first is the default.

    Attributes:
        saved_bytes: Bytes that the stage itself holds from its forward to the end of its backward, beyond its inputs.
        saves_input: Whether it also holds its linked input.
        saves_external: Whether it also holds its external inputs.
        cost: Extra cost inside its backward; 0 if everything is kept.
        forward_peak_bytes: Highest live bytes during its full forward with this saving, above the bytes live at its
            entry (its inputs and all held bytes included).
        truncated_peak_bytes: The same for a forward that stops at its last save.
        backward_peak_bytes: Highest live bytes during its backward, above the bytes held at the backward's start (its
            own saved bytes and saved inputs included).
        nests: Whether a stage inside a region can be kept this way; the first option of a stage must allow it.
        is_region: Whether the stage is a region by itself then, which its backward recomputes at `cost`: a recompute
            that ends with the stage only takes its inputs, which costs nothing.
    """

    saved_bytes: int
    saves_input: bool
    saves_external: bool
    cost: float
    forward_peak_bytes: int
    truncated_peak_bytes: int
    backward_peak_bytes: int
    nests: bool = True
    is_region: bool = False


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One call of the model. Costs are in any one unit, seconds or flops.

    Attributes:
        forward: Cost of another full forward.
        truncated: Cost of a recompute that ends here, at the stage's last save. Mostly less than `forward`; more for a
            small stage if it includes the fixed overhead of a recompute.
        linked_bytes: Inputs that are outputs of the stage just before (for the first stage: inputs from outside).
        external_bytes: Other inputs, which a region over this stage must hold.
        output_bytes: Live bytes of its output at its exit if nothing is saved.
        drop_peak_bytes: Highest live bytes during a forward that saves nothing, above the bytes live at its entry.
        options: The ways of keeping it, at least one.
        forward_base_bytes: Bytes live here in the first forward under any tree.
        backward_base_bytes: The same when its backward runs, and while a region that ends here is recomputed.
    """

    forward: float
    truncated: float
    linked_bytes: int
    external_bytes: int
    output_bytes: int
    drop_peak_bytes: int
    options: tuple[Option, ...]
    forward_base_bytes: int = 0
    backward_base_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class Chain:
    """Stages in the order of the first forward.

    Attributes:
        stages: At least one.
        tail_bytes: Highest live bytes between the last forward and the first backward, above the held bytes.
        borders: Stages before which solvers end every region: around equal stages, so that their tables stay small.

    Raises:
        ScheduleError: Lists every number that is negative or not finite, and every stage without options.
    """

    stages: tuple[Stage, ...]
    tail_bytes: int = 0
    borders: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        problems = list(_problems(self))
        if problems:
            raise ScheduleError("no chain: " + "; ".join(problems))

    @cached_property
    def stretches(self) -> tuple[range, ...]:
        """The longest runs of stages that one region may contain: those between borders."""
        cuts = sorted({0, len(self.stages), *self.borders})
        return tuple(range(begin, end) for begin, end in pairwise(cuts))

    def is_uniform(self, stretch: range) -> bool:
        """Whether a run of stages has more than one, and all are equal."""
        return len(stretch) > 1 and all(self.stages[index] == self.stages[stretch.start] for index in stretch)


def _problems(chain: Chain) -> Iterator[str]:
    if not chain.stages:
        yield "it has no stages"
    yield from _negative("chain", chain)
    for index, stage in enumerate(chain.stages):
        yield from _negative(f"stage {index}", stage)
        if not stage.options:
            yield f"stage {index}: it has no options"
        elif not stage.options[0].nests:
            yield f"stage {index}: its first option does not nest"
        for number, option in enumerate(stage.options):
            yield from _negative(f"stage {index}, option {number}", option)


def _negative(where: str, owner: Chain | Stage | Option) -> Iterator[str]:
    for one in fields(owner):
        value = getattr(owner, one.name)
        if isinstance(value, int | float) and not (value >= 0 and math.isfinite(value)):
            yield f"{where}: {one.name}={value} is negative or not finite"


@dataclass(frozen=True)
class KeepNode:
    """A stage that keeps the tensors of its option, from its forward or its region's recompute to its backward."""

    stage: int
    option: int = 0

    @property
    def first(self) -> int:
        """The first stage, which is the only one."""
        return self.stage

    @property
    def last(self) -> int:
        """The last stage, which is the only one."""
        return self.stage


@dataclass(frozen=True, eq=False)
class RegionNode:
    """A run of stages that is recomputed in backward, as its children say. Nodes with equal children are equal.

    Attributes:
        children: At least one.
        first: The first stage.
        last: The last stage.
    """

    children: Tree
    first: int = field(init=False, repr=False)
    last: int = field(init=False, repr=False)
    # Made from the children's hashes and cached: solvers look trees up, and computing it anew each time would recurse.
    _hash: int = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if not self.children:
            raise ScheduleError("a region without children covers no stage")
        object.__setattr__(self, "first", self.children[0].first)
        object.__setattr__(self, "last", self.children[-1].last)
        object.__setattr__(self, "_hash", hash((RegionNode, self.children)))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RegionNode):
            return NotImplemented
        pairs: list[tuple[Node, Node]] = [(self, other)]
        while pairs:
            one, two = pairs.pop()
            if one is two:
                continue
            if not (isinstance(one, RegionNode) and isinstance(two, RegionNode)):
                if one != two:
                    return False
            elif one._hash != two._hash or len(one.children) != len(two.children):
                return False
            else:
                pairs.extend(zip(one.children, two.children, strict=True))
        return True


Node: TypeAlias = KeepNode | RegionNode
Tree: TypeAlias = tuple[Node, ...]


def kept(tree: Tree) -> Iterator[KeepNode]:
    """Yield every stage of the tree with its option, in order; inside regions too."""
    stack = list(reversed(tree))
    while stack:
        node = stack.pop()
        if isinstance(node, KeepNode):
            yield node
        else:
            stack.extend(reversed(node.children))


def rebuilt(
    tree: Tree,
    *,
    stage: Callable[[KeepNode], Iterable[Node]] = lambda keep: (keep,),
    region: Callable[[int, Tree], Iterable[Node]] = lambda level, inside: (RegionNode(inside),),
) -> Tree:
    """Return a tree with other nodes in place of its stages and its regions, which by default stay.

    Args:
        tree: The tree.
        stage: Returns the nodes for a stage.
        region: Returns the nodes for a region, from the number of regions around it and the nodes for its children.
    """
    around: list[tuple[Iterator[Node], list[Node]]] = [(iter(tree), [])]
    while True:
        waiting, nodes = around[-1]
        node = next(waiting, None)
        if isinstance(node, RegionNode):
            around.append((iter(node.children), []))
        elif node is not None:
            nodes += stage(node)
        elif len(around) == 1:
            return tuple(nodes)
        else:
            around.pop()
            around[-1][1].extend(region(len(around) - 1, tuple(nodes)))


def check_tree(tree: Tree, chain: Chain) -> None:
    """Return if the tree covers each stage of the chain once and in order.

    Raises:
        ScheduleError: If it does not, if an option does not exist, or if a region contains an option that does not
            nest.
    """
    found = list(kept(tree))
    stages = [keep.stage for keep in found]
    if stages != list(range(len(chain.stages))):
        raise ScheduleError(f"the tree covers stages {stages}, but the chain has 0 to {len(chain.stages) - 1} in order")
    for keep in found:
        options = len(chain.stages[keep.stage].options)
        if not 0 <= keep.option < options:
            raise ScheduleError(f"stage {keep.stage}: option {keep.option} of {options} does not exist")
    for node in tree:
        if isinstance(node, RegionNode):
            for keep in kept((node,)):
                if not chain.stages[keep.stage].options[keep.option].nests:
                    raise ScheduleError(f"stage {keep.stage}: option {keep.option} does not nest, but is in a region")


# NOTE [ How deep regions may nest ]
#
# A call in d regions is d nested calls, in the forward as in each recompute, and to unpack an input of the innermost
# region the recomputes of all d may nest. Python's own stack has room for 1000 calls, and each level takes
#
#   5    a call that runs in regions
#   8    a recompute that asks for the result of an enclosing recompute
#
# So 64 levels take 512 at most, which leaves the other half to the model, the loop around it, and that loop's callers.
# The cheapest and lowest trees of long chains nest as deep as the chain is long. In such a tree regions are dissolved:
# evenly, since regions dissolved in one place are all kept there at once.
DEEPEST = 64


def depth(tree: Tree) -> int:
    """Return the greatest number of nested regions in a tree."""
    most, stack = 0, [(node, 1) for node in tree]
    while stack:
        node, level = stack.pop()
        if isinstance(node, RegionNode):
            most = max(most, level)
            stack.extend((child, level + 1) for child in node.children)
    return most


def bounded(tree: Tree, deepest: int = DEEPEST) -> Tree:
    """Return the tree with levels of regions dissolved, evenly, where it nests deeper than `deepest`.

    Of three levels with two allowed, the innermost is dissolved:

    >>> nested = RegionNode((KeepNode(0), RegionNode((KeepNode(1), RegionNode((KeepNode(2),)), KeepNode(3)))))
    >>> bounded((nested,), 2) == (RegionNode((KeepNode(0), RegionNode((KeepNode(1), KeepNode(2), KeepNode(3))))),)
    True

    Args:
        tree: The tree. The outermost regions stay, so the same stages are recomputed.
        deepest: At least 1.
    """
    return tuple(_bound_depth(node, deepest) for node in tree)


def _bound_depth(node: Node, deepest: int) -> Node:
    levels = depth((node,))
    if levels <= deepest:
        return node
    # With twice as many levels as allowed, every second level stays, and so on; the first always stays.
    stays = [-(-(level + 1) * deepest // levels) > -(-level * deepest // levels) for level in range(levels)]
    (found,) = rebuilt((node,), region=lambda level, inside: (RegionNode(inside),) if stays[level] else inside)
    return found


def uniform_trees(stages: int, *, most: int | None = None) -> list[Tree]:
    """Return the trees of a chain as people write them: all kept, every k-th stage a region, k segments; each once.

    The first one recomputes nothing, the second one every stage. All use the first option of every stage.

    Args:
        stages: The length of the chain, at least 1.
        most: The largest k. All trees of n stages take time in n^2.
    """
    most = stages if most is None else min(stages, most)
    plain = tuple(map(KeepNode, range(stages)))
    trees: list[Tree] = [plain]
    for step in range(1, most + 1):  # the first of every `step` stages is its own region
        trees.append(tuple(keep if keep.stage % step else RegionNode((keep,)) for keep in plain))
    for count in range(1, most + 1):
        trees += [_segments(stages, count), _segments(stages, count, keep_last=True)]
    return list(dict.fromkeys(trees))


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
