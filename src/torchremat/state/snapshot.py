"""The world as one forward saw it. See NOTE [ The world of a call ]."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from itertools import chain, repeat
from operator import attrgetter, is_
from types import CellType, FunctionType, MethodType
from typing import Any, cast
from weakref import ReferenceType, ref

import torch
from torch import Tensor

from torchremat._compat.transforms import is_transformed
from torchremat.state.backups import Backups
from torchremat.state.containers import Dict
from torchremat.state.guarded import Guarded, looks_after_itself
from torchremat.state.leaves import WatchedShard, copied_hooks, flags_of, listen_to_optimizers, put_hooks_back
from torchremat.state.reading import WrittenError, WrittenTensors
from torchremat.state.stamps import changed, stamped
from torchremat.state.world import Reaching, World
from torchremat.state.world_state import WorldState

# NOTE [ A snapshot holds no graph ]
# A module may hold an output of its last call, whose graph holds the region of that call, whose snapshot would hold the
# output of the call before: nothing would ever be freed. So a tensor with a graph is held by a weak reference and an
# alias without the graph. A recompute is shown the tensor itself as long as other code keeps it alive.

_is_leaf = cast("Callable[[Tensor], bool]", attrgetter("is_leaf"))
_NOTHING_HELD = torch.empty(0)


class _Graphed:
    """The stand-in for a tensor that has a graph. See NOTE [ A snapshot holds no graph ]."""

    __slots__ = ("_tensor", "alias")

    def __init__(self, tensor: Tensor, *, holds: bool) -> None:
        self._tensor: ReferenceType[Tensor] = ref(tensor)
        self.alias = tensor.detach() if holds else _NOTHING_HELD  # of the same version

    @property
    def is_gone(self) -> bool:
        """Whether nothing is left of the tensor."""
        return self.alias is _NOTHING_HELD and self._tensor() is None

    def shown(self) -> Tensor:
        """Return the tensor, or one like it."""
        tensor = self._tensor()
        return self.alias.detach().requires_grad_() if tensor is None else tensor


class Snapshot:
    """The world as a forward saw it.

    Args:
        world: Everything that the call can reach.
        guard: The objects that the user has named, some of which manage their own state.
        backs_up: Whether tensors that a forward may write to are copied, and those with a graph are held, which it
            takes to swap them. Otherwise `put_back` writes to no tensor, and leaves get back their hooks and their
            `requires_grad`.

    Attributes:
        modules: The modules that were reached.
        roots: Those of them that were named directly, and not reached through others.
        generators: The generators that were reached.
        named: The ids of tensors inside of the objects that the user has named.
        waits: Whether a lazy module is about to make its parameters, which cannot be undone.
        by_forward: The ids of tensors that the forward itself has written, and that are not copied.
        past_versions: Those of them whose version has not moved.
        is_inert: Whether the call can change nothing in it.
        sets_generators: Whether some code may set the state of a random generator.

    The state that an `Exchange` shows, and compares with the current one:
        contents: What was held then.
        watched: The tensors, with an alias without graph for one that has a graph; `flags` are their versions and their
            `requires_grad`.
        shards: The parameters that FSDP2 manages.
        guarded: The objects that manage their own state, each with its state.
        graphed: By id, the stand-ins for tensors that have a graph.
        backups: The copies of tensors that a forward may write to, None if it has none.
    """

    __slots__ = (
        "__weakref__", "_leaf_hooks", "_leaves", "_stamps", "backups", "by_forward", "contents", "flags",
        "generators", "graphed", "guarded", "is_inert", "modules", "named", "past_versions", "roots", "sets_generators",
        "shards", "waits", "watched",
    )  # fmt: skip

    def __init__(self, world: World, guard: Sequence[object] = (), *, backs_up: bool = True) -> None:
        self.contents = world.read()
        self.modules = world.modules
        self.roots = world.roots
        self.generators = world.generators
        self.named = frozenset(world.named)
        self.by_forward: frozenset[int] = frozenset()
        self.past_versions: frozenset[int] = frozenset()
        self.is_inert, self.sets_generators = world.is_inert and not guard, world.sets_generators
        self.watched = world.tensors
        self.flags = [*map(flags_of, world.tensors)]
        self.shards: list[WatchedShard] = world.shards
        own = [cast("Guarded", one) for one in guard if looks_after_itself(one)] if guard else []
        self.guarded = [(one, one.snapshot()) for one in own]
        self.graphed: dict[int, _Graphed] = {}
        leaves = [] if backs_up else [*filter(_is_leaf, world.tensors)]
        self._leaves = tuple((one, one.requires_grad) for one in leaves) if leaves else ()
        self._leaf_hooks = copied_hooks(leaves) if leaves else None
        self.backups = Backups(world) if backs_up and (world.state or world.loose or world.named) else None
        if world.modules:
            listen_to_optimizers()  # See NOTE [ Optimizers that bump no version ]
        is_watched = backs_up and world.passes_versions
        copied = self.backups.copied if is_watched and self.backups is not None else ()
        self._stamps = (
            stamped(one for one in world.tensors if one.is_leaf and id(one) not in copied) if is_watched else []
        )
        self.waits = world.waits
        if not all(map(_is_leaf, world.tensors)) and not is_transformed():  # there `detach` loses more than a graph
            graphed = [index for index, one in enumerate(world.tensors) if not one.is_leaf]
            self._let_graphs_go(graphed, holds=backs_up)

    @classmethod
    def of_cells(cls, cells: Iterable[CellType], contents: list[object]) -> Snapshot:
        """Return the snapshot of a world that consists only of cells, from their contents."""
        world = Reaching()
        world.bindings.cells += cells
        found = cls(world)
        found.contents = WorldState([], [(world.bindings, contents)])
        return found

    def _let_graphs_go(self, places: Iterable[int], *, holds: bool) -> None:
        # See NOTE [ A snapshot holds no graph ]
        tensors = self.watched = list(self.watched)
        for place in places:
            tensor = tensors[place]
            held = self.graphed[id(tensor)] = _Graphed(tensor, holds=holds)
            tensors[place] = held.alias
        self._replace(self.graphed)

    def _replace(self, others: dict[int, Any]) -> None:
        self.contents = self.contents.with_others(others)

    def is_of(self, world: World) -> bool:
        """Return whether a call that begins in this world may share it: all is the same, and nothing is copied."""
        copied = world.state or world.loose or world.generators or world.passes_versions
        if copied or self.graphed or self.guarded or self.shards or is_transformed():  # there tensors are replaced
            return False
        return [*map(flags_of, world.tensors)] == self.flags and world.read().is_that_of(self.contents)

    @property
    def containers(self) -> frozenset[int]:
        """The ids of the containers that are restored."""
        contents = self.contents
        return frozenset([*map(id, contents.all_dicts), *(id(one.item) for one, _ in contents.rest)])

    def restores(self, container: object) -> bool:
        """Return whether a container is one of these."""
        items = (one.item for one, _ in self.contents.rest)
        return any(map(is_, chain(self.contents.all_dicts, items), repeat(container)))

    @property
    def has_shards(self) -> bool:
        """Whether FSDP2 manages some of the parameters."""
        return bool(self.shards)

    def tensors(self) -> list[Tensor]:
        """Return the tensors, with an alias without graph for one that has a graph."""
        return self.watched

    def with_graphs(self) -> list[Tensor]:
        """Return those of them that have a graph, as a recompute is shown them."""
        return [one.shown() for one in self.graphed.values()]

    def copied(self) -> list[Tensor]:
        """Return the tensors of whose earlier values a recompute gets copies, without those that are gone."""
        written = () if self.backups is None else self.backups.written.values()
        return [tensor for one in written if (tensor := one.alive()) is not None]

    def settle(self) -> None:
        """Keep only the state that a recompute may need."""
        if [*map(flags_of, self.watched)] != self.flags:
            pairs = zip(self.watched, self.flags, strict=True)
            self.by_forward = frozenset([id(one) for one, flag in pairs if one._version != flag[0]])
        if self._stamps:
            self.past_versions = frozenset(map(id, changed(self._stamps)))
            self.by_forward |= self.past_versions
            self._stamps = []
        backups = self.backups
        if backups is None:
            return
        backups.settle()
        if backups.written:
            copied: dict[int, Any] = {}
            for key, one in backups.written.items():
                held = self.graphed.pop(key, None)
                # A tensor with a graph that was held already has a stand-in.
                for stands in (key,) if held is None else (id(held), id(held.alias)):
                    copied[stands] = one
            self._replace(copied)
            pairs = zip(self.watched, self.flags, strict=True)
            kept = [(one, flag) for one, flag in pairs if id(one) not in copied]
            self.watched, self.flags = [one for one, _ in kept], [flag for _, flag in kept]
        if not backups:
            self.backups = None

    def replace(self, by: Callable[[Tensor], Tensor]) -> None:
        """Replace each watched tensor by the result of `by`."""
        new = {id(one): made for one in self.watched if (made := by(one)) is not one}
        if new:
            self._replace(new)
            pairs = zip(self.watched, self.flags, strict=True)
            self.flags = [flags_of(new[id(one)]) if id(one) in new else flag for one, flag in pairs]
            self.watched = [new.get(id(one), one) for one in self.watched]

    def words(self, error: WrittenError, name: str | None, region: str) -> str:
        """Return the message for a tensor that was written since and is read.

        Args:
            error: The error that was found.
            name: The tensor's name, None if it has none.
            region: The region's description.
        """
        tensor, by_forward = error.tensor, id(error.tensor) in self.by_forward
        shards = (one.shard.name or one.name for one in self.shards if one.sharded.tensor is tensor)
        name = name or next(shards, f"a tensor of shape {tuple(tensor.shape)}")
        if by_forward:
            return (
                f"{region}: its forward wrote `{name}` in place, which is not copied before each forward: it is a "
                "parameter, or large and was left alone the first time. So its earlier value is lost. Write out of "
                "place, or name the object or module that holds it in `guard=[...]`, so that its tensors are copied."
            )
        if id(tensor) in self.named:
            return (
                f"{region}: the tensor `{name}` inside a guarded object was written in place after the forward, "
                "which had only read it, so the call cannot be recomputed. Read a clone of it, run backward before it "
                "is written, or write out of place."
            )
        kind = "parameter or buffer" if any(tensor is one for one in self._of_modules()) else "tensor"
        return (
            f"{region}: its {kind} `{name}` was changed in place between forward and recompute: version {error.then} "
            f"then, {error.now} now. Recomputing would give wrong gradients. Run backward before `optimizer.step()` or "
            "whatever else writes to it, pass a clone, or write out of place."
        )

    def _of_modules(self) -> Iterator[Tensor]:
        for module in self.modules:
            yield from module.parameters(recurse=False)
            yield from module.buffers(recurse=False)
        for one in self.shards:
            yield from one.read_as()

    def put_back(self) -> None:
        """Restore all contents for good. No tensor is written to.

        Attributes that this package has meanwhile put on modules, or taken off, are left alone, and so is everything if
        a lazy module has made its parameters. A tensor with a graph that no other code keeps alive is gone: what has
        taken its place stays there.
        """
        if self.waits:
            return
        gone = {id(one) for one in self.graphed.values() if one.is_gone}
        then = [own.as_now(gone) for own in self.contents.dicts] if gone else self.contents.dicts
        kept = [pair for pair in self.contents.rest if not (gone and _holds(pair[1], gone))]
        contents = WorldState(then, kept).with_others({id(one): one.shown() for one in self.graphed.values()})
        if not all(own.are_here() for own in contents.dicts):
            ours = [(own, _ours(own)) for own in self.contents.all_dicts]
            for own in contents.dicts:
                own.write()
            for own, now in ours:
                for key in _ours(own).keys() - now.keys():
                    dict.__delitem__(own, key)
                dict.update(own, now)  # some classes have an `update` that refuses
        for one, before in contents.rest:
            one.write(before)
        for one, flag in self._leaves:
            if one.requires_grad is not flag and one.is_leaf:
                one.requires_grad_(flag)
        put_hooks_back([one for one, _ in self._leaves], self._leaf_hooks)
        for one, before in self.guarded:
            one.restore(before)

    def written_since(self, now: Sequence[tuple[int, bool]]) -> WrittenTensors:
        """Return the tensors whose version has moved."""
        found = WrittenTensors()
        for tensor, (then, _), (version, _) in zip(self.watched, self.flags, now, strict=True):
            if version != then:
                found[id(tensor)] = WrittenError(tensor, then, version)
            elif id(tensor) in self.past_versions:
                found.add_memory(WrittenError(tensor, then, version))
        for one in self.shards:
            version = one.version_now()
            if version is not None:
                error = WrittenError(one.sharded.tensor, one.sharded.version, version)
                for tensor in one.read_as():
                    found[id(tensor)] = error
            one.check_gathered()
        return found


def _holds(contents: object, gone: Set[int]) -> bool:
    return isinstance(contents, list | deque) and any(id(one) in gone for one in cast("list[object]", contents))


def _ours(own: Dict) -> Dict:
    """Return the attributes that this package has put on a module."""
    found = {key: dict.__getitem__(own, key) for key in _PUT_ON if dict.__contains__(own, key)}
    return {key: one for key, one in found.items() if _module_of(one).startswith("torchremat.")}


def _module_of(one: object) -> str:
    return (one if isinstance(one, FunctionType | MethodType) else type(one)).__module__ or ""


_PUT_ON = ("forward", "_compiled_call_impl", "compile", "_replicate_for_data_parallel")

# The snapshot of a call that reaches nothing that could have state.
NOTHING = Snapshot(Reaching())
