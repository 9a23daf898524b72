"""Chains of stages with their bytes and costs, and the trees that say which stages are kept and which recomputed.

A stage is one call of the model. A tree covers the stages in order: `KeepNode` is a stage that keeps its saved tensors,
`RegionNode` a run of stages that is recomputed in backward, and may have regions inside. The cost and the bytes of a
tree are defined in one place. See NOTE [ What a tree means ].

The trees with the lowest peaks nest as deep as the chain is long, so no code here recurses.

Deliberately missing: storages. All sizes are scalars, so a tensor that two stages hold counts twice.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import TypeAlias

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
    """

    saved_bytes: int
    saves_input: bool
    saves_external: bool
    cost: float
    forward_peak_bytes: int
    truncated_peak_bytes: int
    backward_peak_bytes: int
    nests: bool = True


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
        recomputable: False if no region may contain it: it is kept at top level.
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
    recomputable: bool = True
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
        """The longest runs of stages that one region may contain: without borders and stages that stay kept."""
        found, begin = list[range](), 0
        for index, stage in enumerate(self.stages):
            if index in self.borders or not stage.recomputable:
                found.append(range(begin, index))
                begin = index + (not stage.recomputable)
        found.append(range(begin, len(self.stages)))
        return tuple(stretch for stretch in found if stretch)

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

    children: tuple[KeepNode | RegionNode, ...]
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
        pairs: list[tuple[KeepNode | RegionNode, KeepNode | RegionNode]] = [(self, other)]
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


Tree: TypeAlias = tuple[KeepNode | RegionNode, ...]


def kept(tree: Tree) -> Iterator[KeepNode]:
    """Yield every stage of the tree with its option, in order; inside regions too."""
    stack = list(reversed(tree))
    while stack:
        node = stack.pop()
        if isinstance(node, KeepNode):
            yield node
        else:
            stack.extend(reversed(node.children))


def check_tree(tree: Tree, chain: Chain) -> None:
    """Return if the tree covers each stage of the chain once and in order.

    Raises:
        ScheduleError: If it does not, if an option does not exist, or if a region contains a stage that must not be
            recomputed, or an option that does not nest.
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
            for stage in range(node.first, node.last + 1):
                if not chain.stages[stage].recomputable:
                    raise ScheduleError(f"stage {stage} cannot be recomputed, but a region contains it")
            for keep in kept((node,)):
                if not chain.stages[keep.stage].options[keep.option].nests:
                    raise ScheduleError(f"stage {keep.stage}: option {keep.option} does not nest, but is in a region")
