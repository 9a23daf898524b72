"""The world as one forward saw it. See NOTE [ The world of a call ]."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from operator import attrgetter
from threading import get_ident
from types import CellType, FunctionType
from typing import Any, Protocol, cast, runtime_checkable
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn

from torchremat._compat.transforms import is_transformed
from torchremat.ambient.locks import EXCHANGING
from torchremat.errors import UnsupportedError
from torchremat.state.backups import Backups
from torchremat.state.contents import FOREIGN, MUTABLE, Dict, Dicts, Holder, Slots, other, with_others
from torchremat.state.optimizers import listen_to_optimizers
from torchremat.state.reading import Watched, WrittenError
from torchremat.state.sharding import WatchedShard
from torchremat.state.world import World


@runtime_checkable
class Guarded(Protocol):
    """An object that knows how to keep its state and to take it back."""

    def snapshot(self) -> object:
        """Return the state as it is now, such that later changes do not reach it."""
        ...

    def restore(self, state: Any) -> None:
        """Make the state what it was when `snapshot` returned it. May be called many times with the same value."""
        ...


# NOTE [ A snapshot holds no graph ]
# A module may hold an output of its last call, whose graph has the region of that call, whose snapshot would hold the
# output of the call before: nothing would ever go. So a tensor with a graph is held by a weak reference and an alias
# without the graph. A recompute is shown the tensor itself as long as anybody else has it.

_flags = cast("Callable[[Tensor], tuple[int, bool]]", attrgetter("_version", "requires_grad"))
_is_leaf = cast("Callable[[Tensor], bool]", attrgetter("is_leaf"))
_hooks = cast("Callable[[Tensor], tuple[Any, Any]]", attrgetter("_backward_hooks", "_post_accumulate_grad_hooks"))


_NOTHING_HELD = torch.empty(0)


class _Graphed:
    """In the place of a tensor that has a graph. See NOTE [ A snapshot holds no graph ]."""

    __slots__ = ("_alias", "_tensor")

    def __init__(self, tensor: Tensor, *, holds: bool) -> None:
        self._tensor: ReferenceType[Tensor] = ref(tensor)
        self._alias = tensor.detach() if holds else _NOTHING_HELD

    @property
    def alias(self) -> Tensor:
        """The alias, of the same version."""
        return self._alias

    def shown(self) -> Tensor:
        """Return the tensor, or one like it."""
        tensor = self._tensor()
        return self._alias.detach().requires_grad_() if tensor is None else tensor


class Snapshot:
    """The world as a forward saw it.

    Args:
        world: What the call can reach.
        guard: What the user has named, some of which looks after itself.
        backs_up: Whether tensors are copied that a forward may write to, and those with a graph are held, which it
            takes to exchange; without, `put_back` writes to no tensor, and leaves get back their hooks and whether
            they require grad.

    Attributes:
        modules: What was reached.
        roots: Those of them that were named at once, and not through others.
        generators: What was reached.
        named: The ids of tensors inside of what the user has named.
        waits: Whether a lazy module is about to make its parameters, which nothing can take back.
        by_forward: The ids of tensors that the forward itself has written, and that are not copied.
        is_inert: Whether nothing in it can be changed by the call.
    """

    __slots__ = (
        "_backups",
        "_dicts",
        "_flags",
        "_graphed",
        "_guarded",
        "_leaf_hooks",
        "_leaves",
        "_own",
        "_rest",
        "_shards",
        "_tensors",
        "_then",
        "by_forward",
        "generators",
        "is_inert",
        "modules",
        "named",
        "roots",
        "waits",
    )

    def __init__(self, world: World, guard: Sequence[object] = (), *, backs_up: bool = True) -> None:
        is_inert = world.is_inert and not guard
        world.end()
        self.modules = world.modules
        self.roots = world.roots
        self.generators = world.generators
        self.named = frozenset(world.named)
        self.by_forward: frozenset[int] = frozenset()
        self._own = world.dicts
        self._rest = [(one, one.read()) for one in world.rest]
        self.is_inert = is_inert
        self._then: Dicts = Dicts(world.dicts)
        self._tensors = world.tensors
        self._flags = [*map(_flags, world.tensors)]
        self._shards: list[WatchedShard] = world.shards
        own = [cast("Guarded", one) for one in guard if looks_after_itself(one)] if guard else []
        self._guarded = [(one, one.snapshot()) for one in own]
        self._graphed: dict[int, _Graphed] = {}
        leaves = [] if backs_up else [*filter(_is_leaf, world.tensors)]
        self._leaves = tuple((one, one.requires_grad) for one in leaves) if leaves else ()
        self._leaf_hooks = _hooks_of(leaves) if leaves else None
        self._backups = Backups(world) if backs_up and (world.state or world.loose or world.named) else None
        if world.modules:
            listen_to_optimizers()  # See NOTE [ Optimizers that bump no version ]
        self.waits = world.waits
        if not all(map(_is_leaf, world.tensors)) and not is_transformed():  # there `detach` loses more than a graph
            graphed = [index for index, one in enumerate(world.tensors) if not one.is_leaf]
            self._let_graphs_go(graphed, holds=backs_up)

    @classmethod
    def of_cells(cls, cells: Iterable[CellType], contents: list[object]) -> Snapshot:
        """Return that of a world in which there are but cells, from what they held."""
        world = World()
        world.bindings.cells += cells
        found = cls(world)
        found._rest = [(world.bindings, contents)]
        return found

    def _let_graphs_go(self, places: Iterable[int], *, holds: bool) -> None:
        # See NOTE [ A snapshot holds no graph ]
        tensors = self._tensors = list(self._tensors)
        for place in places:
            tensor = tensors[place]
            held = self._graphed[id(tensor)] = _Graphed(tensor, holds=holds)
            tensors[place] = held.alias
        self._replace(self._graphed)

    def _replace(self, others: dict[int, Any]) -> None:
        self._then = self._then.with_values([other(one, others) for one in self._then.values])
        self._rest = [(one, with_others(before, others)) for one, before in self._rest]

    @property
    def containers(self) -> frozenset[int]:
        """The ids of the containers that are given back."""
        return frozenset([*map(id, self._own), *(id(one.item) for one, _ in self._rest)])

    @property
    def has_shards(self) -> bool:
        """Whether FSDP2 manages some of the parameters."""
        return bool(self._shards)

    def tensors(self) -> list[Tensor]:
        """Return the tensors; in the place of one that has a graph an alias without."""
        return self._tensors

    def settle(self) -> None:
        """Keep only what a recompute may need."""
        if [*map(_flags, self._tensors)] != self._flags:
            pairs = zip(self._tensors, self._flags, strict=True)
            self.by_forward = frozenset([id(one) for one, flag in pairs if one._version != flag[0]])
        backups = self._backups
        if backups is None:
            return
        backups.settle()
        if backups.written:
            copied: dict[int, Any] = {}
            for key, one in backups.written.items():
                held = self._graphed.pop(key, None)
                # Where a tensor with a graph was held, its place has been taken already.
                for stands in (key,) if held is None else (id(held), id(held.alias)):
                    copied[stands] = one
            self._replace(copied)
            pairs = zip(self._tensors, self._flags, strict=True)
            kept = [(one, flag) for one, flag in pairs if id(one) not in copied]
            self._tensors, self._flags = [one for one, _ in kept], [flag for _, flag in kept]
        if not backups:
            self._backups = None

    def replace(self, by: Callable[[Tensor], Tensor]) -> None:
        """Let each tensor that is watched be the one that `by` makes of it."""
        new = {id(one): made for one in self._tensors if (made := by(one)) is not one}
        if new:
            self._replace(new)
            pairs = zip(self._tensors, self._flags, strict=True)
            self._flags = [_flags(new[id(one)]) if id(one) in new else flag for one, flag in pairs]
            self._tensors = [new.get(id(one), one) for one in self._tensors]

    def words(self, error: WrittenError, name: str | None, region: str) -> str:
        """Return the words for a tensor that was written since and is read.

        Args:
            error: What was found.
            name: The tensor's, None if it has none.
            region: The words for the region.
        """
        tensor, by_forward = error.tensor, id(error.tensor) in self.by_forward
        shards = (one.shard.name or one.name for one in self._shards if one.sharded is tensor)
        name = name or next(shards, f"a tensor of shape {tuple(tensor.shape)}")
        if by_forward:
            return (
                f"{region}: its forward wrote `{name}` in place, which is not copied before each forward: it is a "
                "parameter, or large and was left alone the first time. So what it was is gone. Write out of place, "
                "or name the object or module that holds it in `guard=[...]`, so that its tensors are copied."
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
        for one in self._shards:
            yield from one.read_as()

    def put_back(self) -> None:
        """Let everything hold what it held, for good. No tensor is written to.

        What this package has put on modules meanwhile, or taken off, is left as it is, and so is all where a lazy
        module has made its parameters.
        """
        if self.waits:
            return
        shown: dict[int, Any] = {id(one): one.shown() for one in self._graphed.values()}
        ours = [(own, _ours(own)) for own in self._own]
        self._then.with_values([other(one, shown) for one in self._then.values]).write()
        for own, now in ours:
            for key in _ours(own).keys() - now.keys():
                dict.__delitem__(own, key)
            dict.update(own, now)  # some have an `update` that refuses
        for one, before in self._rest:
            one.write(with_others(before, shown))
        for one, flag in self._leaves:
            if one.requires_grad is not flag and one.is_leaf:
                one.requires_grad_(flag)
        _put_hooks_back([one for one, _ in self._leaves], self._leaf_hooks)
        for one, before in self._guarded:
            one.restore(before)

    # --------------------------------------------------------------------------------------------------- exchanging

    def exchange(self, *, without_gradients: bool = False) -> Exchange:
        """Let everything be what the forward saw, until the exchange is closed.

        Args:
            without_gradients: Whether the gradients of leaves are put aside meanwhile.

        Raises:
            UnsupportedError: A parameter is sharded now, and was not.
        """
        return Exchange(self, without_gradients)

    def written_since(self, now: Sequence[tuple[int, bool]]) -> Watched:
        """Return the tensors that are not at the version that they had."""
        found = Watched()
        for tensor, (then, _), (version, _) in zip(self._tensors, self._flags, now, strict=True):
            if version != then:
                found[id(tensor)] = WrittenError(tensor, then, version)
        for one in self._shards:
            version = one.version_now()
            if version is not None:
                error = WrittenError(one.sharded, one.version, version)
                for tensor in one.read_as():
                    found[id(tensor)] = error
            one.check_gathered()
        return found


class Exchange:
    """A world that is shown to a recompute in the place of today's.

    Attributes:
        written: The tensors that the forward could reach, were written since, and cannot be given back.
        wrote: Those that the recompute has written in place, once it is closed.
    """

    __slots__ = (
        "_aside",
        "_flags",
        "_hooks",
        "_now",
        "_rest",
        "_snapshot",
        "_stack",
        "_then",
        "_without_gradients",
        "written",
        "wrote",
    )

    def __init__(self, snapshot: Snapshot, without_gradients: bool) -> None:
        self._snapshot = snapshot
        self._without_gradients = without_gradients
        self._stack: ExitStack | None = None
        self._aside: list[tuple[Tensor, Tensor | None]] = []
        self.wrote: list[Tensor] = []
        self.written = _NONE
        if self._is_today():
            return
        with EXCHANGING:
            # Another thread may have shown its recompute something else until now.
            if self._is_today():
                return
            self._now = Dicts(snapshot._own)
            self._rest = [(one, one.read()) for one, _ in snapshot._rest]
            self._stack = ExitStack()
            try:
                self._show(self._stack)
            except BaseException:
                self.close()
                raise

    def _is_today(self) -> bool:
        """Look at today's world; return whether nothing has to be exchanged, and nobody is about to change it."""
        snapshot = self._snapshot
        self._flags = now = [*map(_flags, snapshot._tensors)]
        self._hooks = _hooks_of(snapshot._tensors) if now else None
        self.written = _NONE
        if now != snapshot._flags or snapshot._shards:
            self.written = snapshot.written_since(now)
        self._then = then, rest = self._what_was()
        if (
            now != snapshot._flags
            or snapshot._guarded
            or self._without_gradients
            or not then.are_here()
            or _differ(rest)
        ):
            return False
        self._now, self._rest = then, rest
        return not (_shown and _is_shown_elsewhere(snapshot))

    def _what_was(self) -> tuple[Dicts, list[tuple[Holder, Any]]]:
        """Return the contents that the forward saw, with what a recompute is shown in the place of some tensors."""
        snapshot = self._snapshot
        then, rest = snapshot._then, snapshot._rest
        if snapshot._backups is None and not snapshot._graphed:
            return then, rest
        shown = self._shown()
        if not shown:
            return then, rest
        then = then.with_values([other(one, shown) for one in then.values])
        return then, [(one, with_others(before, shown)) for one, before in rest]

    def _shown(self) -> dict[int, Any]:
        """Return what a recompute is shown in the place of other things, by their ids."""
        snapshot, shown = self._snapshot, dict[int, Any]()
        if snapshot._backups is not None:
            shown.update(snapshot._backups.shown(self.written))
            for key in shown.keys() & self.written.keys():
                del self.written[key]
        for key, one in snapshot._graphed.items():
            if key in shown:  # it is copied, and the forward still runs
                shown[id(one)] = shown.pop(key)
                self.written.pop(id(one.alias), None)
                continue
            shown[id(one)] = tensor = one.shown()
            if id(one.alias) in self.written:
                self.written[id(tensor)] = self.written[id(one.alias)]
        return shown

    def _show(self, stack: ExitStack) -> None:
        snapshot = self._snapshot
        stack.enter_context(EXCHANGING)
        then, rest = self._then
        changed: set[int] = set()
        stack.enter_context(_showing(changed))
        changed |= then.write()
        for one, before in rest:
            if not one.is_same(before):
                one.write(before)
                changed.add(id(one.item))
        for tensor, (_, flag), (_, had) in zip(snapshot._tensors, snapshot._flags, self._flags, strict=True):
            if flag is not had and tensor.is_leaf:
                tensor.requires_grad_(flag)
        if self._without_gradients:
            self._aside = [(one, one.grad) for one in snapshot._tensors if one.is_leaf and one.requires_grad]
            for tensor, _ in self._aside:
                tensor.grad = None
        for own, before in snapshot._guarded:
            stack.callback(own.restore, own.snapshot())
            own.restore(before)

    def close(self) -> None:
        """Let everything be what it was before."""
        with ExitStack() as stack:
            if self._stack is not None:
                stack.push(self._stack.pop_all().__exit__)
            elif self._snapshot.is_inert or not self._has_changed():
                return
            else:
                # Only if it is not another thread's doing.
                stack.enter_context(EXCHANGING)
            flags = zip(self._snapshot._tensors, map(_flags, self._snapshot._tensors), self._flags, strict=True)
            self.wrote = [one for one, (version, _), (had, _) in flags if version != had]
            for tensor, grad in self._aside:
                stack.callback(setattr, tensor, "grad", grad)
            stack.callback(self._put_back)

    def _has_changed(self) -> bool:
        """Return whether a recompute that was shown nothing has changed something."""
        tensors = self._snapshot._tensors
        return (
            not self._now.are_here()
            or self._hooks is not None
            or [*map(_flags, tensors)] != self._flags
            or _hooks_of(tensors) is not None
            or _differ(self._rest)
        )

    def _put_back(self) -> None:
        tensors = self._snapshot._tensors
        for tensor, (_, had), (_, flag) in zip(tensors, self._flags, map(_flags, tensors), strict=True):
            if flag is not had and tensor.is_leaf:
                tensor.requires_grad_(had)
        _put_hooks_back(tensors, self._hooks)
        if not self._now.are_here():
            self._now.write()
        for one, before in self._rest:
            if not one.is_same(before):
                one.write(before)


