"""Adapts trees to the roots of a step, the modules that it calls itself: calls that look the same are treated alike."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torchremat.planning.profiles.units import Unit, Units
from torchremat.schedules.chain import KeepNode, Node, RegionNode, Tree, kept, rebuilt

# A call as a scope identifies it, and the calls of some consecutive units as one scope identifies them.
Key = tuple[str, int]
Keys = tuple[tuple[Key, ...], ...]


def fitted(units: Units, tree: Tree) -> Tree:
    """Return the tree with no region across two scopes, and calls that a scope cannot tell apart treated alike.

    A root that is called several times in a step has one scope, whose choices hold for each of its calls; the same
    holds for the choices for a module that several roots call. See also `by_shard`, and NOTE [ Exchanges in a plan ].
    """
    tree = _pinned_apart(units.pinned, by_shard(units, tree))
    if len(units.rows) <= 1:
        return tree
    keys = [tuple(units.units[index].keys for index in row) for row in units.rows]
    astray = _astray(keys)
    alone = [not astray.isdisjoint(unit.keys) for unit in units.units]
    if astray:
        tree = _parted(tree, [str(index) if is_alone else "" for index, is_alone in enumerate(alone)])
    result: list[Node] = []
    model: dict[Keys, tuple[int, Tree]] = {}
    of_key: dict[Key, Node] = {}
    for row, own in zip(units.rows, keys, strict=True):
        if own not in model:
            model[own] = row.start, _within(tree, row)
        start, known = model[own]
        for node in known:
            moved = _shifted(node, row.start - start)
            if alone[moved.first]:
                own_node = moved if isinstance(moved, KeepNode) else _alone(next(kept((moved,))))
                chosen = of_key.setdefault(units.units[moved.first].keys[0], own_node)
                moved = _shifted(chosen, moved.first - chosen.first)
            result.append(moved)
    return tuple(result)


def same_calls(units: Units) -> list[list[int]]:
    """Return the units: together those that are one call in different calls of a root, which are treated alike."""
    found = dict[Keys, list[int]]()
    for unit, own in enumerate(units.units):
        found.setdefault((own.keys,), []).append(unit)
    return list(found.values())


def by_shard(units: Units, tree: Tree) -> Tree:
    """Return the tree with no region over several modules sharded by FSDP2: it gathers one module at a time."""
    if not units.trace.sharded:
        return tree
    return _parted(tree, [_shard_of(unit, units.trace.sharded) for unit in units.units])


def has_shards(units: Units, unit: int) -> bool:
    """Return whether FSDP2 has sharded parameters of a unit: a region keeps none of them for its backward."""
    own, sharded = units.units[unit], units.trace.sharded
    inside = any(one.startswith(f"{name}.") for one in sharded for name, _ in own.keys)
    return inside or bool(_shard_of(own, sharded))


def _astray(keys: Iterable[Keys]) -> frozenset[Key]:
    """Return the calls that are in several different rows: a region in one row would be another in the next."""
    known: dict[Key, Keys] = {}
    return frozenset(key for row in keys for unit in row for key in unit if known.setdefault(key, row) != row)


def _shard_of(unit: Unit, sharded: frozenset[str]) -> str:
    """Return the key of the sharded module of a unit: a unit that is a sharded module itself is alone."""
    name = unit.keys[0][0]
    if name in sharded:
        return unit.name
    parents = [name.rpartition(".")[0]]
    while parents[-1]:
        parents.append(parents[-1].rpartition(".")[0])
    return next((f"inside {parent}" for parent in parents if parent in sharded), "")


def _parted(tree: Tree, labels: Sequence[str]) -> Tree:
    """Return the tree with the children of each region over several labels in its place, each as a region."""

    def parted(inside: Tree) -> Tree:
        if len(set(labels[inside[0].first : inside[-1].last + 1])) == 1:
            return (RegionNode(inside),)
        return tuple(map(_alone, inside))

    return rebuilt(tree, region=lambda _, inside: parted(inside))


def _pinned_apart(pinned: frozenset[int], tree: Tree) -> Tree:
    """Return the tree with no region over pinned units: these are kept, as a whole or in part."""
    if not pinned:
        return tree

    def parted(inside: Tree) -> Tree:
        if pinned.isdisjoint(range(inside[0].first, inside[-1].last + 1)):
            return (RegionNode(inside),)
        return tuple(node if node.first in pinned else _alone(node) for node in inside)

    return rebuilt(tree, region=lambda _, inside: parted(inside))


def _alone(node: Node) -> Node:
    """Return a node as a region. A unit with an option is one by itself, and needs none around it."""
    first = node.children[0] if isinstance(node, RegionNode) and len(node.children) == 1 else node
    if isinstance(first, KeepNode) and first.option:
        return first
    return node if isinstance(node, RegionNode) else RegionNode((node,))


def _within(tree: Tree, row: range) -> Tree:
    return rebuilt(
        tree,
        stage=lambda keep: (keep,) if keep.stage in row else (),
        region=lambda _, inside: (_alone(RegionNode(inside)),) if inside else (),
    )


def _shifted(node: Node, by: int) -> Node:
    (shifted,) = rebuilt((node,), stage=lambda keep: (KeepNode(keep.stage + by, keep.option),))
    return shifted
