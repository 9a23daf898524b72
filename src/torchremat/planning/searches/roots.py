"""Trees made fit for the roots of a step: calls of the same root are treated alike."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from torchremat.planning.profiles.units import Unit, Units
from torchremat.schedules.chain import Keep, Region, Tree


def fitted(units: Units, tree: Tree) -> Tree:
    """Return the tree with no region across two calls of a root, and calls of the same root treated alike.

    A root that is called several times in a step has one scope, whose choices hold for each of its calls. Nor has it
    regions over several modules that FSDP2 has sharded, which gathers the parameters of one at a time.
    """
    if units.trace.sharded:
        labels = [_shard_of(unit, units.trace.sharded) for unit in units.units]
        tree = tuple(_parted(tree, labels))
    groups: list[list[int]] = []
    for index, unit in enumerate(units.units):
        if unit.root == len(groups):
            groups.append([])
        elif unit.root > len(groups):  # a root without units
            groups += [[] for _ in range(unit.root - len(groups) + 1)]
        groups[unit.root].append(index)
    if len(groups) <= 1:
        return tree
    result: list[Keep | Region] = []
    model: dict[tuple[tuple[tuple[str, int], ...], ...], tuple[int, Tree]] = {}
    for group in filter(None, groups):
        key = tuple(units.units[index].keys for index in group)
        if key in model:
            start, known = model[key]
            part = tuple(_shifted(node, group[0] - start) for node in known)
        else:
            part = tuple(_within(tree, group[0], group[-1]))
            model[key] = (group[0], part)
        result += part
    return tuple(result)


def _shard_of(unit: Unit, sharded: frozenset[str]) -> str:
    """Return what tells the units of one sharded module from others: a unit that is one itself is alone."""
    name = unit.keys[0][0]
    if name in sharded:
        return unit.name
    parents = [name.rpartition(".")[0]]
    while parents[-1]:
        parents.append(parents[-1].rpartition(".")[0])
    return next((f"inside {parent}" for parent in parents if parent in sharded), "")


def _parted(nodes: Iterable[Keep | Region], labels: Sequence[str]) -> Iterator[Keep | Region]:
    for node in nodes:
        if isinstance(node, Region) and len(set(labels[node.first : node.last + 1])) > 1:
            inner = _parted(node.children, labels)
            yield from (child if isinstance(child, Region) else Region((child,)) for child in inner)
        else:
            yield node


def _within(nodes: Iterable[Keep | Region], first: int, last: int) -> Iterator[Keep | Region]:
    for node in nodes:
        if isinstance(node, Keep):
            if first <= node.stage <= last:
                yield node
        else:
            children = tuple(_within(node.children, first, last))
            if children:
                yield Region(children)


def _shifted(node: Keep | Region, by: int) -> Keep | Region:
    if isinstance(node, Keep):
        return Keep(node.stage + by, node.option)
    return Region(tuple(_shifted(child, by) for child in node.children))