def _differ(rest: list[tuple[Holder, Any]]) -> bool:
    return any(not one.is_same(before) for one, before in rest)


def _ours(own: Dict) -> Dict:
    """Return the attributes that this package has put on a module."""
    found = {key: dict.__getitem__(own, key) for key in _PUT_ON if dict.__contains__(own, key)}
    return {key: one for key, one in found.items() if _module_of(one).startswith("torchremat.")}


def _module_of(one: object) -> str:
    return (one if isinstance(one, FunctionType) else type(one)).__module__ or ""


_PUT_ON = ("forward", "_compiled_call_impl", "_replicate_for_data_parallel")


# By thread, the ids of what its exchanges have changed for now.
_shown: dict[int, list[set[int]]] = {}


@contextmanager
def _showing(changed: set[int]) -> Generator[None]:
    mine = _shown.setdefault(get_ident(), [])
    mine.append(changed)
    try:
        yield
    finally:
        mine.pop()
        if not mine:
            del _shown[get_ident()]


def _is_shown_elsewhere(snapshot: Snapshot) -> bool:
    """Return whether another thread shows its recompute something in the place of what a snapshot has."""
    others = [changed for thread, each in list(_shown.items()) if thread != get_ident() for changed in each]
    return any(others) and any(not changed.isdisjoint(snapshot.containers) for changed in others)


def looks_after_itself(one: object) -> bool:
    """Return whether an object has `snapshot()` and `restore(state)`, and is no module."""
    return isinstance(one, Guarded) and not isinstance(one, nn.Module)


# Nothing is ever put into it.
_NONE = Watched()


def _hooks_of(tensors: list[Tensor]) -> list[tuple[Dict | None, Dict | None]] | None:
    """Return copies of the hooks of tensors, which a recompute must not add to; None if there are none."""
    found = [*map(_hooks, tensors)]
    if found.count(_NO_HOOKS) == len(found):
        return None
    return [
        (None if before is None else dict(before), None if after is None else dict(after)) for before, after in found
    ]


_NO_HOOKS = (None, None)


def _put_hooks_back(tensors: list[Tensor], hooks: list[tuple[Dict | None, Dict | None]] | None) -> None:
    found = [*map(_hooks, tensors)]
    if hooks is None and all(one == _NO_HOOKS for one in found):
        return
    for now, had in zip(found, hooks or [_NO_HOOKS] * len(found), strict=True):
        for own, before in zip(now, had, strict=True):
            if own is not None and own != (before or {}):
                own.clear()
                own.update(before or {})


def check_named(one: object) -> None:
    """Refuse to guard what has no contents that could be given back.

    Raises:
        UnsupportedError: It is a tensor, a class, a constant, or an object that shows none of its state.
    """
    if (
        isinstance(one, (Tensor, type))
        or (type(one).__module__ == "builtins" and type(one).__hash__ is not None)
        or not (
            isinstance(one, (Guarded, nn.Module, torch.Generator, *FOREIGN, *MUTABLE))
            or hasattr(one, "__dict__")
            or Slots.of(one) is not None
        )
    ):
        raise UnsupportedError(
            f"guard: {type(one).__name__} cannot be changed and given back its contents; name the object that holds "
            "it, or give it `snapshot()` and `restore(state)`."
        )


# Of what reaches nothing that could have a state.
NOTHING = Snapshot(World())
